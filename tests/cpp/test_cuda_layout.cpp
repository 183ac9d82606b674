#include <algorithm>
#include <map>
#include <random>

#include "base/ownership.hpp"
#include "check.hpp"
#include "cuda/block_list.hpp"
#include "cuda/layout.hpp"

// How the CUDA engine cuts lists of tensors, and the memory of arenas.
namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

namespace {

constexpr auto kAligned = static_cast<size_t>(kShardAlignment);

struct Input {
  std::vector<size_t> counts;
  int size;
  size_t max_block;
  size_t whole_from;

  size_t shard(size_t t) const {
    return static_cast<size_t>(
        shard_size(static_cast<int64_t>(counts[t]), size));
  }
  bool exact(size_t t) const {
    return shard(t) * static_cast<size_t>(size) == counts[t];
  }
  size_t longest() const {
    return std::max(max_block / kAligned * kAligned, kAligned);
  }
};

// Tiles of a chunk: those of its pieces, in order and without gaps.
void check_tiles(const Layout& l, const ChunkLayout& c, size_t pieces_begin) {
  size_t wire = 0;
  size_t piece = pieces_begin;
  size_t tile = c.first_tile;
  const size_t end = c.first_tile + c.num_tiles;
  while (tile < end) {
    const ShardPiece& p = l.pieces[piece];
    CHECK_EQ(p.wire, wire); // packed
    CHECK(p.length > 0);
    CHECK_EQ(p.length % kAligned, 0u);
    CHECK_EQ(p.begin % kAligned, 0u);
    for (uint32_t i = 0; i * size_t(kTile) < p.length; ++i, ++tile) {
      if (!CHECK(tile < end)) {
        return;
      }
      CHECK_EQ(l.tiles[tile].piece, piece);
      CHECK_EQ(l.tiles[tile].index, i);
    }
    wire += p.length;
    ++piece;
  }
  CHECK_EQ(wire, c.block);
}

void check_chunks(const Layout& l, const Input& in) {
  size_t tiles = 0;
  size_t pieces = 0;
  size_t max_block = 0;
  for (const ChunkLayout& c : l.chunks) {
    CHECK_EQ(c.first_tile, tiles);
    check_tiles(l, c, pieces);
    tiles += c.num_tiles;
    const size_t before = pieces;
    while (pieces < l.pieces.size() &&
           (pieces == before || l.pieces[pieces].wire != 0)) {
      ++pieces;
    }
    CHECK(c.block <= in.longest());
    max_block = std::max(max_block, c.block);
    if (!c.whole) {
      continue;
    }
    CHECK_EQ(pieces - before, 1u);
    CHECK_EQ(l.pieces[before].tensor, c.tensor);
    CHECK_EQ(l.pieces[before].length, in.shard(c.tensor));
    CHECK(in.exact(c.tensor));
    CHECK(in.counts[c.tensor] >= in.whole_from);
  }
  CHECK_EQ(tiles, l.tiles.size());
  CHECK_EQ(pieces, l.pieces.size());
  CHECK_EQ(max_block, l.max_block);
}

// Pieces of a tensor: all of a shard, once, from its begin to its end.
void check_pieces(const Layout& l, const Input& in) {
  std::vector<size_t> done(in.counts.size());
  for (const ShardPiece& p : l.pieces) {
    if (!CHECK(p.tensor < done.size())) {
      return;
    }
    CHECK_EQ(p.begin, done[p.tensor]);
    done[p.tensor] += p.length;
  }
  for (size_t t = 0; t < done.size(); ++t) {
    CHECK_EQ(done[t], in.shard(t));
  }
}

// `tensor_of(i)` is the tensor of part i of n.
template <typename TensorOf>
void check_by_tensor(
    size_t n,
    size_t tensors,
    const std::vector<uint32_t>& list,
    const std::vector<uint32_t>& begin,
    const TensorOf& tensor_of) {
  if (!CHECK_EQ(begin.size(), tensors + 1) || !CHECK_EQ(list.size(), n)) {
    return;
  }
  CHECK_EQ(begin[0], 0u);
  CHECK_EQ(begin[tensors], n);
  for (size_t t = 0; t < tensors; ++t) {
    CHECK(begin[t] <= begin[t + 1]);
    for (uint32_t i = begin[t]; i < begin[t + 1]; ++i) {
      CHECK_EQ(tensor_of(list[i]), t);
      // Sums are added in the same order whatever else is in the list.
      CHECK(i == begin[t] || list[i - 1] < list[i]);
    }
  }
}

void check_lists(const Layout& l, size_t tensors) {
  const auto of_piece = [&](size_t i) { return l.pieces[i].tensor; };
  const auto of_tile = [&](size_t i) { return of_piece(l.tiles[i].piece); };
  check_by_tensor(l.tiles.size(), tensors, l.tile_list, l.tile_begin, of_tile);
  check_by_tensor(
      l.pieces.size(), tensors, l.piece_list, l.piece_begin, of_piece);
}

// The same with a header, which has a chunk of its own if nothing is packed.
void check_header(const Layout& without, const Input& in) {
  constexpr size_t kHeader = 3 * kAligned;
  const Layout l =
      make_layout(in.counts, in.size, in.max_block, in.whole_from, kHeader);
  const size_t own = without.chunks.empty() || without.chunks[0].whole ? 1 : 0;
  if (!CHECK_EQ(l.chunks.size(), without.chunks.size() + own)) {
    return;
  }
  size_t max_block = without.max_block;
  for (size_t t = 0; t < l.chunks.size(); ++t) {
    const ChunkLayout& c = l.chunks[t];
    CHECK_EQ(c.header, t == 0 ? kHeader : 0u);
    CHECK(t != 0 || !c.whole);
    max_block = std::max(max_block, c.block + c.header);
    if (t >= own) {
      const ChunkLayout& other = without.chunks[t - own];
      CHECK(c.block == other.block && c.first_tile == other.first_tile);
      CHECK(c.whole == other.whole && c.num_tiles == other.num_tiles);
    } else {
      CHECK(c.block == 0 && c.num_tiles == 0);
    }
  }
  CHECK_EQ(max_block, l.max_block);
}

void check_layout(const Input& in) {
  const Layout l = make_layout(in.counts, in.size, in.max_block, in.whole_from);
  check_header(l, in);
  check_pieces(l, in);
  check_chunks(l, in);
  check_lists(l, in.counts.size());
}

Input random_input(std::mt19937& random) {
  const auto below = [&](size_t n) { return random() % n; };
  Input in;
  in.size = 1 + static_cast<int>(below(8));
  in.max_block = std::vector<size_t>{0, 31, 32, 100, 1024, 70000}[below(6)];
  in.whole_from = std::vector<size_t>{1, 4096, ~size_t(0)}[below(3)];
  in.counts.resize(below(20));
  for (size_t& count : in.counts) {
    count = below(std::vector<size_t>{2, 70, 3000, 100000}[below(4)]);
    if (below(3) == 0) { // shards that fill it exactly
      const size_t unit = kAligned * static_cast<size_t>(in.size);
      count = (count + unit - 1) / unit * unit;
    }
  }
  return in;
}

} // namespace

