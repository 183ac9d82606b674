#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/launch.hpp"

namespace fusedpg::cuda {

using Stream = void*; // cudaStream_t
using Event = void*; // cudaEvent_t

constexpr uint32_t kCudaApiVersion = 10;
constexpr int kSuccess = 0;
constexpr int kNoMemory = 2; // cudaErrorMemoryAllocation
constexpr int kNotReady = 600; // cudaErrorNotReady
constexpr int kRelaxedCapture = 2; // cudaStreamCaptureModeRelaxed

// Everything the engine asks of CUDA: the runtime's calls it needs, and the
// kernels. libfusedpg_cuda.so exports it, and the tests' fake does. Functions
// return a CUDA error code and work on the calling thread's current device.
struct CudaApi {
  uint32_t version; // kCudaApiVersion
  uint32_t bytes; // sizeof(CudaApi)
  const char* name; // "cuda" or "fake"
  int32_t runtime_version;

  const char* (*error_string)(int error);
  int (*device_count)(int* count);
  int (*get_device)(int* device);
  int (*set_device)(int device);

  int (*stream_create)(Stream* stream); // non-blocking
  int (*stream_destroy)(Stream stream);
  int (*stream_synchronize)(Stream stream);
  int (*stream_wait_event)(Stream stream, Event event);
  // Which capture into a graph the stream is part of; 0: none.
  int (*stream_capture)(Stream stream, uint64_t* id);
  // What captures forbid this thread: swaps that with *mode.
  int (*exchange_capture_mode)(int* mode);

  int (*event_create)(Event* event); // without timing
  int (*event_destroy)(Event event);
  int (*event_record)(Event event, Stream stream);
  // kSuccess, kNotReady or an error. This and allocations must work while some
  // stream of the process is captured.
  int (*event_query)(Event event);

  int (*allocate)(void** memory, size_t bytes); // device memory
  int (*release)(void* memory);
  // Host memory that copies run asynchronously from, and that the device reads
  // and writes at the same address.
  int (*host_allocate)(void** memory, size_t bytes);
  int (*host_release)(void* memory);
  int (*copy)(void* dst, const void* src, size_t bytes, Stream stream);
  int (*clear)(void* memory, size_t bytes, Stream stream); // to zeros

  int (*propose)(const ProposeArgs* args, Stream stream);
  int (*prepare)(const PrepareArgs* args, Stream stream);
  int (*pack)(const PackArgs* args, Stream stream);
  int (*unpack)(const UnpackArgs* args, Stream stream);
  int (*update)(const UpdateArgs* args, Stream stream);
  int (*lamb_moments)(const MomentsArgs* args, Stream stream);
  int (*add_sums)(const AddSumsArgs* args, Stream stream);
  int (*trust)(const TrustArgs* args, Stream stream);

  // The device's, as 90 for 9.0.
  int (*architecture)(int* number);
  // For the current device, on which it is unloaded: when the device is done
  // with its launches, as that may wait for all that runs there.
  int (*program_load)(const ProgramLoadArgs* args, void** program);
  int (*program_unload)(void* program);
  int (*program_launch)(const ProgramLaunchArgs* args, Stream stream);

  // The direct path. All ranks launch the same, in the same order.
  int (*exchange)(const ExchangeArgs* args, Stream stream);
  int (*direct_step)(const DirectArgs* args, Stream stream);
};

// The name of the exported function, and its type.
constexpr const char* kCudaApiSymbol = "fusedpg_cuda_api";
using CudaApiFunction = const CudaApi* (*)();

// Loads the library once per path; empty: libfusedpg_cuda.so beside the engine,
// libfusedpg.so. Throws Error(kSystem) with what to do.
const CudaApi& load_cuda_api(const std::string& path);

} // namespace fusedpg::cuda
