// The fused operations of a group that spans hosts, composed of the delegate's
// collectives with our update between them.

#include "base/error.hpp"
#include "base/ownership.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

// All ranks' values, one row a rank.
at::Tensor gather_rows(c10d::Backend& backend, at::Tensor mine) {
  at::Tensor rows =
      at::empty({backend.getSize() * mine.numel()}, mine.options());
  backend._allgather_base(rows, mine, c10d::AllgatherOptions())->wait();
  return rows.view({backend.getSize(), mine.numel()});
}

// Which tensors any rank uses, and this rank's share of a weighted mean.
struct Agreed {
  std::vector<bool> used;
  double factor = 1; // of this rank's contribution
};

Agreed agree(
    const ReductionArguments& r,
    size_t tensors,
    bool mean_here,
    c10d::Backend& backend) {
  Agreed agreed;
  agreed.used.assign(tensors, true);
  if (r.used) {
    c10d::AllreduceOptions opts;
    opts.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> flags{*r.used};
    backend.allreduce(flags, opts)->wait();
    for (size_t i = 0; i < tensors; ++i) {
      agreed.used[i] = r.used->const_data_ptr<uint8_t>()[i] != 0;
    }
  }
  if (r.weight) {
    const at::Tensor rows =
        gather_rows(backend, at::full({1}, *r.weight, at::kDouble));
    const double total = rows.sum().item<double>();
    agreed.factor = total > 0 ? *r.weight / total : 0;
  } else if (r.mean && mean_here) {
    agreed.factor = 1.0 / backend.getSize();
  }
  return agreed;
}

kernels::ReduceArgs sum_of(at::ScalarType type) {
  kernels::ReduceArgs args;
  args.dtype = to_dtype(type);
  return args;
}

bool skips(NetSkip& skip, const at::Tensor& flat, int size) {
  return select_skip(
             skip.state,
             size,
             static_cast<uint64_t>(flat.numel()),
             flat.nbytes(),
             sum_of(flat.scalar_type())) == DensityEstimates::Choice::kSkip;
}

// This rank's slice of the sum over ranks, in the type that is added: half
// types in fp32.
at::Tensor reduced_slice(
    const at::Tensor& grad, // dense
    double factor,
    c10d::Backend& backend,
    NetSkip* skip) {
  const int size = backend.getSize();
  const int64_t numel = grad.numel();
  const int64_t chunk = shard_range(numel, size, 0).length;
  const at::ScalarType type =
      grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor padded = at::zeros({chunk * size}, type);
  padded.narrow(0, 0, numel).copy_(memory_order(grad));
  if (factor != 1) {
    padded.mul_(factor);
  }
  const ShardRange mine = shard_range(numel, size, backend.getRank());
  if (skip != nullptr && skips(*skip, padded, size)) {
    NetContext ctx = skip->context();
    const ReduceTensor tensor{padded.data_ptr(), static_cast<size_t>(numel)};
    skip->moved += net_sparse_reduce_scatter(
        ctx, tensor, sum_of(type), {skip->state.block});
    return padded.narrow(0, mine.offset, mine.length);
  }
  at::Tensor slice = at::empty({chunk}, type);
  backend._reduce_scatter_base(slice, padded, c10d::ReduceScatterOptions())
      ->wait();
  return slice.narrow(0, 0, mine.length);
}

class DelegatedStep {
 public:
  DelegatedStep(
      StepCall& call,
      c10d::Backend& backend,
      const kernels::Table& kernels)
      : call_(call),
        backend_(backend),
        kernels_(kernels),
        rank_(backend.getRank()),
        size_(backend.getSize()) {}

  // `slice` is the reduced gradient.
  void run(size_t i, const at::Tensor& param, const at::Tensor& slice) {
    const StepTensor& t = call_.tensors[i];
    const ShardRange mine = shard_range(param.numel(), size_, rank_);
    const int64_t chunk = shard_range(param.numel(), size_, 0).length;
    const at::Tensor flat = memory_order(param);
    at::Tensor updated = at::zeros({chunk}, param.options());
    updated.narrow(0, 0, mine.length)
        .copy_(flat.narrow(0, mine.offset, mine.length));

    kernels::UpdateArgs args = update_args(call_, t, size_);
    const void* grad = slice.const_data_ptr();
    void* out = updated.data_ptr();
    kernels::UpdateSpans s;
    s.param_type = call_.param_type;
    s.grad_type = call_.grad_type;
    s.state_type = call_.state_type;
    s.params_out = &out;
    s.num_out = 1;
    s.param = out;
    s.grads = &grad;
    s.num_grads = 1;
    s.master = call_.has_masters ? t.master : nullptr;
    std::copy(std::begin(t.state), std::end(t.state), std::begin(s.state));
    s.count = static_cast<size_t>(mine.length);
    if (args.formula == kernels::Formula::kLamb) {
      args.lamb.step_size = lamb_step_size(args, s, call_.hypers[t.hyper]);
    }
    kernels_.update(args, s);

    at::Tensor all = at::empty({chunk * size_}, param.options());
    backend_._allgather_base(all, updated, c10d::AllgatherOptions())->wait();
    flat.copy_(all.narrow(0, 0, param.numel()));
    if (t.step) {
      *t.step += 1.0F;
    }
  }

