// The fused operations of a group that spans hosts: gradients go to their
// owners and parameters to everybody over the transport, with the engine's
// update in between. Owners fold the ranks' gradients in rank order, so results
// have the bits of those inside a machine.

#include <cstring>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/ownership.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/net_shards.hpp"
#include "collectives/net_sparse.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

// Tensors travel together up to this, in bytes of parameters or gradients.
constexpr size_t kBatchBytes = size_t(64) << 20;

// --- what ranks agree on before anything moves -------------------------------

// What all ranks have of this, by rank.
std::vector<NetBuffer> gather_rows(
    NetContext& ctx,
    const void* mine,
    size_t bytes) {
  const auto size = static_cast<size_t>(ctx.transport.size());
  std::vector<NetBuffer> rows;
  for (size_t p = 0; p < size; ++p) {
    rows.emplace_back(bytes);
  }
  const NetBuffer& own = rows[ctx.transport.rank()];
  std::memcpy(own.data(), mine, bytes);
  net_exchange(ctx, std::vector<NetBuffer>(size, own), rows);
  return rows;
}

struct Agreed {
  bool found_inf = false;
  std::vector<double> weights; // of the ranks' gradients; empty: none
};

Agreed agree(
    NetContext& ctx,
    uint64_t hash,
    const std::optional<double>& weight,
    bool found_inf) {
  struct Row {
    uint64_t hash;
    uint64_t found_inf;
    double weight;
  };
  const Row mine{
      Hash().add(static_cast<uint64_t>(ctx.op)).add(hash).value(),
      found_inf ? uint64_t(1) : uint64_t(0),
      weight.value_or(0)};
  const std::vector<NetBuffer> rows = gather_rows(ctx, &mine, sizeof mine);
  Agreed agreed;
  for (size_t p = 0; p < rows.size(); ++p) {
    Row theirs;
    std::memcpy(&theirs, rows[p].data(), sizeof theirs);
    if (theirs.hash != mine.hash) {
      fail(
          ErrorKind::kMismatch,
          "fused: ",
          op_name(ctx.op),
          " between hosts, sequence number ",
          ctx.sequence,
          ": ranks disagree: the call on rank ",
          p,
          " is not that on rank ",
          ctx.transport.rank(),
          " (here); tensors, types, hyperparameters, counters, and whether "
          "there are weights, used flags and block_skip must be equal");
    }
    agreed.found_inf = agreed.found_inf || theirs.found_inf != 0;
    if (weight) {
      agreed.weights.push_back(theirs.weight);
    }
  }
  divide_by_sum(agreed.weights);
  return agreed;
}

// The flags of all ranks; null stays null.
void agree_on_used(NetContext& ctx, uint8_t* used, size_t count) {
  if (used == nullptr) {
    return;
  }
  for (const NetBuffer& theirs : gather_rows(ctx, used, count)) {
    for (size_t t = 0; t < count; ++t) {
      used[t] = used[t] != 0 || theirs.data()[t] != 0 ? 1 : 0;
    }
  }
}

// --- what travels ------------------------------------------------------------

// Calls run(list of tensors) for the tensors that any rank uses.
template <typename Run>
void for_batches(
    const std::vector<size_t>& counts,
    size_t element,
    const uint8_t* used,
    Run&& run) {
  std::vector<size_t> batch;
  size_t bytes = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    if (used != nullptr && used[t] == 0) {
      continue;
    }
    const size_t more = counts[t] * element;
    if (!batch.empty() && bytes + more > kBatchBytes) {
      run(batch);
      batch.clear();
      bytes = 0;
    }
    batch.push_back(t);
    bytes += more;
  }
  if (!batch.empty()) {
    run(batch);
  }
}

// --- steps -------------------------------------------------------------------

class NetStep {
 public:
  NetStep(
      const StepCall& call,
      const std::vector<double>& weights,
      NetContext& ctx)
      : call_(call),
        weights_(weights),
        ctx_(ctx),
        rank_(ctx.transport.rank()),
        size_(ctx.transport.size()) {}

