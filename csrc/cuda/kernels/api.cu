// The exported table: CUDA's runtime and the kernels.

#include <map>
#include <mutex>
#include <utility>

#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

cudaStream_t to_cuda(Stream stream) {
  return static_cast<cudaStream_t>(stream);
}

cudaEvent_t event_of(Event event) {
  return static_cast<cudaEvent_t>(event);
}

const char* error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int device_count(int* count) {
  *count = 0;
  return settled(cudaGetDeviceCount(count));
}

int get_device(int* device) {
  return settled(cudaGetDevice(device));
}

int set_device(int device) {
  return settled(cudaSetDevice(device));
}

int stream_create(Stream* stream) {
  const CaptureAside aside;
  cudaStream_t created = nullptr;
  const cudaError_t error =
      cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
  *stream = created;
  return settled(error);
}

int stream_destroy(Stream stream) {
  const CaptureAside aside;
  return settled(cudaStreamDestroy(to_cuda(stream)));
}

int stream_synchronize(Stream stream) {
  const CaptureAside aside;
  return settled(cudaStreamSynchronize(to_cuda(stream)));
}

int stream_wait_event(Stream stream, Event event) {
  return settled(cudaStreamWaitEvent(to_cuda(stream), event_of(event), 0));
}

int stream_capture(Stream stream, uint64_t* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0; // NOLINT: CUDA's type
  const cudaError_t error =
      cudaStreamGetCaptureInfo(to_cuda(stream), &status, &number);
  // A capture that an error has ended has no number.
  *id = status == cudaStreamCaptureStatusNone ? 0 : number + 1;
  return settled(error);
}

int exchange_capture_mode(int* mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const int error = settled(cudaThreadExchangeStreamCaptureMode(&exchanged));
  *mode = exchanged;
  return error;
}

int event_create(Event* event) {
  const CaptureAside aside;
  cudaEvent_t created = nullptr;
  const cudaError_t error =
      cudaEventCreateWithFlags(&created, cudaEventDisableTiming);
  *event = created;
  return settled(error);
}

int event_destroy(Event event) {
  const CaptureAside aside;
  return settled(cudaEventDestroy(event_of(event)));
}

int event_record(Event event, Stream stream) {
  return settled(cudaEventRecord(event_of(event), to_cuda(stream)));
}

int event_query(Event event) {
  const CaptureAside aside;
  return settled(cudaEventQuery(event_of(event)));
}

int allocate(void** memory, size_t bytes) {
  const CaptureAside aside;
  *memory = nullptr;
  return settled(cudaMalloc(memory, bytes));
}

int release(void* memory) {
  const CaptureAside aside;
  return settled(cudaFree(memory));
}

int host_allocate(void** memory, size_t bytes) {
  const CaptureAside aside;
  *memory = nullptr;
  return settled(cudaHostAlloc(
      memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
}

int host_release(void* memory) {
  const CaptureAside aside;
  return settled(cudaFreeHost(memory));
}

int copy(void* dst, const void* src, size_t bytes, Stream stream) {
  return settled(
      cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, to_cuda(stream)));
}

int clear(void* memory, size_t bytes, Stream stream) {
  return settled(cudaMemsetAsync(memory, 0, bytes, to_cuda(stream)));
}

int update(const UpdateArgs* args, Stream stream) {
  return args->param_type == DType::kFloat64
      ? launch_update_double(args, stream)
      : launch_update_float(args, stream);
}

int lamb_moments(const MomentsArgs* args, Stream stream) {
  return args->update.param_type == DType::kFloat64
      ? launch_moments_double(args, stream)
      : launch_moments_float(args, stream);
}

} // namespace

cudaError_t resident_blocks(const void* kernel, uint64_t* blocks) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, uint64_t> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  uint64_t& most = known[{kernel, device}];
  if (error == cudaSuccess && most == 0) {
    int sms = 0;
    int on_each = 0;
    error =
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &on_each, kernel, kThreads, 0);
    }
    most = static_cast<uint64_t>(sms) * static_cast<uint64_t>(on_each);
  }
  *blocks = most;
  return error;
}

namespace {

constexpr CudaApi make_api() {
  CudaApi api{};
  api.version = kCudaApiVersion;
  api.bytes = sizeof(CudaApi);
  api.name = "cuda";
  api.runtime_version = CUDART_VERSION;

  api.error_string = error_string;
  api.device_count = device_count;
  api.get_device = get_device;
  api.set_device = set_device;

  api.stream_create = stream_create;
  api.stream_destroy = stream_destroy;
  api.stream_synchronize = stream_synchronize;
  api.stream_wait_event = stream_wait_event;
  api.stream_capture = stream_capture;
  api.exchange_capture_mode = exchange_capture_mode;

  api.event_create = event_create;
  api.event_destroy = event_destroy;
  api.event_record = event_record;
  api.event_query = event_query;

  api.allocate = allocate;
  api.release = release;
  api.host_allocate = host_allocate;
  api.host_release = host_release;
  api.copy = copy;
  api.clear = clear;

  api.propose = launch_propose;
  api.prepare = launch_prepare;
  api.pack = launch_pack;
  api.unpack = launch_unpack;
  api.update = update;
  api.lamb_moments = lamb_moments;
  api.add_sums = launch_add_sums;
  api.trust = launch_trust;

  api.architecture = architecture;
  api.program_load = program_load;
  api.program_unload = program_unload;
  api.program_launch = program_launch;

  api.exchange = launch_exchange;
  api.direct_step = launch_direct_step;
  return api;
}

constexpr CudaApi kApi = make_api();

} // namespace
} // namespace fusedpg::cuda

extern "C" __attribute__((visibility("default"))) const fusedpg::cuda::CudaApi*
fusedpg_cuda_api() {
  return &fusedpg::cuda::kApi;
}
