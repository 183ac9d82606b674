#pragma once

// What the .cu files need of CUDA, for the ordinary C++ compiler: the runtime's
// functions (the fake's, cuda.cpp), and what a kernel is written in (simt.hpp).

#include <cstddef>
#include <functional>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define CUDART_VERSION 12080

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x),
        y(y),
        z(z) {}
  unsigned x;
  unsigned y;
  unsigned z;
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999
};
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  kCaptureActive,
  kCaptureStatusInvalidated
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2
};
constexpr unsigned long long cudaEnableDefault = 0;
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocPortable = 1;
constexpr unsigned cudaHostAllocMapped = 2;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(
    int* value,
    cudaDeviceAttr attribute,
    int device);
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name,
    void** function,
    unsigned version,
    unsigned long long flags,
    cudaDriverEntryPointQueryResult* status);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks,
    const void* kernel,
    int threads,
    size_t shared_bytes);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(
    cudaStream_t stream,
    cudaEvent_t event,
    unsigned flags);
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* id);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyAsync(
    void* dst,
    const void* src,
    size_t bytes,
    cudaMemcpyKind kind,
    cudaStream_t stream);
cudaError_t cudaMemsetAsync(
    void* memory,
    int value,
    size_t bytes,
    cudaStream_t stream);

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

#include "simt.hpp"

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config,
    void (*kernel)(Parameters...),
    Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096);
  return simt::launch(
      *config,
      [kernel,
       copies = std::tuple<Parameters...>(std::forward<Arguments>(
           arguments)...)] { std::apply(kernel, copies); });
}
