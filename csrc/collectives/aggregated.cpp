#include "collectives/aggregated.hpp"

#include <algorithm>
#include <cstring>

#include "aggregate/client.hpp"
#include "collectives/net_pipeline.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

size_t bytes_of(const Plan& plan) {
  size_t elements = 0;
  for (const size_t count : plan.counts()) {
    elements += count;
  }
  return elements * plan.src_size;
}

aggregate::Client::Reduction reduction_of(
    NetContext& ctx,
    const Plan& plan,
    size_t tensor,
    size_t count) {
  return {
      plan.tensors[tensor].dst,
      count,
      *plan.reduction,
      ctx.sequence,
      ctx.deadline,
      ctx.moved};
}

// The slowest rank's seconds, of the second of two runs: connections are made
// and windows grow in the first.
double seconds_of(NetContext& ctx, const std::function<void()>& body) {
  double seconds = 0;
  for (int run = 0; run < 2; ++run) {
    net_gather_rows(ctx, &seconds, sizeof seconds); // all begin together
    const auto begin = Clock::now();
    body();
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  double slowest = 0;
  for (const NetBuffer& row : net_gather_rows(ctx, &seconds, sizeof seconds)) {
    double theirs = 0;
    std::memcpy(&theirs, row.data(), sizeof theirs);
    slowest = std::max(slowest, theirs);
  }
  return slowest;
}

// By reductions of zeros both ways, which statistics do not count.
AggregateRates measure(NetContext& ctx) {
  constexpr size_t kCount = size_t(2) << 20;
  constexpr auto kBytes = static_cast<double>(kCount * sizeof(float));
  const OpStats moved = ctx.moved;
  std::vector<float> zeros(kCount);
  const int size = ctx.transport.size();
  const kernels::ReduceArgs sum;
  const Plan plan =
      in_place(ctx.kernels, size, single({zeros.data(), kCount}), sum);
  AggregateRates rates{};
  const double ranks =
      seconds_of(ctx, [&] { net_pipeline(ctx, plan, {}, nullptr); });
  rates.link = 2 * kBytes * (size - 1) / size / ranks;
  rates.tensor =
      kBytes / seconds_of(ctx, [&] {
        ctx.aggregators->all_reduce(
            {zeros.data(), kCount, sum, ctx.sequence, ctx.deadline, ctx.moved});
      });
  ctx.moved = moved;
  return rates;
}

bool choose(NetContext& ctx, size_t bytes, double present = 1, double any = 1) {
  AggregateState* state = ctx.aggregate;
  if (state == nullptr || state->mode == Aggregate::kOn) {
    if (state != nullptr) {
      state->set_choice("aggregators: aggregate is \"on\"");
    }
    return true;
  }
  if (!state->rates) {
    if (bytes < kWorthMeasuring) {
      state->set_choice(formatted(
          "rank to rank: {} bytes, and no rates before there are {}",
          bytes,
          kWorthMeasuring));
      return false;
    }
    net_together(ctx, [&] { state->rates = measure(ctx); });
  }
  const AggregateTimes times = aggregate_times(
      {*state->rates, ctx.transport.size(), bytes, present, any});
  const bool aggregators = select_aggregators(times);
  state->set_choice(formatted(
      "{}: {} bytes, of which {:.3g}% of a rank and {:.3g}% of any rank are to "
      "take {:.3g} ms from rank to rank, {:.3g} ms by aggregators",
      aggregators ? "aggregators" : "rank to rank",
      bytes,
      100 * present,
      100 * any,
      1e3 * times.ranks,
      1e3 * times.aggregators));
  return aggregators;
}

} // namespace

bool may_aggregate(const NetContext& ctx, const Plan& plan) {
  return ctx.aggregators != nullptr && plan.reduction &&
      plan.receiver == Plan::kAll;
}

bool choose_aggregators(NetContext& ctx, const Plan& plan) {
  return choose(ctx, bytes_of(plan));
}

void aggregate_dense(NetContext& ctx, const Plan& plan) {
  ctx.aggregated = true;
  const std::vector<size_t> counts = plan.counts();
  for (size_t t = 0; t < counts.size(); ++t) {
    ctx.aggregators->all_reduce(reduction_of(ctx, plan, t, counts[t]));
  }
}

AggregatedBlocks::AggregatedBlocks(
    NetContext& ctx,
    const Plan& plan,
    OwnBlocks own)
    : own_(std::move(own)),
      blocks_(own_.blocks + own_.unseen) {
  const BlockMap map = [&] {
    BlockMap one(plan.counts(), plan.skip->block, 1);
    one.load(0, own_.bits.data());
    return one;
  }();
  const uint64_t mine = map.present_blocks(0);
  for (const NetBuffer& row : net_gather_rows(ctx, &mine, sizeof mine)) {
    uint64_t theirs = 0;
    std::memcpy(&theirs, row.data(), sizeof theirs);
    present_ += theirs;
  }
  if (blocks_ != 0) {
    density_ = std::min(
        1.0, static_cast<double>(present_) / static_cast<double>(blocks_));
  }
  mine_ = mine;
}

bool AggregatedBlocks::chosen(NetContext& ctx, const Plan& plan) const {
  const double shares = blocks_ == 0
      ? 0.0
      : static_cast<double>(present_) / static_cast<double>(blocks_);
  const double overlap = ctx.aggregate == nullptr ? 1 : ctx.aggregate->overlap;
  return choose(
      ctx,
      bytes_of(plan),
      shares / ctx.transport.size(),
      std::min(1.0, shares * overlap));
}

void AggregatedBlocks::learn(NetContext& ctx, size_t any) const {
  if (ctx.aggregate != nullptr && present_ != 0) {
    ctx.aggregate->overlap =
        static_cast<double>(any) / static_cast<double>(present_);
  }
}

void AggregatedBlocks::run(NetContext& ctx, const Plan& plan) {
  ctx.aggregated = true;
  ctx.moved.blocks += own_.blocks;
  ctx.moved.blocks_present += mine_ - own_.unseen;
  const std::vector<size_t> counts = plan.counts();
  const size_t block = plan.skip->block;
  const size_t stripe = select_stripe(
      {block * plan.src_size,
       present_ / static_cast<size_t>(ctx.transport.size()),
       ctx.aggregators->places().size(),
       ctx.aggregate == nullptr ? 0 : ctx.aggregate->message_bytes});
  size_t any = 0;
  size_t first = 0; // word of a tensor
  for (size_t t = 0; t < counts.size(); ++t) {
    const auto shares = ctx.aggregators->sparse_all_reduce(
        reduction_of(ctx, plan, t, counts[t]),
        own_.bits.data() + first,
        static_cast<uint32_t>(block),
        static_cast<uint32_t>(stripe));
    any += shares.blocks;
    first += BlockMap::words_of(counts[t], block);
  }
  learn(ctx, any);
  ctx.moved.blocks_union += any - own_.unseen;
  if (blocks_ != 0) {
    density_ = static_cast<double>(any) / static_cast<double>(blocks_);
  }
}

} // namespace fusedpg
