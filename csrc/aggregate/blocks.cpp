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

void BlockLayout::check(const BlockHeader& header) const {
  const bool some = header.blocks != 0;
  if (header.blocks > stripe_ || some != (header.elements != 0) ||
      header.elements > uint64_t(header.blocks) * block_ ||
      (!some && header.next != kNoBlock)) {
    refuse();
  }
}

std::vector<uint32_t> BlockLayout::read(
    const BlockHeader& header,
    const NetBuffer& message,
    size_t aggregator,
    uint32_t from) const {
  std::vector<uint32_t> found(header.blocks);
  std::memcpy(
      found.data(),
      message.data() + header.elements * element_,
      found.size() * sizeof(uint32_t));
  const uint32_t behind = header.next == 0 ? kNoBlock : header.next;
  size_t elements = 0;
  for (const uint32_t block : found) {
    if (block < from || block >= blocks_ || block >= behind ||
        block / stripe_ % aggregators_ != aggregator) {
      refuse();
    }
    from = block + 1;
    elements += this->elements(block);
  }
  if (elements != header.elements) {
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

BlockHeader BlockMessage::header() const {
  BlockHeader header;
  header.blocks = static_cast<uint32_t>(blocks_.size());
  header.elements = static_cast<uint32_t>(elements_);
  return header;
}

NetBuffer BlockMessage::finish() {
  std::memcpy(
      buffer_.data() + elements_ * layout_.element(),
      blocks_.data(),
      blocks_.size() * sizeof(uint32_t));
  return buffer_.part(0, layout_.bytes(header()));
}

NetBuffer message_of(const BlockHeader& header) {
  NetBuffer message(sizeof header);
  std::memcpy(message.data(), &header, sizeof header);
  return message;
}

BlockHeader header_of(const NetBuffer& message) {
  BlockHeader header;
  std::memcpy(&header, message.data(), sizeof header);
  return header;
}

} // namespace fusedpg::aggregate