 private:
  double lamb_step_size(
      const kernels::UpdateArgs& args,
      const kernels::UpdateSpans& spans,
      const StepHyper& hyper) {
    const size_t blocks =
        (spans.count + kernels::kSumBlock - 1) / kernels::kSumBlock;
    std::vector<double> sums(2 * blocks);
    kernels_.lamb_moments(args, spans, sums.data());
    at::Tensor mine = at::zeros({2}, at::kDouble);
    for (size_t k = 0; k < sums.size(); ++k) {
      mine.data_ptr<double>()[k % 2] += sums[k];
    }
    const at::Tensor rows = gather_rows(backend_, mine);
    double totals[2] = {0, 0};
    for (int p = 0; p < size_; ++p) {
      for (int k = 0; k < 2; ++k) {
        totals[k] += rows.const_data_ptr<double>()[2 * p + k];
      }
    }
    return hyper.lr * trust_ratio(hyper, totals[0], totals[1]);
  }

  StepCall& call_;
  c10d::Backend& backend_;
  const kernels::Table& kernels_;
  const int rank_;
  const int size_;
};

// Whether any rank has found an infinity. Ranks that skip blocks of different
// sizes, or not at all, would wait for each other's messages.
bool any_inf(
    const StepArguments& a,
    c10d::Backend& backend,
    const NetSkip* skip) {
  const double block =
      skip != nullptr ? static_cast<double>(skip->state.block) : 0;
  at::Tensor mine = at::zeros({2}, at::kDouble);
  if (a.found_inf) {
    mine.narrow(0, 0, 1).copy_(a.found_inf->reshape({1}));
  }
  mine.narrow(0, 1, 1).fill_(block);
  const at::Tensor rows = gather_rows(backend, mine);
  bool found = false;
  for (int p = 0; p < backend.getSize(); ++p) {
    const double* row = rows.const_data_ptr<double>() + 2 * p;
    found = found || row[0] != 0; // or NaN
    if (row[1] != block) {
      fail(
          ErrorKind::kMismatch,
          "fused: ",
          op_name(a.op),
          ": ranks skip different blocks of zeros: of ",
          block,
          " elements on rank ",
          backend.getRank(),
          ", of ",
          row[1],
          " on rank ",
          p,
          " (0: block_skip is off)");
    }
  }
  if (found && a.found_inf) {
    a.found_inf->fill_(1.0);
  }
  return found;
}

} // namespace

void run_delegated_step(
    const StepArguments& a,
    c10d::Backend& backend,
    const kernels::Table& kernels,
    NetSkip* skip) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !a.shared_params,
      "fused: parameters cannot be shared in a group that spans hosts");
  const Agreed agreed =
      agree(a.reduction, a.params.size(), !a.reduced, backend);
  if (any_inf(a, backend, skip)) {
    return;
  }
  // Calls of one tensor, whose gradient has been reduced here.
  StepArguments one;
  one.op = a.op;
  one.hypers = a.hypers;
  one.reduction = a.reduction;
  one.reduction.used.reset();
  one.reduced = true;
  one.grad_scale = a.grad_scale;
  one.states.resize(a.states.size());
  const auto pick = [](const std::vector<at::Tensor>& list, size_t i) {
    return list.empty() ? list : std::vector<at::Tensor>{list[i]};
  };
  for (size_t i = 0; i < a.params.size(); ++i) {
    if (!agreed.used[i]) {
      continue;
    }
    const at::Tensor& param = a.params[i];
    at::Tensor grad = a.grads[i];
    if (!a.reduced) {
      if (grad.strides() != param.strides()) {
        grad = at::empty_like(param, grad.options()).copy_(grad);
      }
      grad = reduced_slice(grad, agreed.factor, backend, skip);
    }
    one.params = {param};
    one.grads = {grad};
    one.masters = pick(a.masters, i);
    one.steps = pick(a.steps, i);
    for (size_t k = 0; k < a.states.size(); ++k) {
      one.states[k] = pick(a.states[k], i);
    }
    if (!a.hyper_index.empty()) {
      one.hyper_index = {a.hyper_index[i]};
    }
    StepPlan plan(std::make_shared<const StepArguments>(one));
    DelegatedStep(plan.calls()[0], backend, kernels).run(0, param, grad);
  }
}

void run_delegated_shards(const ShardsArguments& a, c10d::Backend& backend) {
  c10::NoGradGuard no_grad;
  const Agreed agreed = agree(a.reduction, a.grads.size(), true, backend);
  for (size_t i = 0; i < a.grads.size(); ++i) {
    if (agreed.used[i]) {
      const at::Tensor& grad = a.grads[i];
      const ShardRange mine =
          shard_range(grad.numel(), backend.getSize(), backend.getRank());
      const at::Tensor& output = a.outputs.empty() ? grad : a.outputs[i];
      memory_order(output)
          .narrow(0, mine.offset, mine.length)
          .copy_(reduced_slice(grad, agreed.factor, backend, nullptr));
    }
  }
}

} // namespace fusedpg
