#include "collectives/block_map.hpp"

#include <bit>

namespace fusedpg {

BlockMap::BlockMap(const std::vector<size_t>& counts, size_t block, int size)
    : block_(block),
      size_(size) {
  size_t words = 0;
  for (const size_t count : counts) {
    first_.push_back(words);
    words += words_of(count, block);
    blocks_ += (count + block - 1) / block;
  }
  any_.resize(words);
  bits_.resize(words * static_cast<size_t>(size));
}

size_t BlockMap::fitting_block(
    const std::vector<size_t>& counts,
    size_t block,
    size_t words) {
  for (; block != 0; block *= 2) {
    size_t needed = 0;
    for (const size_t count : counts) {
      needed += words_of(count, block);
    }
    if (needed <= words) {
      break;
    }
  }
  return block;
}

void BlockMap::load(int rank, const uint64_t* bits) {
  std::copy_n(bits, words(), bits_.begin() + rank * words());
  for (size_t w = 0; w < words(); ++w) {
    any_[w] |= bits[w];
  }
}

size_t BlockMap::present_blocks(int rank) const {
  size_t sum = 0;
  for (size_t w = 0; w < words(); ++w) {
    sum += std::popcount(bits(rank)[w]);
  }
  return sum;
}

size_t BlockMap::present_elements(int rank, const LanePiece& piece) const {
  size_t sum = 0;
  for_present(
      rank, piece, [&](size_t begin, size_t end) { sum += end - begin; });
  return sum;
}

size_t BlockMap::find(
    const uint64_t* words,
    size_t b,
    size_t end,
    bool wanted) {
  while (b < end) {
    const uint64_t word = (wanted ? words[b / 64] : ~words[b / 64]) >> (b % 64);
    if (word != 0) {
      return std::min(end, b + std::countr_zero(word));
    }
    b = (b / 64 + 1) * 64;
  }
  return end;
}

Lanes BlockMap::skip(const Lanes& lanes) const {
  Lanes kept(lanes.size());
  for (size_t p = 0; p < lanes.size(); ++p) {
    for (const LanePiece& piece : lanes[p]) {
      for_present(kAny, piece, [&](size_t begin, size_t end) {
        kept[p].push_back({piece.tensor, begin, end - begin});
      });
    }
  }
  return kept;
}

} // namespace fusedpg
