#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace fusedpg::cuda {

// Hands out pieces of one range of memory: first fit, neighbours merged. A
// group's tensors there are few and large (buckets, parameters).
//
// Thread-safe.
class BlockList {
 public:
  explicit BlockList(size_t bytes) {
    free_[0] = bytes;
  }

  // An offset, or nothing when no hole is large enough.
  std::optional<size_t> allocate(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes = bytes == 0 ? kAlignment : bytes;
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      if (hole->second >= bytes) {
        const auto [offset, length] = *hole;
        free_.erase(hole);
        if (length > bytes) {
          free_[offset + bytes] = length - bytes;
        }
        taken_[offset] = bytes;
        return offset;
      }
    }
    return std::nullopt;
  }

  void release(size_t offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto block = taken_.find(offset);
    size_t length = block->second;
    taken_.erase(block);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + length == next->first) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += length;
        return;
      }
    }
    free_[offset] = length;
  }

 private:
  static constexpr size_t kAlignment = 512;

  std::mutex mutex_;
  std::map<size_t, size_t> free_; // offset -> bytes
  std::map<size_t, size_t> taken_;
};

} // namespace fusedpg::cuda
