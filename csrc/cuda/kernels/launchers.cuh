#pragma once

#include <cuda_runtime.h>

#include "cuda/cuda_api.hpp"
#include "cuda/kernels/scalars.hpp"

// What api.cu exports; the functions of CudaApi with the same names.
namespace fusedpg::cuda {

int launch_propose(const ProposeArgs* args, Stream stream);
int launch_prepare(const PrepareArgs* args, Stream stream);
int launch_pack(const PackArgs* args, Stream stream);
int launch_unpack(const UnpackArgs* args, Stream stream);
int launch_update_float(const UpdateArgs* args, Stream stream);
int launch_update_double(const UpdateArgs* args, Stream stream);
int launch_moments_float(const MomentsArgs* args, Stream stream);
int launch_moments_double(const MomentsArgs* args, Stream stream);
int launch_add_sums(const AddSumsArgs* args, Stream stream);
int launch_trust(const TrustArgs* args, Stream stream);
int launch_exchange(const ExchangeArgs* args, Stream stream);
int launch_direct_step(const DirectArgs* args, Stream stream);
int architecture(int* number);
int program_load(const ProgramLoadArgs* args, void** program);
int program_unload(void* program);
int program_launch(const ProgramLaunchArgs* args, Stream stream);

// The runtime keeps a thread's last error; it must not be taken for that of a
// later call.
inline int settled(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

// While it lives, this thread may make calls that some stream's capture forbids
// to all threads, or to this one. None of them reaches a captured stream.
class CaptureAside {
 public:
  CaptureAside() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~CaptureAside() {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  CaptureAside(const CaptureAside&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <typename Args>
int launch(
    void (*kernel)(Args),
    uint32_t blocks,
    const Args& args,
    Stream stream) {
  cudaLaunchConfig_t grid{};
  grid.gridDim = dim3(blocks);
  grid.blockDim = dim3(kThreads);
  grid.stream = static_cast<cudaStream_t>(stream);
  return settled(cudaLaunchKernelEx(&grid, kernel, args));
}

// Blocks of a kernel that the current device holds at once: registers may allow
// fewer than threads do.
cudaError_t resident_blocks(const void* kernel, uint64_t* blocks);

// Blocks that stride over `items`: what the device holds at once, at most.
template <typename Args>
int launch_over(
    void (*kernel)(Args),
    uint64_t items,
    const Args& args,
    Stream stream) {
  if (items == 0) {
    return kSuccess;
  }
  uint64_t most = 0;
  const cudaError_t error =
      resident_blocks(reinterpret_cast<const void*>(kernel), &most);
  if (error != cudaSuccess) {
    return settled(error);
  }
  return launch(
      kernel, static_cast<uint32_t>(items < most ? items : most), args, stream);
}

// The block's sum of `mine`. Ends with a barrier before the lanes may be used
// again.
__device__ __forceinline__ Sums block_sum(const Sums& mine, Sums* lanes) {
  const int thread = static_cast<int>(threadIdx.x);
  lanes[thread] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    fold_lanes(lanes, half, thread, kThreads);
  }
  __syncthreads();
  const Sums total = lanes[0];
  __syncthreads();
  return total;
}

} // namespace fusedpg::cuda
