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

namespace fusedpg {
namespace {

// Tensors travel together up to this, in bytes of parameters or gradients.
constexpr size_t kBatchBytes = size_t(64) << 20;

// --- what ranks agree on before anything moves -------------------------------

// All ranks' values, one row a rank.
at::Tensor gather_rows(c10d::Backend& backend, at::Tensor mine) {
  at::Tensor rows =
      at::empty({backend.getSize() * mine.numel()}, mine.options());
  backend._allgather_base(rows, mine, c10d::AllgatherOptions())->wait();
  return rows.view({backend.getSize(), mine.numel()});
}

struct Agreed {
  bool found_inf = false;
  std::vector<double> weights; // of the ranks' gradients; empty: none
};

Agreed agree(
    OpCode op,
    uint64_t hash,
    const std::optional<double>& weight,
    bool found_inf,
    c10d::Backend& backend) {
  hash = Hash().add(static_cast<uint64_t>(op)).add(hash).value();
  enum : int { kFoundInf, kWeight, kHigh, kLow, kColumns };
  const double row[kColumns] = {
      found_inf ? 1.0 : 0.0,
      weight.value_or(0),
      static_cast<double>(hash >> 32),
      static_cast<double>(hash & 0xffffffff)};
  at::Tensor mine = at::empty({kColumns}, at::kDouble);
  std::memcpy(mine.data_ptr(), row, sizeof row);
  const at::Tensor rows = gather_rows(backend, mine);
  Agreed agreed;
  for (int p = 0; p < backend.getSize(); ++p) {
    const double* theirs = rows.const_data_ptr<double>() + p * kColumns;
    if (theirs[kHigh] != row[kHigh] || theirs[kLow] != row[kLow]) {
      fail(
          ErrorKind::kMismatch,
          "fused: ",
          op_name(op),
          " between hosts: ranks disagree: the call on rank ",
          p,
          " is not that on rank ",
          backend.getRank(),
          " (here); tensors, types, hyperparameters, counters, and whether "
          "there are weights, used flags and block_skip must be equal");
    }
    agreed.found_inf = agreed.found_inf || theirs[kFoundInf] != 0;
    if (weight) {
      agreed.weights.push_back(theirs[kWeight]);
    }
  }
  divide_by_sum(agreed.weights);
  return agreed;
}

// The flags of all ranks; null stays null.
void agree_on_used(uint8_t* used, size_t count, c10d::Backend& backend) {
  if (used != nullptr) {
    c10d::AllreduceOptions opts;
    opts.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> flags{
        at::from_blob(used, {static_cast<int64_t>(count)}, at::kByte)};
    backend.allreduce(flags, opts)->wait();
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

class DelegatedStep {
 public:
  DelegatedStep(
      const StepCall& call,
      const std::vector<double>& weights,
      c10d::Backend& backend,
      NetContext& ctx,
      SkipState& skip)
      : call_(call),
        weights_(weights),
        backend_(backend),
        ctx_(ctx),
        skip_(skip),
        rank_(backend.getRank()),
        size_(backend.getSize()) {}

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
    if (count * element < kNetSkipBytes ||
        select_skip(skip_, size_, count, count * element, sum) !=
            DensityEstimates::Choice::kSkip) {
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
        ctx_, {i.reduced.data(), count}, sum, {skip_.block});
    const ShardRange own =
        shard_range(static_cast<int64_t>(count), size_, rank_);
    i.spans.grad_type = sum.dtype;
    i.grads = {i.reduced.data() + static_cast<size_t>(own.offset) * element};
    return true;
  }

  // Sums of squares of whole tensors: blocks in order, then ranks in order.
  void exchange_norms(std::vector<Item>& items) {
    at::Tensor mine =
        at::zeros({static_cast<int64_t>(2 * items.size())}, at::kDouble);
    for (size_t i = 0; i < items.size(); ++i) {
      const kernels::UpdateSpans& s = items[i].spans;
      const size_t blocks =
          (s.count + kernels::kSumBlock - 1) / kernels::kSumBlock;
      std::vector<double> sums(2 * blocks);
      ctx_.kernels.lamb_moments(items[i].args, s, sums.data());
      for (size_t k = 0; k < sums.size(); ++k) {
        mine.data_ptr<double>()[2 * i + k % 2] += sums[k];
      }
    }
    const at::Tensor rows = gather_rows(backend_, mine);
    for (size_t i = 0; i < items.size(); ++i) {
      double totals[2] = {0, 0};
      for (int p = 0; p < size_; ++p) {
        const double* theirs = rows.const_data_ptr<double>() +
            2 * (static_cast<size_t>(p) * items.size() + i);
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
  c10d::Backend& backend_;
  NetContext& ctx_;
  SkipState& skip_;
  const int rank_;
  const int size_;
};

} // namespace

OpStats run_delegated_step(
    const std::shared_ptr<const StepArguments>& a,
    c10d::Backend& backend,
    const std::function<NetContext()>& context,
    SkipState& skip) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !a->shared_params,
      "fused: parameters cannot be shared in a group that spans hosts");
  StepPlan plan(a, skip.mode == BlockSkip::kOff ? 0 : skip.block);
  Hash hash;
  for (const StepCall& call : plan.calls()) {
    hash.add(shape_hash(call).value()).add(value_hash(call));
  }
  hash.add(uint64_t(plan.has_used()));
  hash.add(uint64_t(a->reduction.weight.has_value()));
  const bool found = a->found_inf && a->found_inf->item<float>() != 0;
  const Agreed agreed =
      agree(a->op, hash.value(), a->reduction.weight, found, backend);
  for (size_t i = 0; i < plan.calls().size(); ++i) {
    const StepCall& call = plan.calls()[i];
    agree_on_used(call.used, call.tensors.size(), backend);
    plan.take_used(i);
  }
  if (agreed.found_inf) {
    if (a->found_inf) {
      a->found_inf->fill_(1.0);
    }
    return {};
  }
  NetContext ctx = context();
  for (const StepCall& call : plan.calls()) {
    DelegatedStep(call, agreed.weights, backend, ctx, skip).run();
  }
  return ctx.moved;
}

OpStats run_delegated_shards(
    const ShardsArguments& a,
    c10d::Backend& backend,
    const std::function<NetContext()>& context) {
  c10::NoGradGuard no_grad;
  const ShardsCall call = to_engine(a);
  Hash hash;
  hash.add(call.layout_hash).add(uint64_t(call.dtype));
  hash.add(uint64_t(call.reduction.mean)).add(uint64_t(call.used != nullptr));
  hash.add(uint64_t(call.reduction.weight.has_value()));
  const Agreed agreed = agree(
      OpCode::kReduceShards,
      hash.value(),
      call.reduction.weight,
      false,
      backend);
  agree_on_used(call.used, call.grads.size(), backend);
  NetContext ctx = context();
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
  return ctx.moved;
}

} // namespace fusedpg
