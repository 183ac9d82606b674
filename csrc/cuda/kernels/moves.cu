#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

// Items are the tiles of block after block.

__global__ void __launch_bounds__(kThreads, 3)
    pack_kernel(const __grid_constant__ PackArgs args) {
  const uint32_t tiles = args.chunk.num_tiles;
  const uint32_t items = tiles * args.chunk.size;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    pack_tile(
        args,
        item % tiles,
        static_cast<int>(item / tiles),
        static_cast<int>(threadIdx.x),
        kThreads);
  }
}

template <bool kFolds>
__global__ void __launch_bounds__(kThreads, kFolds ? 2 : 3)
    unpack_kernel(const __grid_constant__ UnpackArgs args) {
  const uint32_t tiles = args.chunk.num_tiles;
  const uint32_t items = tiles * unpack_blocks(args);
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    unpack_tile<kFolds>(
        args,
        item % tiles,
        static_cast<int>(item / tiles),
        static_cast<int>(threadIdx.x),
        kThreads);
  }
}

} // namespace

int launch_pack(const PackArgs* args, Stream stream) {
  const uint64_t items = uint64_t(args->chunk.num_tiles) * args->chunk.size;
  return launch_over(pack_kernel, items, *args, stream);
}

int launch_unpack(const UnpackArgs* args, Stream stream) {
  const uint64_t items = uint64_t(args->chunk.num_tiles) * unpack_blocks(*args);
  return launch_over(
      args->folds ? unpack_kernel<true> : unpack_kernel<false>,
      items,
      *args,
      stream);
}

} // namespace fusedpg::cuda