  void run() {
    std::vector<size_t> counts;
    for (const StepTensor& t : call_.tensors) {
      counts.push_back(t.count);
    }
    for_batches(
        counts,
        std::max(dtype_size(call_.grad_type), dtype_size(call_.param_type)),
        call_.used,
        [this](const std::vector<size_t>& batch) { run_batch(batch); });
  }

 private:
  // A tensor while its slice is updated.
  struct Item {
    const StepTensor& tensor;
    kernels::UpdateArgs args;
    kernels::UpdateSpans spans;
    std::vector<const void*> grads;
    NetBuffer reduced; // the gradient, if it is what `grads` leads to
  };

  void run_batch(const std::vector<size_t>& batch) {
    std::vector<Item> items;
    for (const size_t t : batch) {
      items.push_back(item(call_.tensors[t]));
    }
    // What `grads` lead to.
    std::optional<ReceivedShards> received(
        std::in_place, ctx_, call_.grad_type, weights_);
    take_gradients(items, *received);
    for (Item& i : items) {
      i.spans.grads = i.grads.data();
      i.spans.num_grads = i.grads.size();
    }
    if (items[0].args.formula == kernels::Formula::kLamb) {
      exchange_norms(items);
    }
    NetShards blocks(ctx_, call_.param_type);
    std::vector<void*> params;
    for (const Item& i : items) {
      blocks.add(i.tensor.count);
      params.push_back(i.tensor.param);
    }
    const NetBuffer mine = blocks.make(rank_);
    for (size_t i = 0; i < items.size(); ++i) {
      void* outs[] = {
          blocks.in_tensor(params[i], i, rank_),
          blocks.in_block(mine, i, rank_)};
      items[i].spans.params_out = outs;
      items[i].spans.num_out = 2;
      ctx_.kernels.update(items[i].args, items[i].spans);
      if (items[i].tensor.step) {
        *items[i].tensor.step += 1.0F;
      }
    }
    received.reset();
    items.clear();
    blocks.gather(mine, params);
  }

  Item item(const StepTensor& t) const {
    Item i{t, update_args(call_, t, size_), {}, {}, {}};
    i.args.weights =
        call_.reduced || weights_.empty() ? nullptr : weights_.data();
    const ShardRange own =
        shard_range(static_cast<int64_t>(t.count), size_, rank_);
    kernels::UpdateSpans& s = i.spans;
    s.param_type = call_.param_type;
    s.grad_type = call_.grad_type;
    s.state_type = call_.state_type;
    s.param = static_cast<const char*>(t.param) +
        static_cast<size_t>(own.offset) * dtype_size(call_.param_type);
    s.master = call_.has_masters ? t.master : nullptr;
    s.follow = call_.has_masters && call_.follow;
    std::copy(std::begin(t.state), std::end(t.state), std::begin(s.state));
    s.count = static_cast<size_t>(own.length);
    return i;
  }

  void take_gradients(std::vector<Item>& items, ReceivedShards& received) {
    std::vector<Item*> whole;
    for (Item& i : items) {
      if (call_.reduced) {
        i.grads = {i.tensor.grad};
      } else if (!skips(i)) {
        received.add(i.tensor.grad, i.tensor.count);
        whole.push_back(&i);
      }
    }
    received.exchange();
    for (size_t k = 0; k < whole.size(); ++k) {
      whole[k]->grads = received.sources(k);
      whole[k]->spans.grad_type = received.type();
      if (received.weighted()) {
        whole[k]->args.weights = nullptr;
      }
    }
  }

  // Half types are added in fp32, as where owners fold the ranks' gradients.
  bool skips(Item& i) {
    kernels::ReduceArgs sum;
    sum.dtype = wide_type(call_.grad_type);
    const size_t count = i.tensor.count;
    const size_t element = dtype_size(sum.dtype);
    if (!select_net_skip(call_, count * element)) {
      return false;
    }
    i.reduced = NetBuffer(count * element);
    widen(
        i.reduced.data(),
        i.tensor.grad,
        call_.grad_type,
        count,
        i.args.weights != nullptr ? i.args.weights[rank_] : 1.0);
    i.args.weights = nullptr;
    net_sparse_reduce_scatter(
        ctx_, {i.reduced.data(), count}, sum, {call_.skip_block});
    const ShardRange own =
        shard_range(static_cast<int64_t>(count), size_, rank_);
    i.spans.grad_type = sum.dtype;
    i.grads = {i.reduced.data() + static_cast<size_t>(own.offset) * element};
    return true;
  }

