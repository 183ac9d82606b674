#include "collectives/aggregated.hpp"

#include <algorithm>
#include <cstring>

#include "aggregate/client.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {

bool may_aggregate(const NetContext& ctx, const Plan& plan) {
  return ctx.aggregators != nullptr && plan.reduction &&
      plan.receiver == Plan::kAll;
}

void aggregate_dense(NetContext& ctx, const Plan& plan) {
  ctx.aggregated = true;
  const std::vector<size_t> counts = plan.counts();
  for (size_t t = 0; t < counts.size(); ++t) {
    ctx.aggregators->all_reduce(
        plan.tensors[t].dst,
        counts[t],
        *plan.reduction,
        ctx.sequence,
        ctx.deadline,
        ctx.moved);
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
  ctx.moved.blocks += own_.blocks;
  ctx.moved.blocks_present += mine - own_.unseen;
}

void AggregatedBlocks::run(NetContext& ctx, const Plan& plan) {
  ctx.aggregated = true;
  const std::vector<size_t> counts = plan.counts();
  const size_t block = plan.skip->block;
  const size_t stripe = select_stripe(
      {block * plan.src_size,
       present_ / static_cast<size_t>(ctx.transport.size()),
       ctx.aggregators->places().size()});
  size_t any = 0;
  size_t first = 0; // word of a tensor
  for (size_t t = 0; t < counts.size(); ++t) {
    const auto shares = ctx.aggregators->sparse_all_reduce(
        plan.tensors[t].dst,
        counts[t],
        *plan.reduction,
        own_.bits.data() + first,
        static_cast<uint32_t>(block),
        static_cast<uint32_t>(stripe),
        ctx.sequence,
        ctx.deadline,
        ctx.moved);
    any += shares.blocks;
    first += BlockMap::words_of(counts[t], block);
  }
  ctx.moved.blocks_union += any - own_.unseen;
  if (blocks_ != 0) {
    density_ = static_cast<double>(any) / static_cast<double>(blocks_);
  }
}

} // namespace fusedpg
