// The fused operations of a group that spans hosts: gradients go to their
// owners and parameters to everybody over the transport, with the engine's
// update in between. Owners fold the ranks' gradients in rank order, so results
// have the bits of those inside a machine.

#include <cstring>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/ownership.hpp"
#include "c10d/fused_arguments.hpp"

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
  double total = 0;
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
    total += theirs[kWeight];
    if (weight) {
      agreed.weights.push_back(theirs[kWeight]);
    }
  }
  for (double& one : agreed.weights) {
    one = total > 0 ? one / total : 0;
  }
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

// The shards of a batch of tensors on the wire: each rank's in a block of its
// own, one behind the other.
class Blocks {
 public:
  Blocks(NetContext& ctx, DType type)
      : ctx_(ctx),
        element_(dtype_size(type)),
        rank_(ctx.transport.rank()),
        size_(ctx.transport.size()),
        bytes_(size_) {}

  void add(size_t count) {
    counts_.push_back(static_cast<int64_t>(count));
    for (int p = 0; p < size_; ++p) {
      offsets_.push_back(bytes_[p]);
      bytes_[p] += bytes(counts_.size() - 1, p);
    }
  }
  ShardRange own(size_t i) const {
    return shard(i, rank_);
  }
  // An owner's shard in the whole tensor ...
  char* in_tensor(const void* tensor, size_t i, int owner) const {
    return static_cast<char*>(const_cast<void*>(tensor)) +
        static_cast<size_t>(shard(i, owner).offset) * element_;
  }
  // ... and in that owner's block.
  char* in_block(const NetBuffer& block, size_t i, int owner) const {
    return block.data() + offsets_[i * static_cast<size_t>(size_) + owner];
  }
  NetBuffer make(int owner) const {
    return NetBuffer(bytes_[owner]);
  }

  // Sends the owners their blocks of these tensors. What the other ranks have
  // in this one's, by rank.
  std::vector<NetBuffer> scatter(const std::vector<const void*>& tensors) {
    std::vector<NetBuffer> outs(size_), ins(size_);
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) {
        continue;
      }
      outs[p] = make(p);
      ins[p] = make(rank_);
      for (size_t i = 0; i < tensors.size(); ++i) {
        copy(in_block(outs[p], i, p), in_tensor(tensors[i], i, p), bytes(i, p));
      }
    }
    net_exchange(ctx_, outs, ins);
    return ins;
  }
  // Sends everybody this rank's block, and puts the others' into the tensors.
  void gather(const NetBuffer& mine, const std::vector<void*>& tensors) {
    std::vector<NetBuffer> ins(size_);
    for (int p = 0; p < size_; ++p) {
      ins[p] = p == rank_ ? mine : make(p);
    }
    net_exchange(ctx_, std::vector<NetBuffer>(size_, mine), ins);
    for (int p = 0; p < size_; ++p) {
      for (size_t i = 0; i < tensors.size() && p != rank_; ++i) {
        copy(in_tensor(tensors[i], i, p), in_block(ins[p], i, p), bytes(i, p));
      }
    }
  }

 private:
  ShardRange shard(size_t i, int owner) const {
    return shard_range(counts_[i], size_, owner);
  }
  size_t bytes(size_t i, int owner) const {
    return static_cast<size_t>(shard(i, owner).length) * element_;
  }
  // Of an empty tensor there need be no address.
  static void copy(char* to, const char* from, size_t bytes) {
    if (bytes != 0) {
      std::memcpy(to, from, bytes);
    }
  }

  NetContext& ctx_;
  const size_t element_;
  const int rank_;
  const int size_;
  std::vector<size_t> bytes_; // of blocks, by owner
  std::vector<int64_t> counts_;
  std::vector<size_t> offsets_; // a tensor's in all blocks, the next one's, ...
};

// All ranks' gradients of the shards that this rank owns.
class Received {
 public:
  explicit Received(NetContext& ctx, DType type)
      : blocks_(ctx, type),
        rank_(ctx.transport.rank()) {}

  void add(const void* grad, size_t count) {
    blocks_.add(count);
    grads_.push_back(grad);
  }
  void exchange() {
    blocks_in_ = blocks_.scatter(grads_);
  }
  // By rank; they live as long as this.
  std::vector<const void*> sources(size_t i) const {
    std::vector<const void*> all;
    for (size_t p = 0; p < blocks_in_.size(); ++p) {
      all.push_back(
          static_cast<int>(p) == rank_
              ? blocks_.in_tensor(grads_[i], i, rank_)
              : blocks_.in_block(blocks_in_[p], i, rank_));
    }
    return all;
  }
  ShardRange own(size_t i) const {
    return blocks_.own(i);
  }

