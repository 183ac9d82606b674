#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedpg {

struct ShardRange {
  int64_t offset;
  int64_t length;
};

// Shards start at multiples of this many elements: a cache line of 2-byte
// elements, two of 4-byte ones.
constexpr int64_t kShardAlignment = 32;

// Elements of a full shard.
constexpr int64_t shard_size(int64_t numel, int64_t world_size) {
  const int64_t even = numel / world_size + (numel % world_size != 0);
  return (even + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

// The ownership map: which elements of a tensor of `numel` elements rank `rank`
// of `world_size` reduces, updates and keeps optimizer state for. It depends on
// nothing else, ever: checkpoints rely on it.
constexpr ShardRange shard_range(
    int64_t numel,
    int64_t world_size,
    int64_t rank) {
  const int64_t chunk = shard_size(numel, world_size);
  const int64_t offset = std::min(chunk * rank, numel);
  return {offset, std::min(chunk, numel - offset)};
}

} // namespace fusedpg
