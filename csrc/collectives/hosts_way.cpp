#include "collectives/hosts_way.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/ownership.hpp"
#include "collectives/host_fold.hpp"
#include "collectives/net_pipeline.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// What this way can do of a plan: anything else would go wrong unseen.
void check_plan(const Plan& plan, const HostMap& hosts, int world_size) {
  const bool shards = plan.lanes == Plan::shards(plan.counts(), world_size);
  const bool real = plan.src_type == DType::kFloat64 ||
      plan.src_type == DType::kFloat32 || plan.src_type == DType::kFloat16 ||
      plan.src_type == DType::kBFloat16;
  const bool adds = plan.reads && (plan.skip || hosts.shared());
  if (plan.shared_results || (plan.skip && !shards) ||
      (plan.skip && !plan.zeros_stay && !real) ||
      (plan.zeros_stay && plan.receiver >= 0) ||
      (adds && plan.src_type == DType::kOpaque)) {
    fail(
        ErrorKind::kInvalid,
        "fused: between hosts zeros are skipped only in floating-point tensors "
        "cut by the ownership map, contributions have a type, and results are "
        "not shared");
  }
}

// Zeros of a tensor stay at home if this holds: times their weight they are zeros.
bool skips(const Plan& plan, size_t count) {
  return plan.reads && plan.skip && count != 0 &&
      select_net_skip(count * dtype_size(wide_type(plan.src_type)));
}

} // namespace

HostsWay::HostsWay(NetContext& ctx, const HostMap* flat)
    : ctx_(ctx),
      hosts_(ctx.hosts),
      domain_(ctx.domain) {
  if (flat != nullptr) {
    ctx_.hosts = flat;
    ctx_.domain = nullptr;
  }
}

void HostsWay::begin_item(uint64_t index, uint64_t length) {
  ctx_.begin_item(index, length);
  ctx_.moved = {};
  ctx_.aggregated = false;
}

void HostsWay::refuse(const std::string& reason) {
  net_refuse(ctx_, reason);
}

void HostsWay::move(const Move& move, OpDescriptor& d) {
  const HostMap* const hosts_of_sums = std::exchange(ctx_.hosts, hosts_);
  Domain* const domain_of_sums = std::exchange(ctx_.domain, domain_);
  net_move(ctx_, move, d);
  ctx_.hosts = hosts_of_sums;
  ctx_.domain = domain_of_sums;
}

void HostsWay::complete(OpDescriptor& mine, size_t table_entries) const {
  ctx_.identify(mine);
  mine.table_entries = table_entries;
}

void HostsWay::check_all(const OpDescriptor& mine) {
  check_said(
      mine,
      rank(),
      size(),
      [this](int p) -> const OpDescriptor& { return said_[p]; },
      [this](int p) { return reason_of(p); });
}

std::string HostsWay::reason_of(int p) {
  const size_t bytes = said_[p].table_entries * sizeof(uint64_t);
  const NetPending more =
      net_receive(ctx_, p, NetKind::kTable, NetBuffer(bytes));
  more.request->wait(ctx_.deadline);
  return more.buffer.data(); // it ends with zeros
}

void HostsWay::enter(
    const Plan* plan,
    OpDescriptor& mine,
    const std::vector<uint64_t>& extra) {
  complete(mine, extra.size());
  const auto rows = net_gather_rows(ctx_, &mine, sizeof mine);
  said_.resize(rows.size());
  for (int p = 0; p < size(); ++p) {
    std::memcpy(&said_[p], rows[p].data(), sizeof mine);
  }
  check_all(mine);
  if (!extra.empty()) {
    extra_ =
        net_gather_rows(ctx_, extra.data(), extra.size() * sizeof(uint64_t));
  }
  blocks_.reset();
  aggregated_.reset();
  if (plan != nullptr && plan->skip && plan->zeros_stay) {
    find_blocks(*plan, mine);
  }
}

