#pragma once

#include "cuda/kernels/launchers.cuh"

// The update kernels of a compute type, instantiated by one file for each.
namespace fusedpg::cuda {

// As many as need next to no spills.
template <typename Rule>
constexpr int kBlocksPerSm = sizeof(typename Rule::Value) == sizeof(double) ? 2
    : Rule::kStates % 2 == 0                                                ? 4
                                                                            : 3;

template <typename Rule>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<Rule>)
    update_kernel(const __grid_constant__ UpdateArgs args) {
  for (uint32_t tile = blockIdx.x; tile < args.chunk.num_tiles;
       tile += gridDim.x) {
    update_tile<Rule>(args, tile, static_cast<int>(threadIdx.x), kThreads);
  }
}

template <typename C>
__global__ void __launch_bounds__(
    kThreads,
    kBlocksPerSm<kernels::LambRule<C, true>>)
    moments_kernel(const __grid_constant__ MomentsArgs args) {
  FUSEDPG_SHARED(Sums[kThreads], lanes);
  for (uint32_t tile = blockIdx.x; tile < args.update.chunk.num_tiles;
       tile += gridDim.x) {
    const Sums total = block_sum(
        moments_tile<C>(args, tile, static_cast<int>(threadIdx.x), kThreads),
        lanes);
    if (threadIdx.x == 0) {
      args.tile_sums[2 * tile] = total.param;
      args.tile_sums[2 * tile + 1] = total.direction;
    }
  }
}

template <typename C>
int launch_update(const UpdateArgs* args, Stream stream) {
  return with_rule<C>(*args, [&](auto tag) {
    using Rule = typename decltype(tag)::Type;
    return launch_over(
        update_kernel<Rule>, args->chunk.num_tiles, *args, stream);
  });
}

template <typename C>
int launch_moments(const MomentsArgs* args, Stream stream) {
  return launch_over(
      moments_kernel<C>, args->update.chunk.num_tiles, *args, stream);
}

} // namespace fusedpg::cuda
