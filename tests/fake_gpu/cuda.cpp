// The fake's runtime of CUDA, and its CudaApi: the one of csrc/cuda/kernels,
// whose calls are counted and may fail.

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "calls.hpp"
#include "comm.hpp"
#include "cuda_runtime.h"
#include "image.hpp"
#include "memory.hpp"
#include "streams.hpp"

// api.cu's.
extern "C" const fusedpg::cuda::CudaApi* fusedpg_kernels_api();

namespace {

constexpr int kNoDevice = 100;

cudaError_t code(int error) {
  return static_cast<cudaError_t>(error);
}

} // namespace

using namespace fusedpg; // NOLINT: these functions are CUDA's
using namespace fusedpg::fake; // NOLINT

const char* cudaGetErrorString(cudaError_t error) {
  static constexpr std::pair<int, const char*> kTexts[] = {
      {cuda::kSuccess, "no error"},
      {kInvalidValue, "invalid argument"},
      {kOutOfMemory, "out of memory"},
      {kNoDevice, "no CUDA-capable device is detected"},
      {kInvalidDevice, "invalid device ordinal"},
      {201, "invalid device context"},
      {209, "no kernel image is available for execution on the device"},
      {218, "a PTX JIT compilation failed"},
      {kInvalidHandle, "invalid resource handle"},
      {500, "named symbol not found"},
      {cuda::kNotReady, "device not ready"},
      {kIllegalAddress, "an illegal memory access was encountered"},
      {kCaptureUnsupported, "operation not permitted when stream is capturing"},
      {kCaptureInvalidated,
       "operation failed due to a previous error during capture"},
      {kCaptureMerge,
       "operation would result in a merge of separate capture sequences"},
      {kCaptureUnmatched,
       "capture was not ended in the same stream as it began"},
      {kCaptureUnjoined, "capturing stream has unjoined work"},
      {kCaptureIsolation,
       "dependency created on uncaptured work in another stream"},
      {kCapturedEvent,
       "operation not permitted on an event last recorded in a capturing "
       "stream"},
      {kCaptureWrongThread,
       "attempt to terminate a thread-local capture sequence from another "
       "thread"},
      {kUnknownError, "unknown error"}};
  for (const auto& [code, text] : kTexts) {
    if (code == static_cast<int>(error)) {
      return text;
    }
  }
  return "unrecognized error code";
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode());
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return code(*count == 0 ? kNoDevice : 0);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) {
    return code(kInvalidDevice);
  }
  current_device() = device;
  has_context() = true;
  return cudaSuccess;
}

