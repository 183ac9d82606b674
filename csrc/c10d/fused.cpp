// ProcessGroupFused::fused_adamw_: arguments, the engine's way, and the same
// step composed of the delegate's collectives for groups that span hosts.

#include "base/ownership.hpp"
#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

using Arguments = ProcessGroupFused::AdamwArguments;

void check_state(
    const char* name,
    size_t i,
    const at::Tensor& t,
    const ShardRange& range) {
  check_tensor("fused_adamw_", t);
  TORCH_CHECK_VALUE(
      t.scalar_type() == at::kFloat && t.is_contiguous() &&
          t.numel() == range.length,
      "fused: fused_adamw_: ",
      name,
      "[",
      i,
      "] must be a contiguous float32 tensor with this rank's slice of "
      "params[",
      i,
      "], ",
      range.length,
      " elements (fusedpg.shard_range); found ",
      t.scalar_type(),
      " with ",
      t.numel());
}

void check_arguments(const Arguments& a, int rank, int size) {
  const size_t n = a.params.size();
  const auto check_list = [&](const char* name, const auto& list, size_t want) {
    TORCH_CHECK_VALUE(
        list.size() == want,
        "fused: fused_adamw_: ",
        name,
        " has ",
        list.size(),
        " tensors, expected ",
        want,
        " (params has ",
        n,
        ")");
  };
  TORCH_CHECK_VALUE(n != 0, "fused: fused_adamw_: params is empty");
  check_list("grads", a.grads, n);
  check_list("exp_avgs", a.exp_avgs, n);
  check_list("exp_avg_sqs", a.exp_avg_sqs, n);
  check_list("state_steps", a.state_steps, n);
  if (a.amsgrad || !a.max_exp_avg_sqs.empty()) {
    check_list("max_exp_avg_sqs", a.max_exp_avg_sqs, a.amsgrad ? n : 0);
  }
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& p = a.params[i];
    check_tensor("fused_adamw_", p);
    check_tensor("fused_adamw_", a.grads[i]);
    TORCH_CHECK_VALUE(
        p.scalar_type() == at::kFloat && a.grads[i].scalar_type() == at::kFloat,
        "fused: fused_adamw_: params and grads must be float32, found ",
        p.scalar_type(),
        " and ",
        a.grads[i].scalar_type(),
        " at ",
        i);
    TORCH_CHECK_VALUE(
        p.is_non_overlapping_and_dense(),
        "fused: fused_adamw_: params[",
        i,
        "] must be dense in memory (no gaps, no overlaps)");
    TORCH_CHECK_VALUE(
        a.grads[i].sizes() == p.sizes(),
        "fused: fused_adamw_: grads[",
        i,
        "] has shape ",
        a.grads[i].sizes(),
        ", params[",
        i,
        "] ",
        p.sizes());
    const ShardRange range = shard_range(p.numel(), size, rank);
    check_state("exp_avgs", i, a.exp_avgs[i], range);
    check_state("exp_avg_sqs", i, a.exp_avg_sqs[i], range);
    if (a.amsgrad) {
      check_state("max_exp_avg_sqs", i, a.max_exp_avg_sqs[i], range);
    }
    const at::Tensor& step = a.state_steps[i];
    TORCH_CHECK_VALUE(
        step.numel() == 1 && step.scalar_type() == at::kFloat &&
            step.device().is_cpu(),
        "fused: fused_adamw_: state_steps[",
        i,
        "] must be a float32 scalar tensor on the CPU");
  }
  for (const auto& t : {a.grad_scale, a.found_inf}) {
    TORCH_CHECK_VALUE(
        !t ||
            (t->numel() == 1 && t->scalar_type() == at::kFloat &&
             t->device().is_cpu()),
        "fused: fused_adamw_: grad_scale and found_inf must be float32 scalar "
        "tensors on the CPU");
  }
  TORCH_CHECK_VALUE(
      a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1,
      "fused: fused_adamw_: betas must be in [0, 1), found ",
      a.beta1,
      " and ",
      a.beta2);
}

AdamwHyper to_hyper(const Arguments& a) {
  AdamwHyper h{};
  h.lr = std::holds_alternative<double>(a.lr)
      ? std::get<double>(a.lr)
      : std::get<at::Tensor>(a.lr).item<double>();
  h.beta1 = a.beta1;
  h.beta2 = a.beta2;
  h.weight_decay = a.weight_decay;
  h.eps = a.eps;
  h.amsgrad = a.amsgrad;
  h.maximize = a.maximize;
  h.mean = a.mean;
  h.grad_scale = a.grad_scale ? a.grad_scale->const_data_ptr<float>() : nullptr;
  h.found_inf = a.found_inf ? a.found_inf->data_ptr<float>() : nullptr;
  return h;
}

// A gradient laid out in memory as its parameter is.
at::Tensor like_param(const at::Tensor& grad, const at::Tensor& param) {
  if (grad.strides() == param.strides()) {
    return grad;
  }
  at::Tensor copy = at::empty_like(param);
  copy.copy_(grad.detach());
  return copy;
}

