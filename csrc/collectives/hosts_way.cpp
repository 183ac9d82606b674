#include "collectives/hosts_way.hpp"

#include <cstring>

#include "base/ownership.hpp"
#include "collectives/net_pipeline.hpp"
#include "collectives/net_shards.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// Tensors travel together up to this, in bytes of contributions or results.
constexpr size_t kBatchBytes = size_t(64) << 20;

// What this way can do of a plan: anything else would go wrong unseen.
void check_plan(const Plan& plan, int world_size, bool folds) {
  const bool added = plan.src_type == DType::kFloat64 ||
      plan.src_type == DType::kFloat32 || plan.src_type == DType::kFloat16 ||
      plan.src_type == DType::kBFloat16;
  // What is not folded on the way, nor added up without zeros, is combined by
  // the epilogue, whatever its type.
  const bool may_add = added || plan.zeros_stay || !(folds || plan.skip);
  if ((plan.reads && !may_add) || plan.receiver >= 0 || plan.shared_results ||
      plan.lanes != Plan::shards(plan.counts(), world_size)) {
    fail(
        ErrorKind::kInvalid,
        "fused: between hosts only plans of floating-point tensors, cut by the "
        "ownership map, for all ranks, their owners or nobody");
  }
}

// Whether zeros of a tensor stay at home until they are summed up.
bool skips(const Plan& plan, size_t count) {
  return plan.reads && plan.skip && count != 0 &&
      select_net_skip(count * dtype_size(wide_type(plan.src_type)));
}

} // namespace

void HostsWay::complete(OpDescriptor& mine, size_t table_entries) const {
  mine.sequence = ctx_.sequence;
  mine.list_index = ctx_.list_index;
  mine.list_length = ctx_.list_length;
  mine.table_entries = table_entries;
}

void HostsWay::check_said(const OpDescriptor& mine) {
  for (int p = 0; p < size(); ++p) {
    check_agreement(mine, rank(), said_[p], p);
  }
  for (int p = 0; p < size(); ++p) {
    check_nan_flag(said_[p], p);
  }
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
  check_said(mine);
  if (!extra.empty()) {
    extra_ =
        net_gather_rows(ctx_, extra.data(), extra.size() * sizeof(uint64_t));
  }
  skip_.reset();
  if (plan != nullptr && plan->skip && plan->zeros_stay) {
    if (plan->tensors.size() != 1) {
      fail(
          ErrorKind::kInvalid,
          "fused: between hosts one tensor at a time skips blocks of zeros");
    }
    skip_.emplace(
        ctx_,
        ReduceTensor{plan->tensors[0].dst, plan->counts()[0]},
        plan->src_type,
        *plan->skip,
        plan->receiver == Plan::kAll);
    skip_->find();
  }
}

void HostsWay::count(OpCode named) {
  if (delegate_ && !skip_) {
    return;
  }
  ctx_.stats.add(
      named,
      ctx_.moved.blocks != 0 ? DataPath::kSkipping : DataPath::kMessages,
      ctx_.moved);
}

// What ranks say and what they have travel together; who finds that they
// disagree leaves the latter where it is.
Way::AtOnce HostsWay::at_once(
    OpDescriptor& mine,
    const Span& input,
    const Combine& combine) {
  if (delegate_ || !select_net_one_shot(input.bytes, size())) {
    return AtOnce::kNo;
  }
  complete(mine, 0);
  const NetBuffer fact(sizeof mine);
  std::memcpy(fact.data(), &mine, sizeof mine);
  NetBuffer data(input.bytes);
  std::copy_n(static_cast<const char*>(input.data), input.bytes, data.data());
  std::vector<NetPending> facts(size()), parts(size()), sends;
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
  check_said(mine);
  std::vector<const void*> srcs(size(), data.data());
  for (int p = 0; p < size() && input.bytes != 0; ++p) {
    if (p != rank()) {
      parts[p] =
          net_receive(ctx_, p, NetKind::kContribution, NetBuffer(input.bytes));
      parts[p].request->wait(ctx_.deadline);
      srcs[p] = parts[p].buffer.data();
    }
  }
  combine(srcs.data());
  for (NetPending& one : sends) {
    one.request->wait(ctx_.deadline);
  }
  return AtOnce::kDone;
}

uint64_t HostsWay::shared_place(const void* /* data */, size_t /* bytes */) {
  fail(
      ErrorKind::kInvalid,
      "fused: parameters cannot be shared in a group that spans hosts");
}

