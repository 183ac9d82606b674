#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

constexpr int kWarp = 32;

// A warp looks at a block.
__global__ void __launch_bounds__(kThreads)
    find_blocks_kernel(const __grid_constant__ FindBlocksArgs args) {
  FUSEDPG_SHARED(unsigned long long, present);
  if (threadIdx.x == 0) {
    present = 0;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint64_t warps = uint64_t(gridDim.x) * (kThreads / kWarp);
  unsigned long long mine = 0;
  for (uint64_t b = (uint64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       b < args.num_blocks;
       b += warps) {
    const uint32_t any = block_bits(args.tensor, b, lane, kWarp);
    const bool found = __any_sync(~0u, any != 0) != 0;
    if (lane == 0) {
      args.flags[b] = found ? 1 : 0;
      mine += found ? 1 : 0;
    }
  }
  if (args.present == nullptr) {
    return;
  }
  if (mine != 0) {
    atomicAdd(&present, mine);
  }
  __syncthreads();
  if (threadIdx.x == 0 && present != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.present), present);
  }
}

// One block of threads: the list is in ascending order.
__global__ void __launch_bounds__(kThreads)
    list_blocks_kernel(const __grid_constant__ ListBlocksArgs args) {
  FUSEDPG_SHARED(uint32_t[kThreads], counts);
  const int thread = static_cast<int>(threadIdx.x);
  counts[thread] = count_flags(args, thread, kThreads);
  __syncthreads();
  uint32_t before = 0;
  for (int i = 0; i < thread; ++i) {
    before += counts[i];
  }
  list_flags(args, before, thread, kThreads);
  if (thread == kThreads - 1) {
    args.found[0] = before + counts[thread];
    args.found[1] = *args.present;
  }
}

__global__ void __launch_bounds__(kThreads)
    move_blocks_kernel(const __grid_constant__ MoveBlocksArgs args) {
  for (uint32_t item = blockIdx.x; item < args.num_items; item += gridDim.x) {
    move_block(args, item, static_cast<int>(threadIdx.x), kThreads);
  }
}

} // namespace

int launch_find_blocks(const FindBlocksArgs* args, Stream stream) {
  const uint64_t warps = kThreads / kWarp;
  return launch_over(
      find_blocks_kernel,
      (args->num_blocks + warps - 1) / warps,
      *args,
      stream);
}

int launch_list_blocks(const ListBlocksArgs* args, Stream stream) {
  return launch(list_blocks_kernel, 1, *args, stream);
}

int launch_move_blocks(const MoveBlocksArgs* args, Stream stream) {
  return launch_over(move_blocks_kernel, args->num_items, *args, stream);
}

} // namespace fusedpg::cuda
