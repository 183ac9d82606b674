#include "collectives/selector.hpp"

#include <algorithm>

#include "collectives/skip.hpp"

namespace fusedpg {

bool select_one_shot(size_t bytes, bool in_arena) {
  // From here on, reading in place is worth a second barrier.
  constexpr size_t kInPlaceBytes = size_t(8) << 10;
  return bytes <= (in_arena ? kInPlaceBytes : kOneShotBytes);
}

Path select_path(Context& ctx) {
  if (ctx.size() == 1) {
    return {true, true}; // nobody needs a stage
  }
  return {all_ranks(ctx, kReadsDirect), all_ranks(ctx, kWritesDirect)};
}

size_t select_chunk(size_t total_bytes, int world_size) {
  // Large enough that a barrier costs little, small enough that two chunks in
  // and two out, and the tensor's own lines between copying in and out, stay in
  // the second-level cache.
  constexpr size_t kChunk = size_t(256) << 10;
  static_assert(kChunk <= kStageBytes);
  // At least two chunks, so that copying in and out overlap, unless a barrier
  // costs more than that gains.
  const size_t half = std::max(total_bytes / 2, 2 * kOneShotBytes);
  const size_t lanes = static_cast<size_t>(world_size);
  const size_t lane = std::min(kChunk, half) / lanes / 64 * 64;
  return std::max<size_t>(lane, 64) * lanes;
}

namespace {

bool may_skip(
    const SkipState& state,
    int world_size,
    size_t bytes,
    const kernels::ReduceArgs& args) {
  return state.mode != BlockSkip::kOff && world_size > 1 &&
      bytes > kOneShotBytes && can_skip(args);
}

} // namespace

DensityEstimates::Choice select_skip(
    const SkipState& state,
    int world_size,
    uint64_t shape,
    size_t bytes,
    const kernels::ReduceArgs& args) {
  using Choice = DensityEstimates::Choice;
  if (!may_skip(state, world_size, bytes, args)) {
    return Choice::kDense;
  }
  return state.mode == BlockSkip::kOn
      ? Choice::kSkip
      : state.estimates.choose(shape, args.dtype);
}

void count_dense(
    SkipState& state,
    int world_size,
    uint64_t shape,
    size_t bytes,
    const kernels::ReduceArgs& args) {
  if (state.mode == BlockSkip::kAuto &&
      may_skip(state, world_size, bytes, args)) {
    state.estimates.count_dense(shape, args.dtype);
  }
}

double select_skip_limit(const Path& path) {
  // Looking for zeros reads every rank's tensor once, which is two thirds of
  // what a direct path takes, and one third of a staged one; scattered blocks
  // are slower than long runs.
  return path.reads_direct && path.writes_direct ? 0.07 : 0.25;
}

NetPath select_net_path(const NetContext& ctx) {
  return ctx.ranks_share_hosts ? NetPath::kChain : NetPath::kDirect;
}

bool select_net_skip(size_t bytes) {
  return bytes >= size_t(256) << 10;
}

bool select_stream(size_t bytes) {
  return bytes >= size_t(4) << 20;
}

} // namespace fusedpg