void HostsWay::find_blocks(const Plan& plan, const OpDescriptor& d) {
  const std::vector<size_t> counts = plan.counts();
  net_together(ctx_, [&] {
    OwnBlocks own = find_own_blocks(ctx_, plan, [&](size_t t) {
      return plan.zeros_stay || skips(plan, counts[t]);
    });
    if (!plan.zeros_stay || !may_aggregate(ctx_, plan)) {
      blocks_.emplace(share_blocks(ctx_, plan, own, d));
      return;
    }
    aggregated_.emplace(ctx_, plan, std::move(own));
    if (!aggregated_->chosen(ctx_, plan)) {
      blocks_.emplace(share_blocks(ctx_, plan, aggregated_->own(), d));
      aggregated_->learn(ctx_, blocks_->all.present_blocks(BlockMap::kAny));
      aggregated_.reset();
    }
  });
}

double HostsWay::density() {
  return aggregated_ ? aggregated_->density() : blocks_->all.density();
}

void HostsWay::count(OpCode named) {
  ctx_.stats.add(
      named,
      ctx_.aggregated              ? DataPath::kAggregated
          : ctx_.moved.blocks != 0 ? DataPath::kSkipping
                                   : DataPath::kMessages,
      ctx_.moved);
}

// What ranks say and what they have travel together; who finds that they
// disagree leaves the latter where it is.
Way::AtOnce HostsWay::at_once(OpDescriptor& mine, const Small& small) {
  const Span& input = small.input;
  if (!takes_at_once(input.bytes)) {
    return {};
  }
  complete(mine, 0);
  const NetBuffer fact(sizeof mine);
  std::memcpy(fact.data(), &mine, sizeof mine);
  OneShot& shot = one_shot_.emplace(
      OneShot{
          HostFold(ctx_.kernels, *ctx_.hosts, small.args),
          NetBuffer(input.bytes),
          std::vector<NetPending>(size())});
  NetBuffer& data = shot.own;
  std::copy_n(static_cast<const char*>(input.data), input.bytes, data.data());
  std::vector<NetPending> facts(size()), sends;
  for (int k = 1; k < size(); ++k) {
    const int p = (rank() + k) % size();
    facts[p] = net_receive(ctx_, p, NetKind::kBlock, NetBuffer(sizeof mine));
    sends.push_back(net_send(ctx_, p, NetKind::kBlock, fact));
    if (input.bytes != 0) {
      sends.push_back(net_send(ctx_, p, NetKind::kContribution, data));
    }
  }
  said_.assign(size(), mine);
  for (int p = 0; p < size(); ++p) {
    if (p != rank()) {
      facts[p].request->wait(ctx_.deadline);
      std::memcpy(&said_[p], facts[p].buffer.data(), sizeof mine);
    }
  }
  check_all(mine);
  std::vector<const void*> srcs(size(), data.data());
  for (int p = 0; p < size() && input.bytes != 0; ++p) {
    if (p != rank()) {
      shot.parts[p] =
          net_receive(ctx_, p, NetKind::kContribution, NetBuffer(input.bytes));
      shot.parts[p].request->wait(ctx_.deadline);
      srcs[p] = shot.parts[p].buffer.data();
    }
  }
  for (const void*& src : srcs) {
    src = static_cast<const char*>(src) +
        small.begin * dtype_size(small.args.dtype);
  }
  for (NetPending& one : sends) {
    one.request->wait(ctx_.deadline);
  }
  return {
      .entered = true, .sources = shot.fold.sources(srcs.data(), small.count)};
}

uint64_t HostsWay::shared_place(const void* /* data */, size_t /* bytes */) {
  fail(
      ErrorKind::kInvalid,
      "fused: parameters cannot be shared in a group that spans hosts");
}

void HostsWay::run(const Plan& plan, const OpDescriptor& d) {
  check_plan(plan, *ctx_.hosts, size());
  if (aggregated_) {
    net_together(ctx_, [&] { aggregated_->run(ctx_, plan); });
    return;
  }
  if (plan.zeros_stay) {
    net_pipeline(ctx_, plan, d, &*blocks_);
    return;
  }
  if (may_aggregate(ctx_, plan) && choose_aggregators(ctx_, plan)) {
    net_together(ctx_, [&] { aggregate_dense(ctx_, plan); });
    return;
  }
  const std::vector<size_t> counts = plan.counts();
  bool some = false;
  for (const size_t count : counts) {
    some = some || skips(plan, count);
  }
  if (some) {
    find_blocks(plan, d);
  }
  net_pipeline(ctx_, plan, d, some ? &*blocks_ : nullptr);
}

} // namespace fusedpg