TEST(cuda_layout_of_random_lists) {
  std::mt19937 random(7);
  for (int turn = 0; turn < (kSanitized ? 100 : 1000); ++turn) {
    check_layout(random_input(random));
  }
}

TEST(cuda_layout_examples) {
  CHECK_EQ(make_layout({}, 2, 64, 1).chunks.size(), 0u);
  const Layout none = make_layout({0, 0}, 2, 64, 1);
  CHECK_EQ(none.chunks.size(), 0u);
  CHECK_EQ(none.tile_begin.size(), 3u);

  // Whole, packed around it, and too long to be whole.
  const Layout l = make_layout({128, 5, 700, 1024, 5}, 2, 64, 128);
  size_t whole = 0;
  for (const ChunkLayout& c : l.chunks) {
    whole += c.whole;
  }
  CHECK_EQ(whole, 1u);
  CHECK(l.chunks.back().whole);
  CHECK_EQ(l.chunks.back().tensor, 0u);
  CHECK_EQ(l.max_block, 64u);
  // 32 + 352 + 512 + 32 elements.
  CHECK_EQ(l.chunks.size(), 1u + 15);
}

// A model of it: what is taken, and that the rest merges.
TEST(cuda_layout_block_list) {
  constexpr size_t kBytes = 1 << 20;
  std::mt19937 random(11);
  for (int turn = 0; turn < (kSanitized ? 5 : 50); ++turn) {
    BlockList list(kBytes);
    std::map<size_t, size_t> taken;
    size_t refused = 0;
    for (int i = 0; i < 500; ++i) {
      if (random() % 3 != 0) {
        const size_t bytes = random() % 40000;
        const auto offset = list.allocate(bytes);
        if (!offset) {
          ++refused;
          continue;
        }
        CHECK_EQ(*offset % 512, 0u);
        CHECK(*offset + bytes <= kBytes);
        const auto next = taken.lower_bound(*offset);
        CHECK(next == taken.end() || *offset + bytes <= next->first);
        CHECK(
            next == taken.begin() ||
            std::prev(next)->first + std::prev(next)->second <= *offset);
        CHECK(taken.emplace(*offset, std::max<size_t>(bytes, 1)).second);
      } else if (!taken.empty()) {
        const auto at = std::next(
            taken.begin(), static_cast<ptrdiff_t>(random() % taken.size()));
        list.release(at->first);
        taken.erase(at);
      }
    }
    CHECK(refused > 0);
    for (const auto& [offset, bytes] : taken) {
      list.release(offset);
    }
    CHECK(!list.allocate(kBytes + 1));
    const auto all = list.allocate(kBytes);
    CHECK(all && *all == 0);
    CHECK(!list.allocate(1));
  }
}

} // namespace fusedpg::test