AdamwTensor to_engine(
    const Arguments& a,
    size_t i,
    const at::Tensor& param,
    const at::Tensor& grad) {
  Hash layout;
  for (int64_t d = 0; d < param.dim(); ++d) {
    layout.add(static_cast<uint64_t>(param.size(d)));
    // The stride of a dimension of one element means nothing.
    layout.add(static_cast<uint64_t>(param.size(d) == 1 ? 0 : param.stride(d)));
  }
  return {
      param.data_ptr<float>(),
      grad.const_data_ptr<float>(),
      a.exp_avgs[i].data_ptr<float>(),
      a.exp_avg_sqs[i].data_ptr<float>(),
      a.amsgrad ? a.max_exp_avg_sqs[i].data_ptr<float>() : nullptr,
      a.state_steps[i].data_ptr<float>(),
      static_cast<size_t>(param.numel()),
      layout.value()};
}

// The elements of a dense tensor in memory order.
at::Tensor memory_order(const at::Tensor& t) {
  return t.detach().as_strided({t.numel()}, {1});
}

// Across hosts: reduce-scatter, our update of the owned slice, all-gather, with
// the delegate's collectives.
class DelegatedStep {
 public:
  DelegatedStep(
      const Arguments& a,
      c10d::Backend& gloo,
      const kernels::Table& kernels)
      : a_(a),
        gloo_(gloo),
        kernels_(kernels),
        rank_(gloo.getRank()),
        size_(gloo.getSize()) {}

  void run() {
    c10::NoGradGuard no_grad;
    const AdamwHyper hyper = to_hyper(a_);
    if (any_inf(hyper)) {
      return;
    }
    for (size_t i = 0; i < a_.params.size(); ++i) {
      step(i, hyper);
    }
  }

 private:
  bool any_inf(const AdamwHyper& hyper) {
    at::Tensor flag = at::zeros({1});
    if (hyper.found_inf && *hyper.found_inf != 0.0F) {
      flag.fill_(1.0);
    }
    c10d::AllreduceOptions opts;
    opts.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> tensors{flag};
    gloo_.allreduce(tensors, opts)->wait();
    const bool found = flag.item<float>() != 0.0F;
    if (found && hyper.found_inf) {
      *hyper.found_inf = 1.0F;
    }
    return found;
  }

  void step(size_t i, const AdamwHyper& hyper) {
    const at::Tensor& param = a_.params[i];
    const int64_t numel = param.numel();
    const ShardRange mine = shard_range(numel, size_, rank_);
    const int64_t chunk = shard_range(numel, size_, 0).length;
    const at::Tensor grad = like_param(a_.grads[i], param);

    at::Tensor padded = at::zeros({chunk * size_});
    padded.narrow(0, 0, numel).copy_(memory_order(grad));
    at::Tensor slice = at::empty({chunk});
    gloo_._reduce_scatter_base(slice, padded, c10d::ReduceScatterOptions())
        ->wait();

    const at::Tensor flat = memory_order(param);
    at::Tensor updated = at::zeros({chunk});
    updated.narrow(0, 0, mine.length)
        .copy_(flat.narrow(0, mine.offset, mine.length));
    float* step = a_.state_steps[i].data_ptr<float>();
    float* out = updated.data_ptr<float>();
    const float* in = slice.const_data_ptr<float>();
    kernels_.adamw_f32(
        adamw_args(hyper, *step + 1.0F, size_),
        &out,
        1,
        out,
        &in,
        1,
        a_.exp_avgs[i].data_ptr<float>(),
        a_.exp_avg_sqs[i].data_ptr<float>(),
        a_.amsgrad ? a_.max_exp_avg_sqs[i].data_ptr<float>() : nullptr,
        static_cast<size_t>(mine.length),
        false);

    gloo_._allgather_base(padded, updated, c10d::AllgatherOptions())->wait();
    flat.copy_(padded.narrow(0, 0, numel));
    *step += 1.0F;
  }

  const Arguments& a_;
  c10d::Backend& gloo_;
  const kernels::Table& kernels_;
  const int rank_;
  const int size_;
};

} // namespace

ProcessGroupFused::WorkPtr ProcessGroupFused::fused_adamw_(
    AdamwArguments arguments,
    bool async_op) {
  check_arguments(arguments, getRank(), getSize());
  const Call call{
      c10d::OpType::UNKNOWN, "fused:fused_adamw_", timeout_.load(), async_op};
  for (const at::Tensor& p : arguments.params) {
    if (!p.is_inference()) {
      // Autograd must notice that a saved parameter has changed.
      p.unsafeGetTensorImpl()->bump_version();
    }
  }
  // Kept by the closure, which may run after this call has returned.
  const auto a = std::make_shared<AdamwArguments>(std::move(arguments));
  if (spans_hosts()) {
    return run_delegated(
        call, a->grads, a->params, [a, &table = kernels_](auto& gloo) {
          DelegatedStep(*a, gloo, table).run();
          return WorkPtr();
        });
  }
  return run(call, a->grads, a->params, [a](Context& ctx) {
    c10::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    std::vector<AdamwTensor> tensors;
    for (size_t i = 0; i < a->params.size(); ++i) {
      grads.push_back(like_param(a->grads[i], a->params[i]));
      tensors.push_back(to_engine(*a, i, a->params[i], grads.back()));
    }
    fused_adamw(ctx, tensors, to_hyper(*a));
  });
}

} // namespace fusedpg
