// The driver's functions for modules that are compiled at run time: images are
// those of the fake's NVRTC (nvrtc.cpp), libraries in hexadecimal digits.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "calls.hpp"
#include "cuda.h"
#include "image.hpp"
#include "simt/module_kernel.hpp"
#include "streams.hpp"

namespace fusedpg::fake {
namespace {

struct Module;
struct Function {
  fusedpg_fake::Kernel kernel;
  std::weak_ptr<Module> module;
};

struct Module {
  uint64_t number = 0; // of those that the process has loaded
  void* library = nullptr;
  int device = 0;
  std::vector<std::unique_ptr<Function>> functions;
};

// Modules of a process. Who launches holds them as well: streams until the
// kernel has run, graphs for as long as they live. Their code stays in memory.
struct Modules {
  std::mutex mutex;
  std::map<const void*, std::shared_ptr<Module>> modules;
  uint64_t next = 0;
  std::set<const void*> functions;
};

PerProcess<Modules> all_modules;

Modules& modules() {
  return all_modules.get();
}

CUresult mistake(CUresult code, const char* what) {
  calls().bad_handle(code, what);
  return code;
}

// What every call needs: the runtime makes the device's context the thread's.
bool in_context() {
  return has_context();
}

// Under a name of its own: dlopen takes equal names for one library.
void* open_image(const std::string& library) {
  std::string path =
      std::filesystem::temp_directory_path() / "fusedpg_fake.XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) {
    return nullptr;
  }
  const bool written = write(file, library.data(), library.size()) ==
      static_cast<ssize_t>(library.size());
  close(file);
  void* opened =
      written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
  unlink(path.c_str());
  return opened;
}

struct Log {
  char* text = nullptr;
  size_t bytes = 0;

  void say(const char* what) const {
    if (text != nullptr && bytes != 0) {
      std::snprintf(text, bytes, "%s", what);
    }
  }
};

const Function* find(CUfunction handle) {
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.functions.count(handle) == 0
      ? nullptr
      : reinterpret_cast<const Function*>(handle);
}

/** What a call does first that gets or frees memory, which no capture allows. */
CUresult begin(const char* name, const char* without_context) {
  if (const int fault = calls().enter(name); fault != 0) {
    return static_cast<CUresult>(fault);
  }
  if (!in_context()) {
    return mistake(CUDA_ERROR_INVALID_CONTEXT, without_context);
  }
  return static_cast<CUresult>(streams().check_unsafe());
}

} // namespace

size_t loaded_modules() {
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.modules.size();
}

/** How many modules the process has loaded. */
FUSEDPG_FAKE_EXPORT uint64_t fusedpg_fake_loaded() {
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.next;
}

/** How many of them are there that were loaded after the first `before`. */
FUSEDPG_FAKE_EXPORT uint64_t fusedpg_fake_modules_since(uint64_t before) {
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return static_cast<uint64_t>(std::count_if(
      all.modules.begin(), all.modules.end(), [before](const auto& one) {
        return one.second->number >= before;
      }));
}

bool& has_context() {
  thread_local bool current = false;
  return current;
}

} // namespace fusedpg::fake

using namespace fusedpg::fake; // NOLINT: these functions are CUDA's

