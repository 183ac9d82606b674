#include "collectives/selector.hpp"

#include <algorithm>

#include "host/domain.hpp"

namespace fusedpg {

bool select_one_shot(size_t bytes, bool in_arena) {
  // From here on, reading in place is worth a second barrier.
  constexpr size_t kInPlaceBytes = size_t(8) << 10;
  return bytes <= (in_arena ? kInPlaceBytes : kOneShotBytes);
}

bool rewrites_slowly() {
#if defined(__x86_64__)
  static const bool amd = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
  }();
  return amd;
#else
  return false;
#endif
}

size_t select_chunk(size_t total_bytes, int lanes, bool rewrites_slowly) {
  // Large enough that a barrier costs little, small enough that two chunks in
  // and two out, and the tensor's own lines between copying in and out, stay in
  // the second-level cache.
  constexpr size_t kChunk = size_t(256) << 10;
  static_assert(kChunk <= kStageBytes);
  // At least two chunks, so that copying in and out overlap, unless a barrier
  // costs more than that gains.
  const size_t half = std::max(total_bytes / 2, 2 * kOneShotBytes);
  const auto num = static_cast<size_t>(lanes);
  // A full staging buffer, without a lane for the rank itself, leaves the cache
  // before its lines are written again.
  const size_t most = rewrites_slowly
      ? kStageBytes / std::max<size_t>(num - 1, 1)
      : kChunk / num;
  return std::max<size_t>(std::min(most, half / num) / 64 * 64, 64);
}

namespace {

using Choice = DensityEstimates::Choice;

bool may_skip(const SkipConfig& c) {
  return c.mode != BlockSkip::kOff && c.world_size > 1 &&
      c.bytes > kOneShotBytes && c.can_skip;
}

} // namespace

Choice select_skip(const SkipConfig& c) {
  return !may_skip(c)            ? Choice::kDense
      : c.mode == BlockSkip::kOn ? Choice::kSkip
                                 : c.estimate;
}

bool select_estimate(const SkipConfig& c) {
  return c.mode == BlockSkip::kAuto && may_skip(c);
}

bool select_plan_skip(const PlanSkipConfig& c) {
  return c.zeros_stay || (!c.needs_all && c.world_size > 1);
}

double select_skip_limit(const Path& path) {
  // Looking for zeros reads every rank's tensor once, which is two thirds of
  // what a direct path takes, and one third of a staged one; scattered blocks
  // are slower than long runs.
  return path.reads_direct && path.writes_direct ? 0.07 : 0.25;
}

size_t select_net_segment(int world_size, bool ranks_share_hosts) {
  // Copied while it is in the cache.
  constexpr size_t kMost = size_t(252) << 10;
  constexpr size_t kLeast = size_t(64) << 10;
  constexpr size_t kStage = size_t(4) << 20;
  return ranks_share_hosts
      ? std::clamp(
            kStage / static_cast<size_t>(world_size) / 4096 * 4096,
            kLeast,
            kMost)
      : kMost;
}

size_t select_net_ahead(bool ranks_share_hosts) {
  // See 2 x 2 in benchmarks/between_hosts.py.
  constexpr size_t kShared = 2;
  return ranks_share_hosts ? kShared : kNetAhead;
}

bool select_net_one_shot(size_t bytes, int world_size) {
  constexpr size_t kOnce = size_t(128) << 10;
  return bytes * static_cast<size_t>(world_size - 1) <= kOnce;
}

bool select_net_inline(size_t bytes, size_t longest) {
  constexpr size_t kAll = size_t(128) << 10;
  return longest <= kOneShotBytes && bytes <= kAll;
}

NetSpread select_net_spread(size_t bytes, int num_hosts) {
  // What the first link saves, against one journey a host.
  constexpr size_t kWorth = size_t(1) << 20;
  return num_hosts > 2 && bytes >= kWorth / static_cast<size_t>(num_hosts - 2)
      ? NetSpread::kChain
      : NetSpread::kDirect;
}

size_t select_move_segment(
    size_t bytes,
    int world_size,
    int num_hosts,
    NetSpread spread) {
  constexpr size_t kLeast = size_t(64) << 10;
  const size_t most = select_net_segment(world_size, true);
  if (spread == NetSpread::kDirect) {
    return most;
  }
  // The chain is full when each host has a segment under way.
  const size_t share = bytes / (2 * static_cast<size_t>(num_hosts));
  return std::clamp(share / 64 * 64, std::min(kLeast, most), most);
}

size_t net_stage_bytes(int world_size) {
  return static_cast<size_t>(world_size) *
      select_net_segment(world_size, /*ranks_share_hosts=*/true);
}

bool select_net_skip(size_t bytes) {
  return bytes >= size_t(256) << 10;
}

AggregateRates aggregate_rates(
    const LinkRates& links,
    int world_size,
    size_t aggregators) {
  const double all = links.aggregator * static_cast<double>(aggregators);
  return {links.rank, std::min(links.rank, all / world_size)};
}

AggregateTimes aggregate_times(const AggregateConfig& c) {
  const auto bytes = static_cast<double>(c.bytes);
  const double others = static_cast<double>(c.world_size - 1) / c.world_size;
  return {
      bytes * (c.present + c.any) * others / c.rates.link,
      bytes * c.any / c.rates.tensor};
}

bool select_aggregators(const AggregateTimes& times) {
  // What aggregators add to the count of bytes: 13% of it where the ranks add
  // 9%, see docs/operate/aggregators.md; and what measuring links is wrong by.
  constexpr double kMargin = 1.1;
  return times.aggregators * kMargin < times.ranks;
}

size_t select_stripe(const StripeConfig& c) {
  constexpr size_t kMost = size_t(248) << 10; // with the blocks' numbers
  constexpr size_t kLeast = size_t(32) << 10;
  // An aggregator adds up one message while the next ones are on their way.
  constexpr size_t kMessages = 8;
  const size_t share = c.blocks * c.block_bytes / c.aggregators / kMessages;
  const size_t bytes =
      c.message_bytes != 0 ? c.message_bytes : std::clamp(share, kLeast, kMost);
  return std::max<size_t>(bytes / c.block_bytes, 1);
}

bool select_stream(size_t bytes) {
  return bytes >= size_t(4) << 20;
}

} // namespace fusedpg