 private:
  Blocks blocks_;
  const int rank_;
  std::vector<const void*> grads_;
  std::vector<NetBuffer> blocks_in_;
};

// --- steps -------------------------------------------------------------------

at::ScalarType scalar_type(DType gradients) {
  switch (gradients) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

class DelegatedStep {
 public:
  DelegatedStep(
      const StepCall& call,
      const std::vector<double>& weights,
      c10d::Backend& backend,
      NetContext& ctx,
      StepSkip& skip)
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
    at::Tensor reduced; // the gradient, if it is what `grads` leads to
  };

  void run_batch(const std::vector<size_t>& batch) {
    std::vector<Item> items;
    for (const size_t t : batch) {
      items.push_back(item(call_.tensors[t]));
    }
    Received received(ctx_, call_.grad_type); // holds what `grads` lead to
    take_gradients(items, received);
    for (Item& i : items) {
      i.spans.grads = i.grads.data();
      i.spans.num_grads = i.grads.size();
    }
    if (items[0].args.formula == kernels::Formula::kLamb) {
      exchange_norms(items);
    }
    Blocks blocks(ctx_, call_.param_type);
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

  void take_gradients(std::vector<Item>& items, Received& received) {
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
    }
  }

  // Half types are added in fp32, as where owners fold the ranks' gradients.
  bool skips(Item& i) {
    kernels::ReduceArgs sum;
    sum.dtype =
        call_.grad_type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const size_t count = i.tensor.count;
    const size_t element = dtype_size(sum.dtype);
    if (select_skip(skip_.state, size_, count, count * element, sum) !=
        DensityEstimates::Choice::kSkip) {
      return false;
    }
    const auto length = static_cast<int64_t>(count);
    const at::Tensor grad = at::from_blob(
        const_cast<void*>(i.tensor.grad),
        {length},
        scalar_type(call_.grad_type));
    i.reduced =
        at::empty({length}, scalar_type(sum.dtype)).copy_(grad.detach());
    if (i.args.weights != nullptr) {
      i.reduced.mul_(i.args.weights[rank_]);
      i.args.weights = nullptr;
    }
    skip_.moved += net_sparse_reduce_scatter(
        ctx_, {i.reduced.data_ptr(), count}, sum, {skip_.state.block});
    const ShardRange own = shard_range(length, size_, rank_);
    i.spans.grad_type = sum.dtype;
    i.grads = {
        static_cast<const char*>(i.reduced.const_data_ptr()) +
        static_cast<size_t>(own.offset) * element};
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
  StepSkip& skip_;
  const int rank_;
  const int size_;
};

} // namespace

void run_delegated_step(
    const std::shared_ptr<const StepArguments>& a,
    c10d::Backend& backend,
    const std::function<NetContext()>& context,
    StepSkip& skip) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !a->shared_params,
      "fused: parameters cannot be shared in a group that spans hosts");
  StepPlan plan(a, skip.state.block);
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
    return;
  }
  NetContext ctx = context();
  for (const StepCall& call : plan.calls()) {
    DelegatedStep(call, agreed.weights, backend, ctx, skip).run();
  }
}

void run_delegated_shards(
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
  const kernels::ReduceArgs args =
      shards_reduction(call, agreed.weights, backend.getSize());
  const size_t element = dtype_size(call.dtype);
  for_batches(
      call.counts, element, call.used, [&](const std::vector<size_t>& batch) {
        Received received(ctx, call.dtype);
        for (const size_t t : batch) {
          received.add(call.grads[t], call.counts[t]);
        }
        received.exchange();
        for (size_t i = 0; i < batch.size(); ++i) {
          const auto sources = received.sources(i);
          const ShardRange own = received.own(i);
          void* out = static_cast<char*>(call.outputs[batch[i]]) +
              static_cast<size_t>(own.offset) * element;
          ctx.kernels.reduce(
              args,
              &out,
              1,
              sources.data(),
              sources.size(),
              static_cast<size_t>(own.length),
              false);
        }
      });
}

} // namespace fusedpg
