#include "cuda/layout.hpp"

#include <algorithm>

#include "base/ownership.hpp"

namespace fusedpg::cuda {
namespace {

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
      layout_.max_block = std::max(layout_.max_block, current_.block);
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

// Sorts parts 0 ... n - 1 by their tensors; otherwise they keep their order.
template <typename TensorOf>
void list_by_tensor(
    size_t n,
    size_t tensors,
    const TensorOf& tensor_of,
    std::vector<uint32_t>& list,
    std::vector<uint32_t>& begin) {
  begin.assign(tensors + 1, 0);
  for (size_t i = 0; i < n; ++i) {
    ++begin[tensor_of(i) + 1];
  }
  for (size_t t = 0; t < tensors; ++t) {
    begin[t + 1] += begin[t];
  }
  std::vector<uint32_t> next = begin;
  list.resize(n);
  for (size_t i = 0; i < n; ++i) {
    list[next[tensor_of(i)]++] = static_cast<uint32_t>(i);
  }
}

} // namespace

Layout make_layout(
    const std::vector<size_t>& counts,
    int world_size,
    size_t max_block,
    size_t whole_from,
    size_t header) {
  Layout layout;
  Cutter cutter(layout, max_block);
  std::vector<size_t> whole;
  const auto shard = [&](size_t t) {
    return static_cast<size_t>(
        shard_size(static_cast<int64_t>(counts[t]), world_size));
  };
  for (size_t t = 0; t < counts.size(); ++t) {
    const bool exact = shard(t) * static_cast<size_t>(world_size) == counts[t];
    if (exact && counts[t] >= whole_from && shard(t) <= max_block) {
      whole.push_back(t);
    } else {
      cutter.add(t, shard(t));
    }
  }
  cutter.close();
  if (header != 0) {
    if (layout.chunks.empty()) {
      layout.chunks.emplace_back();
    }
    ChunkLayout& first = layout.chunks[0];
    first.header = header;
    layout.max_block = std::max(layout.max_block, first.block + header);
  }
  for (const size_t t : whole) {
    cutter.add_whole(t, shard(t));
  }
  const auto of_piece = [&](size_t i) { return layout.pieces[i].tensor; };
  const auto of_tile = [&](size_t i) {
    return of_piece(layout.tiles[i].piece);
  };
  const size_t tensors = counts.size();
  list_by_tensor(
      layout.tiles.size(),
      tensors,
      of_tile,
      layout.tile_list,
      layout.tile_begin);
  list_by_tensor(
      layout.pieces.size(),
      tensors,
      of_piece,
      layout.piece_list,
      layout.piece_begin);
  return layout;
}

} // namespace fusedpg::cuda
