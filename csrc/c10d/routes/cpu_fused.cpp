// The fused operations, and reductions that skip blocks of zeros, on CPU
// tensors.

#include "c10d/errors.hpp"
#include "c10d/routes/cpu.hpp"
#include "collectives/perform.hpp"
#include "collectives/skip.hpp"

namespace fusedpg {

WorkPtr CpuRoute::fused_step_(StepArguments arguments, bool async_op) {
  const CallInfo call = group_.info(
      c10d::OpType::UNKNOWN, step_inputs(arguments.op).title, async_op);
  // Kept by the closure, which may run after this call has returned.
  const auto a = std::make_shared<const StepArguments>(std::move(arguments));
  return run(
      call,
      a->grads,
      a->params,
      [a, block = group_.settings.block_size](Way& way) {
        const c10::NoGradGuard no_grad;
        StepPlan plan(a, block);
        for (size_t i = 0; i < plan.calls().size(); ++i) {
          way.begin_item(i, plan.calls().size());
          perform(way, {.op = a->op, .fused = &plan.calls()[i]});
          plan.take_used(i);
        }
      });
}

WorkPtr CpuRoute::reduce_shards_(ShardsArguments arguments, bool async_op) {
  const CallInfo call = group_.info(
      c10d::OpType::REDUCE_SCATTER, "fused:reduce_shards", async_op);
  const auto a = std::make_shared<const ShardsArguments>(std::move(arguments));
  return run(call, a->grads, a->grads, [a](Way& way) {
    const auto parts = split_shards(to_engine(*a));
    for (size_t i = 0; i < parts.size(); ++i) {
      way.begin_item(i, parts.size());
      perform(way, {.op = OpCode::kReduceShards, .fused = &parts[i]});
    }
  });
}

WorkPtr CpuRoute::fused_program_(ProgramArguments arguments, bool async_op) {
  const CallInfo call =
      group_.info(c10d::OpType::UNKNOWN, "fused:fused_program", async_op);
  const auto a = std::make_shared<const ProgramArguments>(std::move(arguments));
  TORCH_CHECK_VALUE(
      a->done.scalar_type() == at::kByte && a->done.numel() == 1,
      "fused: fused_program: `done` must be one byte");
  TORCH_CHECK_VALUE(
      !a->kernel,
      "fused: fused_program: a GPU's kernel cannot run on a CPU; pass the "
      "address of a compiled function");
  ProgramCall call_of_engine = to_engine(*a, rank_, size_);
  call_of_engine.function = a->function;
  Tensors inputs = a->operands;
  inputs.push_back(a->source);
  return run(
      call,
      inputs,
      a->outputs,
      [a, engine = std::move(call_of_engine)](Way& way) {
        *a->done.data_ptr<uint8_t>() =
            perform(way, {.op = OpCode::kFusedProgram, .fused = &engine});
      });
}

WorkPtr CpuRoute::sparse_all_reduce(
    const at::Tensor& tensor,
    const SkipArguments& arguments,
    bool async_op) {
  const CallInfo call =
      group_.info(c10d::OpType::ALLREDUCE, "fused:sparse_all_reduce", async_op);
  const SkipOptions options = skip_options(tensor, arguments);
  const auto args = to_reduce_args(arguments.op, tensor.scalar_type(), size_);
  translate([&] { check_can_skip(OpCode::kSparseAllReduce, args); });
  check_tensor("sparse_all_reduce", tensor);
  // The closure keeps the residual and the bitmap.
  return run(
      call,
      {tensor},
      {tensor},
      [tensor, kept = arguments, args, options](Way& way) {
        const Flat flat = Flat::inout(tensor);
        perform(
            way,
            {.op = OpCode::kSparseAllReduce,
             .dtype = args.dtype,
             .inputs = single(flat.buffer()),
             .red_op = args.op,
             .factor = args.factor,
             .skip = options});
        flat.finish();
      });
}

} // namespace fusedpg