CUresult cuModuleLoadDataEx(
    CUmodule* module,
    const void* image,
    unsigned num_options,
    CUjit_option* options,
    void** values) {
  if (const CUresult error =
          begin("cuModuleLoadDataEx", "a module without a context");
      error != CUDA_SUCCESS) {
    return error;
  }
  Log log;
  for (unsigned i = 0; i < num_options; ++i) {
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER) {
      log.text = static_cast<char*>(values[i]);
    } else if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) {
      log.bytes = reinterpret_cast<uintptr_t>(values[i]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const auto read = Image::read(static_cast<const char*>(image));
  if (!read) {
    log.say("ptxas application ptx input, line 1; fatal: Parsing error");
    return CUDA_ERROR_INVALID_PTX;
  }
  if (read->architecture > kFakeArchitecture) {
    log.say("ptxas fatal: SM version of the image is higher than the device's");
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  auto made = std::make_shared<Module>();
  made->library = open_image(read->library);
  made->device = current_device();
  if (made->library == nullptr) {
    log.say(dlerror());
    return CUDA_ERROR_INVALID_PTX;
  }
  *module = reinterpret_cast<CUmodule>(made.get());
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  made->number = all.next++;
  all.modules.emplace(made.get(), made);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(
    CUfunction* function,
    CUmodule module,
    const char* name) {
  if (!in_context()) {
    return mistake(CUDA_ERROR_INVALID_CONTEXT, "a function without a context");
  }
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.modules.find(module);
  if (found == all.modules.end()) {
    return mistake(CUDA_ERROR_INVALID_HANDLE, "no such module");
  }
  const std::string symbol = std::string("fusedpg_fake_") + name;
  const auto get = reinterpret_cast<void (*)(fusedpg_fake::Kernel*)>(
      dlsym(found->second->library, symbol.c_str()));
  if (get == nullptr) {
    return CUDA_ERROR_NOT_FOUND;
  }
  auto made = std::make_unique<Function>();
  get(&made->kernel);
  made->module = found->second;
  *function = reinterpret_cast<CUfunction>(made.get());
  all.functions.insert(made.get());
  found->second->functions.push_back(std::move(made));
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  if (const CUresult error =
          begin("cuModuleUnload", "an unload without a context");
      error != CUDA_SUCCESS) {
    return error;
  }
  Modules& all = modules();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.modules.find(module);
  if (found == all.modules.end()) {
    return mistake(CUDA_ERROR_INVALID_HANDLE, "no such module to unload");
  }
  if (found->second->device != current_device()) {
    return mistake(
        CUDA_ERROR_INVALID_CONTEXT, "a module of another device to unload");
  }
  if (found->second.use_count() > 1) {
    mistake(
        CUDA_ERROR_INVALID_HANDLE,
        "a module was unloaded that a stream or a graph has yet to run");
  }
  for (const auto& function : found->second->functions) {
    all.functions.erase(function.get());
  }
  all.modules.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(
    CUfunction function,
    size_t index,
    size_t* offset,
    size_t* size) {
  const Function* found = find(function);
  if (found == nullptr) {
    return mistake(CUDA_ERROR_INVALID_HANDLE, "no such kernel");
  }
  if (index >= found->kernel.parameters) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *offset = 0;
  for (size_t p = 0; p <= index; ++p) {
    const uint64_t bytes = found->kernel.sizes[p];
    *offset = (*offset + bytes - 1) / bytes * bytes; // aligned to their size
    *size = bytes;
    *offset += p < index ? bytes : 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks,
    CUfunction function,
    int threads,
    size_t /* shared */) {
  if (find(function) == nullptr) {
    return mistake(CUDA_ERROR_INVALID_HANDLE, "no such kernel");
  }
  if (threads <= 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *blocks = static_cast<int>(from_environment("FUSEDPG_FAKE_OCCUPANCY", 3));
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(
    CUfunction function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned shared_bytes,
    CUstream stream,
    void** parameters,
    void** extra) {
  if (!in_context()) {
    return mistake(CUDA_ERROR_INVALID_CONTEXT, "a launch without a context");
  }
  const Function* found = find(function);
  if (found == nullptr) {
    return mistake(CUDA_ERROR_INVALID_HANDLE, "no such kernel");
  }
  const std::shared_ptr<Module> module = found->module.lock();
  if (module == nullptr || module->device != current_device()) {
    return mistake(
        CUDA_ERROR_INVALID_HANDLE, "a kernel of another device's context");
  }
  const uint64_t count = found->kernel.parameters;
  if (extra != nullptr || (parameters == nullptr && count != 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The driver reads them now.
  auto values = std::make_shared<std::vector<std::vector<uint64_t>>>(count);
  for (uint64_t p = 0; p < count; ++p) {
    if (parameters[p] == nullptr) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t bytes = found->kernel.sizes[p];
    (*values)[p].resize((bytes + 7) / 8);
    std::memcpy((*values)[p].data(), parameters[p], bytes);
  }
  cudaLaunchConfig_t grid{};
  grid.gridDim = dim3(grid_x, grid_y, grid_z);
  grid.blockDim = dim3(block_x, block_y, block_z);
  grid.dynamicSmemBytes = shared_bytes;
  grid.stream = stream;
  return static_cast<CUresult>(
      simt::launch(grid, [kernel = found->kernel, module, values] {
        std::vector<const void*> given;
        for (const auto& value : *values) {
          given.push_back(value.data());
        }
        kernel.run(
            given.data(), {threadIdx.x, blockIdx.x, blockDim.x, gridDim.x});
      }));
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name,
    void** function,
    unsigned version,
    unsigned long long /* flags */,
    cudaDriverEntryPointQueryResult* status) {
  struct Entry {
    const char* name;
    unsigned version;
    void* function;
  };
#define FUSEDPG_ENTRY(name, version)               \
  {                                                \
    #name, version, reinterpret_cast<void*>(&name) \
  }
  static const Entry entries[] = {
      FUSEDPG_ENTRY(cuModuleLoadDataEx, 2010),
      FUSEDPG_ENTRY(cuModuleGetFunction, 2000),
      FUSEDPG_ENTRY(cuModuleUnload, 2000),
      FUSEDPG_ENTRY(cuFuncGetParamInfo, 12040),
      FUSEDPG_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050),
      FUSEDPG_ENTRY(cuLaunchKernel, 4000)};
#undef FUSEDPG_ENTRY
  *function = nullptr;
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) == 0) {
      const bool there = version >= entry.version;
      *function = there ? entry.function : nullptr;
      *status = there ? cudaDriverEntryPointSuccess
                      : cudaDriverEntryPointVersionNotSufficent;
      return cudaSuccess;
    }
  }
  *status = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
