#pragma once

#include <cstddef>
#include <vector>

#include "cuda/launch.hpp"

namespace fusedpg::cuda {

// A part of a list of tensors that goes over the wire at once.
struct ChunkLayout {
  size_t first_tile = 0;
  size_t num_tiles = 0;
  size_t block = 0; // elements of a rank's block on the wire
  size_t header = 0; // and those behind it, where gradients are sent
  // The chunk is one tensor whose shards fill it exactly, so that NCCL can read
  // the gradient where it lies: nothing to pack. It must not write to the
  // parameter: whether ranks agree only the device knows by then.
  bool whole = false;
  size_t tensor = 0; // if `whole`
};

// How a list of tensors is cut into chunks, pieces and tiles. A function of the
// counts, the world size and the chunk size alone, so the same on all ranks.
struct Layout {
  std::vector<ShardPiece> pieces;
  std::vector<Tile> tiles; // of chunk after chunk
  std::vector<ChunkLayout> chunks;
  size_t max_block = 0; // over the chunks, with headers
  // For sums over tensors: the tiles of tensor t are tile_list[tile_begin[t]]
  // up to tile_begin[t + 1]; and its pieces.
  std::vector<uint32_t> tile_list;
  std::vector<uint32_t> tile_begin;
  std::vector<uint32_t> piece_list;
  std::vector<uint32_t> piece_begin;
};

// Blocks are of at most `max_block` elements. Tensors of `whole_from` elements
// or more may become whole chunks, which come behind the packed ones: the first
// chunk has a header of `header` elements, which a whole one has no room for. If
// none is packed, it has nothing else.
Layout make_layout(
    const std::vector<size_t>& counts,
    int world_size,
    size_t max_block,
    size_t whole_from,
    size_t header = 0);

} // namespace fusedpg::cuda