// Of multiprocessors there are so few (FUSEDPG_FAKE_SMS), and of blocks that fit
// on each (FUSEDPG_FAKE_OCCUPANCY), that blocks have several items.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = kFakeArchitecture / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = kFakeArchitecture % 10;
      break;
    default:
      *value = static_cast<int>(from_environment("FUSEDPG_FAKE_SMS", 1));
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks,
    const void*,
    int,
    size_t) {
  calls().enter("occupancy");
  *blocks = static_cast<int>(from_environment("FUSEDPG_FAKE_OCCUPANCY", 3));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return code(streams().create(reinterpret_cast<void**>(stream)));
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return code(streams().destroy(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return code(streams().synchronize(stream));
}

cudaError_t cudaStreamWaitEvent(
    cudaStream_t stream,
    cudaEvent_t event,
    unsigned) {
  return code(streams().wait(stream, event));
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* id) {
  return code(streams().capture_info(stream, status, id));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return code(streams().create_event(reinterpret_cast<void**>(event)));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return code(streams().destroy_event(event));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  has_context() = true;
  return code(streams().record(event, stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return code(streams().query(event));
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  return code(memory().allocate(out, bytes));
}

cudaError_t cudaFree(void* block) {
  return code(memory().release(block));
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return code(memory().host_allocate(out, bytes));
}

cudaError_t cudaFreeHost(void* block) {
  return code(memory().host_release(block));
}

cudaError_t cudaMemcpyAsync(
    void* dst,
    const void* src,
    size_t bytes,
    cudaMemcpyKind,
    cudaStream_t stream) {
  return code(
      streams().enqueue(stream, [=] { std::memmove(dst, src, bytes); }));
}

cudaError_t cudaMemsetAsync(
    void* block,
    int value,
    size_t bytes,
    cudaStream_t stream) {
  return code(
      streams().enqueue(stream, [=] { std::memset(block, value, bytes); }));
}

namespace fusedpg::fake {

using namespace cuda; // NOLINT: the launch arguments' names

namespace {

// A function of the table that counts the call, and makes its fault or calls
// the one that was there.
template <auto kMember>
struct Faulty;
template <typename... Args, int (*CudaApi::*kMember)(Args...)>
struct Faulty<kMember> {
  static inline const char* name;
  static inline int (*behind)(Args...);

  static int call(Args... args) {
    const int fault = calls().enter(name);
    const int code = fault != 0 ? fault : behind(args...);
    return calls().sticky != 0 ? calls().sticky.load() : code;
  }
};

// A kernel that waits for other ranks' kernels: an operation of those that
// fusedpg_fake_stall() counts. In so few blocks that each has several tiles.
template <auto kKernel, typename Args>
int among_ranks(const Args* args, Stream stream) {
  return streams().enqueue(
      stream,
      [copied = *args] {
        const int stall = calls().begin(copied.peers.rank);
        std::this_thread::sleep_for(std::chrono::milliseconds(stall));
        const simt::AtOnce scope(3);
        if ((fusedpg_kernels_api()->*kKernel)(&copied, nullptr) != kSuccess) {
          calls().bad_handle(0, "arguments that the direct path refuses");
        }
      },
      current_device());
}

struct Table : CudaApi {
  Table() : CudaApi(*fusedpg_kernels_api()) {
    name = "fake";
    CudaApi::exchange = among_ranks<&CudaApi::exchange>;
    CudaApi::direct_step = among_ranks<&CudaApi::direct_step>;
#define FUSEDPG_FAULTY(member) wrap<&CudaApi::member>(#member)
    FUSEDPG_FAULTY(device_count);
    FUSEDPG_FAULTY(get_device);
    FUSEDPG_FAULTY(set_device);
    FUSEDPG_FAULTY(stream_create);
    FUSEDPG_FAULTY(stream_destroy);
    FUSEDPG_FAULTY(stream_synchronize);
    FUSEDPG_FAULTY(stream_wait_event);
    FUSEDPG_FAULTY(stream_capture);
    FUSEDPG_FAULTY(event_create);
    FUSEDPG_FAULTY(event_destroy);
    FUSEDPG_FAULTY(event_record);
    FUSEDPG_FAULTY(event_query);
    FUSEDPG_FAULTY(allocate);
    FUSEDPG_FAULTY(release);
    FUSEDPG_FAULTY(host_allocate);
    FUSEDPG_FAULTY(host_release);
    FUSEDPG_FAULTY(copy);
    FUSEDPG_FAULTY(clear);
    FUSEDPG_FAULTY(propose);
    FUSEDPG_FAULTY(prepare);
    FUSEDPG_FAULTY(pack);
    FUSEDPG_FAULTY(unpack);
    FUSEDPG_FAULTY(update);
    FUSEDPG_FAULTY(lamb_moments);
    FUSEDPG_FAULTY(add_sums);
    FUSEDPG_FAULTY(trust);
    FUSEDPG_FAULTY(architecture);
    FUSEDPG_FAULTY(program_load);
    FUSEDPG_FAULTY(program_unload);
    FUSEDPG_FAULTY(program_launch);
    FUSEDPG_FAULTY(exchange);
    FUSEDPG_FAULTY(direct_step);
#undef FUSEDPG_FAULTY
  }

  template <auto kMember>
  void wrap(const char* of) {
    Faulty<kMember>::name = of;
    Faulty<kMember>::behind = this->*kMember;
    this->*kMember = Faulty<kMember>::call;
  }
};

PerProcess<Table> table;

} // namespace

FUSEDPG_FAKE_EXPORT const CudaApi* fusedpg_cuda_api() {
  return &table.get();
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_stats(Stats* stats) {
  *stats = Stats{};
  streams().fill(*stats);
  memory().fill(*stats);
  stats->communicators = comms().size();
  stats->modules = loaded_modules();
  calls().fill(*stats);
}

FUSEDPG_FAKE_EXPORT uint64_t fusedpg_fake_reset() {
  streams().reset();
  Stats s{};
  fusedpg_fake_stats(&s);
  calls().reset(); // after stats, which look at freed memory
  return s.device_allocations + s.host_allocations + s.streams + s.events +
      s.graphs + s.communicators + s.modules;
}

} // namespace fusedpg::fake