void HostsWay::run(const Plan& plan, const OpDescriptor& /* d */) {
  if (delegate_ && !plan.zeros_stay) {
    delegate_();
    return;
  }
  const bool direct =
      select_net_path(ctx_.ranks_share_hosts) == NetPath::kDirect;
  check_plan(plan, size(), /*folds=*/!direct);
  if (plan.zeros_stay) {
    skip_->run(plan.epilogue);
    return;
  }
  const std::vector<size_t> counts = plan.counts();
  if (direct) {
    Plan whole = plan;
    for (size_t t = 0; t < counts.size(); ++t) {
      if (skips(plan, counts[t])) {
        run_batch(plan, counts, {t});
        whole.drop(t);
      }
    }
    net_pipeline(ctx_, whole);
    return;
  }
  const size_t element = std::max(plan.src_size, plan.dst_size);
  std::vector<size_t> batch;
  size_t bytes = 0;
  const auto flush = [&] {
    if (!batch.empty()) {
      run_batch(plan, counts, batch);
    }
    batch.clear();
    bytes = 0;
  };
  for (size_t t = 0; t < counts.size(); ++t) {
    if (counts[t] == 0) {
      continue;
    }
    const size_t more = counts[t] * element;
    if (bytes + more > kBatchBytes) {
      flush();
    }
    batch.push_back(t);
    bytes += more;
  }
  flush();
}

void HostsWay::run_batch(
    const Plan& plan,
    const std::vector<size_t>& counts,
    const std::vector<size_t>& batch) {
  struct Item {
    NetBuffer sum; // if its zeros stayed at home
    std::vector<const void*> srcs;
    bool folded = false;
  };
  std::vector<Item> items(batch.size());
  std::optional<ReceivedShards> received;
  if (plan.reads) {
    received.emplace(ctx_, plan.src_type, plan.weights);
    std::vector<Item*> whole;
    for (size_t i = 0; i < batch.size(); ++i) {
      const size_t t = batch[i];
      if (skips(plan, counts[t])) {
        items[i].sum = sum_skipping(plan, t, counts[t]);
        items[i].srcs = {items[i].sum.data()};
        items[i].folded = true;
      } else {
        received->add(plan.tensors[t].src, counts[t]);
        whole.push_back(&items[i]);
      }
    }
    received->exchange();
    for (size_t k = 0; k < whole.size(); ++k) {
      whole[k]->srcs = received->sources(k);
      whole[k]->folded = received->folded();
    }
  }
  const bool gives = plan.receiver == Plan::kAll;
  NetShards results(ctx_, plan.dst_size);
  std::vector<void*> dsts;
  for (const size_t t : batch) {
    results.add(counts[t]);
    dsts.push_back(plan.tensors[t].dst);
  }
  const NetBuffer mine = gives ? results.make(rank()) : NetBuffer();
  for (size_t i = 0; i < batch.size(); ++i) {
    const ShardRange own = results.own(i);
    if (own.length == 0) {
      continue;
    }
    void* outs[2];
    size_t n = 0;
    if (plan.receiver != Plan::kNobody) {
      outs[n++] = results.in_tensor(dsts[i], i, rank());
    }
    if (gives) {
      outs[n++] = results.in_block(mine, i, rank());
    }
    plan.epilogue(
        batch[i],
        static_cast<size_t>(own.offset),
        static_cast<size_t>(own.length),
        outs,
        n,
        {items[i].srcs.data(), items[i].srcs.size(), items[i].folded},
        /*stream=*/false);
  }
  received.reset();
  items.clear();
  if (gives) {
    results.gather(mine, dsts);
  }
}

NetBuffer HostsWay::sum_skipping(
    const Plan& plan,
    size_t tensor,
    size_t count) {
  kernels::ReduceArgs sum;
  sum.dtype = wide_type(plan.src_type);
  const size_t element = dtype_size(sum.dtype);
  const NetBuffer whole(count * element);
  widen(
      ctx_.kernels,
      whole.data(),
      plan.tensors[tensor].src,
      plan.src_type,
      count,
      plan.weights.empty() ? 1.0 : plan.weights[rank()]);
  NetSkip skip(ctx_, {whole.data(), count}, sum.dtype, *plan.skip, false);
  skip.find();
  skip.run(reduction_epilogue(ctx_.kernels, sum));
  const ShardRange own =
      shard_range(static_cast<int64_t>(count), size(), rank());
  return whole.part(
      static_cast<size_t>(own.offset) * element,
      static_cast<size_t>(own.length) * element);
}

} // namespace fusedpg
