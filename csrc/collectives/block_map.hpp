#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/lanes.hpp"

namespace fusedpg {

// Which blocks of the tensors of an operation each rank contributes: one bit a
// block and rank. Blocks are counted from the start of each tensor; the last
// one may be shorter. The bits of each tensor begin a new word.
class BlockMap {
 public:
  // `block` in elements.
  BlockMap(const std::vector<size_t>& counts, size_t block, int size);

  static size_t words_of(size_t count, size_t block) {
    return ((count + block - 1) / block + 63) / 64;
  }
  // `block`, doubled until the bits of all tensors need at most `words`; 0 if
  // none is large enough.
  static size_t fitting_block(
      const std::vector<size_t>& counts,
      size_t block,
      size_t words);
  size_t block() const {
    return block_;
  }
  size_t size() const { // ranks
    return static_cast<size_t>(size_);
  }
  size_t blocks() const {
    return blocks_;
  }
  size_t words() const {
    return any_.size();
  }
  // Words in front of those of tensor `t`.
  size_t first_word(size_t t) const {
    return first_[t];
  }
  void load(int rank, const uint64_t* bits); // words() of them
  const uint64_t* bits(int rank) const {
    return rank == kAny ? any_.data() : bits_.data() + rank * words();
  }

  // Blocks that a rank or, with kAny, any rank contributes.
  static constexpr int kAny = -1;
  size_t present_blocks(int rank) const;
  // The share of blocks that any rank contributes.
  double density() const {
    return blocks_ == 0 ? 0
                        : static_cast<double>(present_blocks(kAny)) /
            static_cast<double>(blocks_);
  }
  // Of the elements of `piece`, those in such blocks.
  size_t present_elements(int rank, const LanePiece& piece) const;
  // Calls fn(begin, end) for the runs of such blocks in `piece`, clipped to it.
  template <typename Fn>
  void for_present(int rank, const LanePiece& piece, Fn&& fn) const {
    const uint64_t* words = bits(rank) + first_[piece.tensor];
    const size_t stop = piece.begin + piece.count;
    const size_t last = piece.count == 0 ? 0 : (stop + block_ - 1) / block_;
    for (size_t b = find(words, piece.begin / block_, last, true); b < last;) {
      const size_t gap = find(words, b, last, false);
      fn(std::max(piece.begin, b * block_), std::min(stop, gap * block_));
      b = find(words, gap, last, true);
    }
  }
  // `lanes` without the blocks that nobody contributes.
  Lanes skip(const Lanes& lanes) const;

  // Calls fn(begin, end, ranks, num_ranks) for the parts of `piece`, in order,
  // that the same ranks contribute, by rank.
  template <typename Fn>
  void for_contributors(const LanePiece& piece, Fn&& fn) const {
    if (piece.count == 0) {
      return;
    }
    thread_local std::vector<int> ranks, next; // many pieces are short
    ranks.resize(size_);
    next.resize(size_);
    size_t num = contributors(piece.tensor, piece.begin / block_, ranks);
    size_t from = piece.begin;
    const size_t stop = piece.begin + piece.count;
    for (size_t b = piece.begin / block_ + 1, more; b * block_ < stop;
         b += more) {
      more = b % 64 == 0 && alike(piece.tensor, b) ? 64 : 1;
      const size_t n = contributors(piece.tensor, b, next);
      if (n != num ||
          !std::equal(next.begin(), next.begin() + n, ranks.begin())) {
        fn(from, b * block_, ranks.data(), num);
        from = b * block_;
        ranks.swap(next);
        num = n;
      }
    }
    fn(from, stop, ranks.data(), num);
  }

 private:
  size_t contributors(size_t tensor, size_t b, std::vector<int>& ranks) const {
    const size_t word = first_[tensor] + b / 64;
    size_t n = 0;
    for (int p = 0; p < size_; ++p) {
      ranks[n] = p;
      n += bits_[p * words() + word] >> (b % 64) & 1;
    }
    return n;
  }
  // Whether every rank has all or none of the 64 blocks from `b` on.
  bool alike(size_t tensor, size_t b) const {
    const size_t word = first_[tensor] + b / 64;
    for (int p = 0; p < size_; ++p) {
      const uint64_t bits = bits_[p * words() + word];
      if (bits != 0 && bits != ~uint64_t(0)) {
        return false;
      }
    }
    return true;
  }
  // The first block from `b` on whose bit is `wanted`, or `end`.
  static size_t find(const uint64_t* words, size_t b, size_t end, bool wanted);

  const size_t block_;
  const int size_;
  size_t blocks_ = 0;
  std::vector<size_t> first_;
  std::vector<uint64_t> bits_; // [rank][word]
  std::vector<uint64_t> any_;
};

} // namespace fusedpg
