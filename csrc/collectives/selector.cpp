#include "collectives/selector.hpp"

#include <algorithm>

namespace fusedpg {

Path select_path(Context& ctx) {
  return {all_ranks(ctx, kReadsDirect), all_ranks(ctx, kWritesDirect)};
}

size_t select_chunk(size_t total_bytes, int world_size) {
  // Large enough that a barrier costs little, small enough that two chunks in
  // and two out stay in the second-level cache.
  constexpr size_t kChunk = size_t(512) << 10;
  static_assert(kChunk <= kStageBytes);
  // At least four chunks, so that copying in and out overlap.
  const size_t quarter = std::max(total_bytes / 4, kOneShotBytes);
  const size_t lanes = static_cast<size_t>(world_size);
  const size_t lane = std::min(kChunk, quarter) / lanes / 64 * 64;
  return std::max<size_t>(lane, 64) * lanes;
}

bool select_stream(size_t bytes) {
  return bytes >= size_t(4) << 20;
}

} // namespace fusedpg
