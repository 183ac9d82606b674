#pragma once

#include <cstddef>

#include "base/options.hpp"
#include "collectives/density.hpp"

// The one place that chooses algorithms on CPUs. Inputs are the same on all
// ranks, so choices are; but for select_one_shot.
namespace fusedpg {

// Most bytes of an operation that is staged before the first barrier: everybody
// reads everybody and no second barrier is needed.
constexpr size_t kOneShotBytes = size_t(32) << 10;

// Whether this rank stages an input of `bytes` before the first barrier. Ranks
// may answer differently when only some inputs lie in arenas; the operation is
// then staged in chunks.
bool select_one_shot(size_t bytes, bool in_arena);

// How the data of a large operation travel in shared memory.
struct Path {
  bool reads_direct; // peers read the inputs in place
  bool writes_direct; // peers write the outputs in place
};

// True if this processor takes long to write lines that another core has read,
// while both still have them in their second-level caches. On an AMD EPYC these
// writes run at 9 GiB/s, those to lines that have left the caches at 28.
bool rewrites_slowly();

// Bytes of one of so many lanes that are staged between two barriers. Where lines
// are slow to rewrite, they fill a staging buffer that has no lane for its own
// rank.
size_t select_chunk(size_t total_bytes, int lanes, bool rewrites_slowly);

// How an all-reduce treats blocks of zeros. Before enter().
struct SkipConfig {
  BlockSkip mode = BlockSkip::kOff; // the group's option
  int world_size = 1;
  size_t bytes = 0;
  bool can_skip = false; // of its type and reduction
  // What earlier ones of its shape were like; matters with kAuto.
  DensityEstimates::Choice estimate = DensityEstimates::Choice::kProbe;
};
DensityEstimates::Choice select_skip(const SkipConfig& config);
// Whether the estimates hear of it if it is not skipped; after enter(): only
// what all ranks have entered may count, or they would choose differently ever
// after.
bool select_estimate(const SkipConfig& config);

// Whether a plan that may skip blocks of zeros looks for them in shared memory.
struct PlanSkipConfig {
  int world_size = 1;
  bool needs_all = false; // see Plan
  bool zeros_stay = false;
};
bool select_plan_skip(const PlanSkipConfig& config);

// The share of blocks in the result from which skipping costs more time than it
// saves.
double select_skip_limit(const Path& path);

// Bytes of a lane that travel between machines as one message: enough for a link
// to be fast, little enough for several to be under way. Where ranks share
// machines, one of every lane fits a staging buffer.
size_t select_net_segment(int world_size, bool ranks_share_hosts);
// How many of them may be under way each way,
constexpr size_t kNetAhead = 8;
// and of a reduction: fewer where ranks share hosts, whose links are busy with
// several ranks' segments anyway, and whose caches these have to fit.
size_t select_net_ahead(bool ranks_share_hosts);

// Whether every rank sends its whole input to all others at once: that takes
// one journey instead of two, for P/2 times the bytes.
bool select_net_one_shot(size_t bytes, int world_size);

// Whether a rank's part of a move travels with what it says of it: to all
// others so many bytes, to one of them at most `longest`.
bool select_net_inline(size_t bytes, size_t longest);

// How what one rank has reaches many hosts: it sends it to each, or each passes
// it on to the next, segment by segment.
enum class NetSpread { kDirect, kChain };
NetSpread select_net_spread(size_t bytes, int num_hosts);

// Bytes that travel as one message of a long move: enough for a link to be
// fast, little enough for several to be under way. At most what a rank's stage
// holds for every rank, see net_stage_bytes().
size_t select_move_segment(
    size_t bytes,
    int world_size,
    int num_hosts,
    NetSpread spread);
// A staging buffer of a host's rank, in a group of so many.
size_t net_stage_bytes(int world_size);

// Whether a step between machines looks for blocks of zeros in a gradient of
// so many bytes: that takes rounds of messages of its own.
bool select_net_skip(size_t bytes);

// Shares of blocks in the result from which skipping is worth nothing: for the
// next operation, and for the one that has found them.
struct SkipLimits {
  double next;
  double now;
};
// Between machines the wire is slower than everything else, and where the
// blocks are known the rest of skipping costs nothing.
constexpr SkipLimits kNetSkipLimits{0.9, 2};

// Whether a reduction between hosts goes by the group's aggregators.
struct AggregateRates { // bytes a second
  double link; // each way, of a rank's link while ranks reduce among themselves
  double tensor; // of a tensor that goes by the aggregators
};
// Of links with these rates.
AggregateRates aggregate_rates(
    const LinkRates& links,
    int world_size,
    size_t aggregators);
struct AggregateConfig {
  AggregateRates rates;
  int world_size;
  size_t bytes;
  // The shares of blocks that a rank has, on average, and that any rank has.
  double present = 1;
  double any = 1;
};
struct AggregateTimes { // seconds
  double ranks; // among themselves
  double aggregators;
};
AggregateTimes aggregate_times(const AggregateConfig& config);
bool select_aggregators(const AggregateTimes& times);
// From how many bytes on a reduction is worth measuring links for.
constexpr size_t kWorthMeasuring = size_t(1) << 20;

// Blocks that travel to an aggregator and back as one message.
struct StripeConfig {
  size_t block_bytes = 0;
  size_t blocks = 0; // that a rank has, on average
  size_t aggregators = 1;
  size_t message_bytes = 0; // 0: chosen
};
size_t select_stripe(const StripeConfig& config);

// Whether results of this size should be written around the cache.
bool select_stream(size_t bytes);

} // namespace fusedpg