  // Sums of squares of whole tensors: blocks in order, then ranks in order.
  void exchange_norms(std::vector<Item>& items) {
    std::vector<double> mine(2 * items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      const kernels::UpdateSpans& s = items[i].spans;
      const size_t blocks =
          (s.count + kernels::kSumBlock - 1) / kernels::kSumBlock;
      std::vector<double> sums(2 * blocks);
      ctx_.kernels.lamb_moments(items[i].args, s, sums.data());
      for (size_t k = 0; k < sums.size(); ++k) {
        mine[2 * i + k % 2] += sums[k];
      }
    }
    const std::vector<NetBuffer> rows =
        gather_rows(ctx_, mine.data(), mine.size() * sizeof(double));
    for (size_t i = 0; i < items.size(); ++i) {
      double totals[2] = {0, 0};
      for (const NetBuffer& row : rows) {
        double theirs[2];
        std::memcpy(theirs, row.data() + i * sizeof theirs, sizeof theirs);
        totals[0] += theirs[0];
        totals[1] += theirs[1];
      }
      const StepHyper& hyper = call_.hypers[items[i].tensor.hyper];
      items[i].args.lamb.step_size =
          hyper.lr * trust_ratio(hyper, totals[0], totals[1]);
    }
  }

  const StepCall& call_;
  const std::vector<double>& weights_;
  NetContext& ctx_;
  const int rank_;
  const int size_;
};

} // namespace

void run_net_step(
    NetContext& ctx,
    const std::shared_ptr<const StepArguments>& a,
    size_t skip_block) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !a->shared_params,
      "fused: parameters cannot be shared in a group that spans hosts");
  StepPlan plan(a, skip_block);
  Hash hash;
  for (const StepCall& call : plan.calls()) {
    hash.add(shape_hash(call).value()).add(value_hash(call));
  }
  hash.add(uint64_t(plan.has_used()));
  hash.add(uint64_t(a->reduction.weight.has_value()));
  const bool found = a->found_inf && a->found_inf->item<float>() != 0;
  const Agreed agreed = agree(ctx, hash.value(), a->reduction.weight, found);
  for (size_t i = 0; i < plan.calls().size(); ++i) {
    const StepCall& call = plan.calls()[i];
    agree_on_used(ctx, call.used, call.tensors.size());
    plan.take_used(i);
  }
  if (agreed.found_inf) {
    if (a->found_inf) {
      a->found_inf->fill_(1.0);
    }
    return;
  }
  for (const StepCall& call : plan.calls()) {
    NetStep(call, agreed.weights, ctx).run();
  }
}

void run_net_shards(NetContext& ctx, const ShardsArguments& a) {
  c10::NoGradGuard no_grad;
  const ShardsCall call = to_engine(a);
  Hash hash;
  hash.add(call.layout_hash).add(uint64_t(call.dtype));
  hash.add(uint64_t(call.reduction.mean)).add(uint64_t(call.used != nullptr));
  hash.add(uint64_t(call.reduction.weight.has_value()));
  const Agreed agreed = agree(ctx, hash.value(), call.reduction.weight, false);
  agree_on_used(ctx, call.used, call.grads.size());
  for_batches(
      call.counts,
      dtype_size(call.dtype),
      call.used,
      [&](const std::vector<size_t>& batch) {
        ReceivedShards received(ctx, call.dtype, agreed.weights);
        for (const size_t t : batch) {
          received.add(call.grads[t], call.counts[t]);
        }
        received.exchange();
        for (size_t i = 0; i < batch.size(); ++i) {
          received.reduce(i, call, call.outputs[batch[i]]);
        }
      });
}

} // namespace fusedpg
