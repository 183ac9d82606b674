#include "aggregate/blocks.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/dtype.hpp"
#include "base/error.hpp"

namespace fusedpg::aggregate {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorKind::kMismatch, "fused: no such blocks");
}

// The first set bit from `block` on, or `end`.
uint32_t find(const uint64_t* bits, uint32_t block, uint32_t end) {
  while (block < end) {
    const uint64_t word = bits[block / 64] >> (block % 64);
    if (word != 0) {
      return std::min<uint32_t>(end, block + std::countr_zero(word));
    }
    block = (block / 64 + 1) * 64;
  }
  return end;
}

} // namespace

BlockLayout::BlockLayout(const Head& head, size_t aggregators)
    : count_(head.count),
      block_(head.block),
      stripe_(head.stripe),
      element_(dtype_size(static_cast<DType>(head.dtype))),
      aggregators_(aggregators) {
  const uint64_t blocks =
      block_ == 0 ? 0 : count_ / block_ + (count_ % block_ != 0 ? 1 : 0);
  // Numbers of blocks stay below kNoBlock when a stripe is added.
  if (blocks == 0 || stripe_ == 0 || stripe_ > kSegmentBytes ||
      blocks > (uint64_t(1) << 31) || block_ > kMostBlockBytes / element_ ||
      uint64_t(block_) * stripe_ * element_ >
          std::max<uint64_t>(kSegmentBytes, uint64_t(block_) * element_)) {
    refuse();
  }
  blocks_ = static_cast<uint32_t>(blocks);
}

size_t BlockLayout::elements(uint32_t block) const {
  return std::min<uint64_t>(block_, count_ - begin(block));
}

size_t BlockLayout::most_bytes() const {
  return (block_ * element_ + sizeof(uint32_t)) * stripe_;
}

uint32_t BlockLayout::next(
    const uint64_t* bits,
    uint32_t block,
    size_t aggregator) const {
  while (block < blocks_) {
    const uint32_t stripe = block / stripe_;
    const size_t away =
        (aggregator + aggregators_ - stripe % aggregators_) % aggregators_;
    if (away != 0) {
      const uint64_t first = (stripe + away) * uint64_t(stripe_);
      block = static_cast<uint32_t>(std::min<uint64_t>(first, blocks_));
      continue;
    }
    const uint64_t behind = (stripe + 1) * uint64_t(stripe_);
    const auto end = static_cast<uint32_t>(std::min<uint64_t>(behind, blocks_));
    block = find(bits, block, end);
    if (block != end) {
      return block;
    }
  }
  return kNoBlock;
}

void BlockLayout::check(const Word& word) const {
  const bool some = word.blocks != 0;
  if (word.blocks > stripe_ || some != (word.elements != 0) ||
      word.elements > uint64_t(word.blocks) * block_ ||
      (!some && word.next != kNoBlock)) {
    refuse();
  }
}

std::vector<uint32_t> BlockLayout::read(
    const Word& word,
    const NetBuffer& message,
    size_t aggregator,
    uint32_t from) const {
  std::vector<uint32_t> found(word.blocks);
  std::memcpy(
      found.data(),
      message.data() + word.elements * element_,
      found.size() * sizeof(uint32_t));
  const uint32_t behind = word.next == 0 ? kNoBlock : word.next;
  size_t elements = 0;
  for (const uint32_t block : found) {
    if (block < from || block >= blocks_ || block >= behind ||
        block / stripe_ % aggregators_ != aggregator) {
      refuse();
    }
    from = block + 1;
    elements += this->elements(block);
  }
  if (elements != word.elements) {
    refuse();
  }
  return found;
}

char* BlockMessage::add(uint32_t block) {
  char* const to = buffer_.data() + elements_ * layout_.element();
  blocks_.push_back(block);
  elements_ += layout_.elements(block);
  return to;
}

Word BlockMessage::word() const {
  Word word;
  word.blocks = static_cast<uint32_t>(blocks_.size());
  word.elements = static_cast<uint32_t>(elements_);
  return word;
}

NetBuffer BlockMessage::finish() {
  std::memcpy(
      buffer_.data() + elements_ * layout_.element(),
      blocks_.data(),
      blocks_.size() * sizeof(uint32_t));
  return buffer_.part(0, layout_.bytes(word()));
}

NetBuffer message_of(const Word& word) {
  NetBuffer message(sizeof word);
  std::memcpy(message.data(), &word, sizeof word);
  return message;
}

Word word_of(const NetBuffer& message) {
  Word word;
  std::memcpy(&word, message.data(), sizeof word);
  return word;
}

} // namespace fusedpg::aggregate
