// The fused operations of ProcessGroupFused on the engine's way.

#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"

namespace fusedpg {
namespace {

const char* title(OpCode op) {
  switch (op) {
    case OpCode::kFusedSgd:
      return "fused:fused_sgd_";
    case OpCode::kFusedAdam:
      return "fused:fused_adam_";
    case OpCode::kFusedLamb:
      return "fused:fused_lamb_";
    default:
      return "fused:fused_adamw_";
  }
}

} // namespace

ProcessGroupFused::WorkPtr ProcessGroupFused::fused_step_(
    StepArguments arguments,
    bool async_op) {
  check_arguments(arguments, getRank(), getSize());
  const Call call{
      c10d::OpType::UNKNOWN, title(arguments.op), timeout_.load(), async_op};
  for (const at::Tensor& p : arguments.params) {
    if (!p.is_inference()) {
      // Autograd must notice that a saved parameter has changed.
      p.unsafeGetTensorImpl()->bump_version();
    }
  }
  if (on_gpu(arguments.params)) {
    TORCH_CHECK_VALUE(
        !arguments.shared_params,
        "fused: parameters on a GPU cannot be shared between ranks");
    check_open(call.title);
    check_not_coalescing(call.title);
    if (arguments.masters_follow) {
      follow_params(arguments, getRank(), getSize());
    }
    return cuda().fused_step(
        std::move(arguments), call.title, call.timeout, async_op);
  }
  // Kept by the closure, which may run after this call has returned.
  const auto a = std::make_shared<const StepArguments>(std::move(arguments));
  if (spans_hosts()) {
    return enqueue(
        call,
        a->grads,
        a->params,
        [this, a, timeout = call.timeout](uint64_t ticket) {
          NetContext ctx = net_context(ticket, timeout, a->op);
          run_net_step(ctx, a, net_skip_.block);
          stats_.add(
              a->op,
              ctx.moved.blocks != 0 ? DataPath::kSkipping : DataPath::kMessages,
              ctx.moved);
        });
  }
  return run(call, a->grads, a->params, [a](Context& ctx) {
    c10::NoGradGuard no_grad;
    StepPlan plan(a, ctx.skip.block);
    for (size_t i = 0; i < plan.calls().size(); ++i) {
      ctx.begin_item(i, plan.calls().size());
      fused_step(ctx, plan.calls()[i]);
      plan.take_used(i);
    }
  });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::reduce_shards_(
    ShardsArguments arguments,
    bool async_op) {
  check_arguments(arguments);
  const Call call{
      c10d::OpType::REDUCE_SCATTER,
      "fused:reduce_shards",
      timeout_.load(),
      async_op};
  if (on_gpu(arguments.grads)) {
    check_open(call.title);
    check_not_coalescing(call.title);
    return cuda().reduce_shards(
        std::move(arguments), call.title, call.timeout, async_op);
  }
  const auto a = std::make_shared<const ShardsArguments>(std::move(arguments));
  if (spans_hosts()) {
    return enqueue(
        call,
        a->grads,
        a->grads,
        [this, a, timeout = call.timeout](uint64_t ticket) {
          NetContext ctx = net_context(ticket, timeout, OpCode::kReduceShards);
          run_net_shards(ctx, *a);
          stats_.add(OpCode::kReduceShards, DataPath::kMessages, ctx.moved);
        });
  }
  return run(call, a->grads, a->grads, [a](Context& ctx) {
    const auto parts = split_shards(to_engine(*a));
    for (size_t i = 0; i < parts.size(); ++i) {
      ctx.begin_item(i, parts.size());
      reduce_shards(ctx, parts[i]);
    }
  });
}

} // namespace fusedpg
