#pragma once

#include "cuda/kernels/launchers.cuh"

// The update kernels of a compute type, instantiated by one file for each.
namespace fusedpg::cuda {

// As many as need next to no spills.
template <typename Rule, bool kFolds>
constexpr int kBlocksPerSm =
    kFolds || sizeof(typename Rule::Value) == sizeof(double) ? 2
    : Rule::kStates % 2 == 0                                 ? 4
                                                             : 3;

template <typename Rule, bool kFolds>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<Rule, kFolds>))
    update_kernel(const __grid_constant__ UpdateArgs args) {
  for (uint32_t tile = blockIdx.x; tile < args.chunk.num_tiles;
       tile += gridDim.x) {
    update_tile<Rule, kFolds>(
        args, tile, static_cast<int>(threadIdx.x), kThreads);
  }
}

template <typename C, bool kFolds>
__global__ void __launch_bounds__(
    kThreads,
    (kBlocksPerSm<kernels::LambRule<C, true>, kFolds>))
    moments_kernel(const __grid_constant__ MomentsArgs args) {
  FUSEDPG_SHARED(Sums[kThreads], lanes);
  for (uint32_t tile = blockIdx.x; tile < args.update.chunk.num_tiles;
       tile += gridDim.x) {
    const Sums total = block_sum(
        moments_tile<C, kFolds>(
            args, tile, static_cast<int>(threadIdx.x), kThreads),
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
    // Halves alone are folded, and LAMB's second half reads no gradient.
    if constexpr (Rule::kFirstHalf && sizeof(C) == sizeof(float)) {
      if (args->folds) {
        return launch_over(
            update_kernel<Rule, true>, args->chunk.num_tiles, *args, stream);
      }
    }
    return launch_over(
        update_kernel<Rule, false>, args->chunk.num_tiles, *args, stream);
  });
}

template <typename C>
int launch_moments(const MomentsArgs* args, Stream stream) {
  const uint32_t tiles = args->update.chunk.num_tiles;
  if constexpr (sizeof(C) == sizeof(float)) {
    if (args->update.folds) {
      return launch_over(moments_kernel<C, true>, tiles, *args, stream);
    }
  }
  return launch_over(moments_kernel<C, false>, tiles, *args, stream);
}

} // namespace fusedpg::cuda
