#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    propose_kernel(const __grid_constant__ ProposeArgs args) {
  propose_items(
      args, blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
}

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ PrepareArgs args) {
  const uint32_t t = blockIdx.x * kThreads + threadIdx.x;
  if (t < prepare_calls(args)) {
    prepare_tensor(args, t);
  }
}

__global__ void __launch_bounds__(kThreads)
    add_sums_kernel(const __grid_constant__ AddSumsArgs args) {
  FUSEDPG_SHARED(Sums[kThreads], lanes);
  for (uint32_t t = blockIdx.x; t < args.num_tensors; t += gridDim.x) {
    const Sums total =
        block_sum(add_sums_lane(args, t, static_cast<int>(threadIdx.x)), lanes);
    if (threadIdx.x == 0) {
      args.sums[2 * t] = total.param;
      args.sums[2 * t + 1] = total.direction;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    trust_kernel(const __grid_constant__ TrustArgs args) {
  for (uint32_t t = blockIdx.x * kThreads + threadIdx.x; t < args.num_tensors;
       t += gridDim.x * kThreads) {
    trust_tensor(args, t);
  }
}

uint32_t blocks_for(uint32_t threads) {
  return (threads + kThreads - 1) / kThreads;
}

} // namespace

int launch_propose(const ProposeArgs* args, Stream stream) {
  const uint64_t items = uint64_t(args->copies) * args->items;
  return launch_over(
      propose_kernel, (items + kThreads - 1) / kThreads, *args, stream);
}

int launch_prepare(const PrepareArgs* args, Stream stream) {
  return launch(
      prepare_kernel, blocks_for(prepare_calls(*args)), *args, stream);
}

int launch_add_sums(const AddSumsArgs* args, Stream stream) {
  return launch_over(add_sums_kernel, args->num_tensors, *args, stream);
}

int launch_trust(const TrustArgs* args, Stream stream) {
  return launch_over(
      trust_kernel, blocks_for(args->num_tensors), *args, stream);
}

} // namespace fusedpg::cuda
