// Finds libfusedpg_cuda.so and libnccl and the functions in them.

#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "base/error.hpp"
#include "cuda/cuda_api.hpp"
#include "cuda/nccl_api.hpp"

namespace fusedpg::cuda {
namespace {

constexpr int kOldestNccl = 22800; // of the oldest torch

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOwnFirst = 0; // which sanitizers refuse
#else
constexpr int kOwnFirst = RTLD_DEEPBIND;
#endif

std::string dl_error() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

// Libraries stay loaded until the process ends: their threads and exit handlers
// may still run.
template <typename Api, typename Load>
const Api& load_once(const std::string& path, const Load& load) {
  static auto* mutex = new std::mutex();
  static auto* loaded = new std::map<std::string, std::unique_ptr<Api>>();
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Api>& api = (*loaded)[path];
  if (!api) {
    api = std::make_unique<Api>(load(path));
  }
  return *api;
}

// The file beside this library. The loader found this library by a run path
// with `..` in it, which an error message need not show.
std::string kernel_library() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&kernel_library), &here);
  const auto engine = std::filesystem::weakly_canonical(here.dli_fname);
  return engine.parent_path() / "libfusedpg_cuda.so";
}

CudaApi load_cuda(const std::string& named) {
  const std::string path = named.empty() ? kernel_library() : named;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(
        ErrorKind::kSystem,
        "fused: cannot load the CUDA kernels: {}. CUDA tensors need fusedpg to "
        "be built where nvcc is on PATH; FUSEDPG_CUDA_LIB names another "
        "libfusedpg_cuda.so",
        dl_error());
  }
  const auto get =
      reinterpret_cast<CudaApiFunction>(dlsym(library, kCudaApiSymbol));
  const CudaApi* api = get == nullptr ? nullptr : get();
  if (api == nullptr || api->version != kCudaApiVersion ||
      api->bytes != sizeof(CudaApi)) {
    fail(
        ErrorKind::kSystem,
        "fused: {} was built from another version of fusedpg; build both again",
        path);
  }
  return *api;
}

void* open_nccl(const std::string& path) {
  if (!path.empty()) {
    // Local symbols: torch's own libnccl must not find these; and it must not
    // find torch's, which are global, for the functions it exports itself.
    return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | kOwnFirst);
  }
  // torch's, if it has loaded one.
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  return library != nullptr ? library
                            : dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
}

NcclApi load_nccl(const std::string& path) {
  // Before this loads one itself.
  const void* loaded = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  void* library = open_nccl(path);
  if (library == nullptr) {
    fail(
        ErrorKind::kSystem,
        "fused: cannot load NCCL: {}. Install nvidia-nccl-cu12 or -cu13 "
        "(torch's CUDA wheels bring it), or set FUSEDPG_NCCL_LIB to a "
        "libnccl.so.2",
        dl_error());
  }
  NcclApi api;
  const auto find = [library](auto& function, const char* name) {
    using Function = std::remove_reference_t<decltype(function)>;
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  };
  bool complete = true;
  const auto require = [&](auto& function, const char* name) {
    complete = find(function, name) && complete;
  };
  require(api.get_version, "ncclGetVersion");
  require(api.get_error_string, "ncclGetErrorString");
  require(api.comm_get_async_error, "ncclCommGetAsyncError");
  require(api.group_start, "ncclGroupStart");
  require(api.group_simulate_end, "ncclGroupSimulateEnd");
  if (!complete || api.get_version(&api.version) != kNcclSuccess ||
      api.version < kOldestNccl) {
    fail(
        ErrorKind::kSystem,
        "fused: NCCL 2.28 or newer is needed, found {}{}",
        complete ? formatted("version code {}", api.version)
                 : "a library without it",
        path.empty() ? "" : " in " + path);
  }
  find(api.get_last_error, "ncclGetLastError");
  find(api.ring_abi, "ncclFusedpgAbi");
  find(api.reduce_scatter_update, "ncclFusedpgReduceScatterUpdate");
  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(api.get_version), &where) != 0) {
    api.path = where.dli_fname;
  }
  // A torch for CUDA may have an NCCL linked into it, which nobody else can call,
  // beside a libnccl that somebody else has loaded: what its own library finds is
  // what it uses.
  void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  api.is_torchs = torch != nullptr ? dlsym(torch, "ncclGetVersion") ==
          reinterpret_cast<void*>(api.get_version)
                                   : loaded == nullptr || loaded == library;
  return api;
}

} // namespace

// NCCL has no function that tells. But only the outermost end of a group looks
// at the argument of ncclGroupSimulateEnd, and refuses this one; an inner end
// leaves the group as it was.
bool NcclApi::in_group() const {
  NcclSimInfo invalid;
  return group_start() == kNcclSuccess &&
      group_simulate_end(&invalid) == kNcclSuccess;
}

bool NcclApi::has_ring() const {
  return ring_abi && reduce_scatter_update && ring_abi() == kRingAbi;
}

const CudaApi& load_cuda_api(const std::string& path) {
  return load_once<CudaApi>(path, load_cuda);
}

const NcclApi& load_nccl_api(const std::string& path) {
  return load_once<NcclApi>(path, load_nccl);
}

} // namespace fusedpg::cuda
