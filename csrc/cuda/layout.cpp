#include "cuda/layout.hpp"

#include <algorithm>

#include "base/ownership.hpp"

namespace fusedpg::cuda {
namespace {

constexpr size_t kLongestWhole = 4; // blocks

class Cutter {
 public:
  Cutter(Layout& layout, size_t max_block)
      : layout_(layout),
        max_block_(
            std::max<size_t>(
                max_block / kShardAlignment * kShardAlignment,
                kShardAlignment)) {}

  void add_whole(size_t tensor, size_t shard) {
    close();
    add_piece(tensor, 0, shard);
    current_.whole = true;
    current_.tensor = tensor;
    layout_.max_whole_shard = std::max(layout_.max_whole_shard, shard);
    close();
  }

  void add(size_t tensor, size_t shard) {
    for (size_t begin = 0; begin < shard;) {
      if (current_.block == max_block_) {
        close();
      }
      const size_t length =
          std::min(shard - begin, max_block_ - current_.block);
      add_piece(tensor, begin, length);
      begin += length;
    }
  }

  void close() {
    if (current_.block != 0) {
      if (!current_.whole) {
        layout_.max_block = std::max(layout_.max_block, current_.block);
      }
      layout_.chunks.push_back(current_);
    }
    current_ = ChunkLayout();
    current_.first_tile = layout_.tiles.size();
  }

 private:
  void add_piece(size_t tensor, size_t begin, size_t length) {
    const auto piece = static_cast<uint32_t>(layout_.pieces.size());
    layout_.pieces.push_back(
        {static_cast<uint32_t>(tensor), 0, begin, length, current_.block});
    const auto tiles = static_cast<uint32_t>((length + kTile - 1) / kTile);
    for (uint32_t i = 0; i < tiles; ++i) {
      layout_.tiles.push_back({piece, i});
    }
    current_.num_tiles += tiles;
    current_.block += length;
  }

  Layout& layout_;
  const size_t max_block_;
  ChunkLayout current_;
};

void list_tiles(Layout& layout, size_t tensors) {
  layout.tile_begin.assign(tensors + 1, 0);
  for (const Tile& tile : layout.tiles) {
    ++layout.tile_begin[layout.pieces[tile.piece].tensor + 1];
  }
  for (size_t t = 0; t < tensors; ++t) {
    layout.tile_begin[t + 1] += layout.tile_begin[t];
  }
  std::vector<uint32_t> next = layout.tile_begin;
  layout.tile_list.resize(layout.tiles.size());
  for (size_t i = 0; i < layout.tiles.size(); ++i) {
    layout.tile_list[next[layout.pieces[layout.tiles[i].piece].tensor]++] =
        static_cast<uint32_t>(i);
  }
}

} // namespace

Layout make_layout(
    const std::vector<size_t>& counts,
    int world_size,
    size_t max_block,
    size_t whole_from) {
  Layout layout;
  Cutter cutter(layout, max_block);
  for (size_t t = 0; t < counts.size(); ++t) {
    const auto shard = static_cast<size_t>(
        shard_size(static_cast<int64_t>(counts[t]), world_size));
    const bool exact = shard * static_cast<size_t>(world_size) == counts[t];
    if (exact && counts[t] >= whole_from &&
        shard <= kLongestWhole * max_block) {
      cutter.add_whole(t, shard);
    } else {
      cutter.add(t, shard);
    }
  }
  cutter.close();
  list_tiles(layout, counts.size());
  return layout;
}

} // namespace fusedpg::cuda
