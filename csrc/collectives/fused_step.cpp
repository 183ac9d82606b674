#include <cmath>

#include "base/ownership.hpp"
#include "collectives/collectives.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {
namespace {

// Ranks must update with the same scalars, or replicas drift apart silently.
uint64_t value_hash(
    const std::vector<AdamwTensor>& tensors,
    const AdamwHyper& hyper) {
  Hash hash;
  hash.add(hyper.lr).add(hyper.beta1).add(hyper.beta2);
  hash.add(hyper.weight_decay).add(hyper.eps);
  hash.add(uint64_t(hyper.amsgrad)).add(uint64_t(hyper.maximize));
  hash.add(uint64_t(hyper.mean));
  hash.add(hyper.grad_scale ? double(*hyper.grad_scale) : 1.0);
  for (const AdamwTensor& t : tensors) {
    hash.add(double(*t.step));
  }
  return hash.value();
}

OpDescriptor describe_step(
    Context& ctx,
    const std::vector<AdamwTensor>& tensors,
    const AdamwHyper& hyper) {
  OpDescriptor d;
  d.op = OpCode::kFusedAdamW;
  d.dtype = DType::kFloat32;
  d.items = tensors.size();
  Hash shape;
  for (const AdamwTensor& t : tensors) {
    d.count += t.count;
    shape.add(static_cast<uint64_t>(t.count)).add(t.layout_hash);
    check_nan(ctx, d, t.grad, t.count);
  }
  d.shape_hash = shape.value();
  d.value_hash = value_hash(tensors, hyper);
  if (hyper.found_inf && *hyper.found_inf != 0.0F) {
    d.flags |= kFoundInf;
  }
  return d;
}

TwoShot make_plan(
    Context& ctx,
    const std::vector<AdamwTensor>& tensors,
    const AdamwHyper& hyper) {
  TwoShot plan;
  plan.element_size = sizeof(float);
  std::vector<size_t> counts;
  std::vector<kernels::AdamwArgs> args;
  for (const AdamwTensor& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {reinterpret_cast<const char*>(t.grad),
         reinterpret_cast<char*>(t.param)});
    args.push_back(adamw_args(hyper, *t.step + 1.0F, ctx.size()));
  }
  plan.lanes = TwoShot::shards(counts, ctx.size());
  plan.epilogue = [&ctx, &tensors, args = std::move(args)](
                      size_t tensor,
                      size_t begin,
                      size_t count,
                      void* const* dsts,
                      size_t num_dsts,
                      const void* const* srcs,
                      bool stream) {
    const AdamwTensor& t = tensors[tensor];
    const size_t state =
        begin -
        static_cast<size_t>(
            shard_range(static_cast<int64_t>(t.count), ctx.size(), ctx.rank())
                .offset);
    ctx.kernels.adamw_f32(
        args[tensor],
        reinterpret_cast<float* const*>(dsts),
        num_dsts,
        t.param + begin,
        reinterpret_cast<const float* const*>(srcs),
        static_cast<size_t>(ctx.size()),
        t.exp_avg + state,
        t.exp_avg_sq + state,
        t.max_exp_avg_sq ? t.max_exp_avg_sq + state : nullptr,
        count,
        stream);
  };
  return plan;
}

} // namespace

kernels::AdamwArgs adamw_args(
    const AdamwHyper& hyper,
    float step,
    int world_size) {
  kernels::AdamwArgs a{};
  const double scale = hyper.grad_scale ? *hyper.grad_scale : 1.0F;
  const double divisor = hyper.mean ? world_size : 1;
  a.decay = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  a.beta1 = static_cast<float>(hyper.beta1);
  a.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  a.beta2 = static_cast<float>(hyper.beta2);
  a.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  a.eps = static_cast<float>(hyper.eps);
  a.step_size =
      static_cast<float>(hyper.lr / (1.0 - std::pow(hyper.beta1, step)));
  a.bias_correction2_sqrt =
      static_cast<float>(std::sqrt(1.0 - std::pow(hyper.beta2, step)));
  a.grad_factor =
      static_cast<float>((hyper.maximize ? -1.0 : 1.0) / (scale * divisor));
  a.amsgrad = hyper.amsgrad;
  return a;
}

void fused_adamw(
    Context& ctx,
    const std::vector<AdamwTensor>& tensors,
    const AdamwHyper& hyper) {
  OpDescriptor d = describe_step(ctx, tensors, hyper);
  const TwoShot plan = make_plan(ctx, tensors, hyper);
  plan.begin(ctx, d);
  if (any_rank(ctx, kFoundInf)) {
    if (hyper.found_inf) {
      *hyper.found_inf = 1.0F;
    }
    return;
  }
  plan.run(ctx, d);
  for (const AdamwTensor& t : tensors) {
    *t.step += 1.0F;
  }
}

} // namespace fusedpg
