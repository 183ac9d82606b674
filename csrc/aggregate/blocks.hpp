#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "aggregate/protocol.hpp"
#include "net/transport.hpp"

// How the blocks of a tensor travel that is mostly zeros.
namespace fusedpg::aggregate {

// Behind the last block of a stream.
constexpr uint32_t kNoBlock = ~uint32_t(0);
constexpr size_t kMostBlockBytes = size_t(1) << 20;

// In front of each message of blocks: what it holds. The message is the
// elements of its blocks, one after the other, and then their numbers. Without
// blocks there is none.
struct BlockHeader {
  uint32_t blocks = 0;
  uint32_t elements = 0;
  // A worker names the first block of its next message, an aggregator does not
  // know it yet. kNoBlock from either means that this is the last header.
  uint32_t next = 0;
  // An aggregator counts the contributions in this message's blocks.
  uint32_t contributions = 0;
};
static_assert(
    std::is_trivially_copyable_v<BlockHeader> && sizeof(BlockHeader) == 16);

// The blocks of a tensor and whose they are: stripes of `stripe` blocks go to
// the aggregators in turn. A message holds at most a stripe's number of blocks.
class BlockLayout {
 public:
  // Throws Error(kMismatch) where there can be no such blocks.
  BlockLayout(const Head& head, size_t aggregators);

  uint32_t blocks() const {
    return blocks_;
  }
  uint32_t stripe() const {
    return stripe_;
  }
  size_t begin(uint32_t block) const { // elements in front of it
    return static_cast<size_t>(block) * block_;
  }
  size_t elements(uint32_t block) const;
  size_t element() const { // bytes
    return element_;
  }
  size_t most_bytes() const; // of a message
  // Returns the aggregator's first block from `block` on whose bit is set, or
  // kNoBlock.
  uint32_t next(const uint64_t* bits, uint32_t block, size_t aggregator) const;
  // Bytes of the message that a header announces.
  size_t bytes(const BlockHeader& header) const {
    return header.elements * element_ + header.blocks * sizeof(uint32_t);
  }
  // Throws Error(kMismatch) where a header makes no sense,
  void check(const BlockHeader& header) const;
  // or where a message does: its blocks, which are the aggregator's, come in
  // order, none is before `from`, and all are before header.next unless that is 0.
  std::vector<uint32_t> read(
      const BlockHeader& header,
      const NetBuffer& message,
      size_t aggregator,
      uint32_t from) const;

 private:
  uint64_t count_;
  uint32_t block_;
  uint32_t stripe_;
  size_t element_;
  size_t aggregators_;
  uint32_t blocks_ = 0;
};

// A message of blocks that is being written.
class BlockMessage {
 public:
  BlockMessage(const BlockLayout& layout, NetBuffer buffer)
      : layout_(layout),
        buffer_(std::move(buffer)) {}

  bool full() const {
    return blocks_.size() == layout_.stripe();
  }
  // Adds a block, which comes behind all others; its elements go there.
  char* add(uint32_t block);
  // The header, but for `next`, and the message, if it has blocks.
  BlockHeader header() const;
  NetBuffer finish();

 private:
  const BlockLayout& layout_;
  const NetBuffer buffer_;
  std::vector<uint32_t> blocks_;
  size_t elements_ = 0;
};

NetBuffer message_of(const BlockHeader& header);
BlockHeader header_of(const NetBuffer& message);

} // namespace fusedpg::aggregate
