#include "collectives/reduction.hpp"

#include "collectives/host_fold.hpp"

namespace fusedpg {

SumCall sum_call(
    OpCode op,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  if (!reduction_supported(args.dtype, args.op)) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: {} is not defined for {}",
        op_name(op),
        red_op_name(args.op),
        dtype_name(args.dtype));
  }
  SumCall call{op, args.dtype, args.op, args.factor, -1, {}};
  for (const ReduceTensor& t : tensors) {
    call.counts.push_back(t.count);
  }
  return call;
}

OpDescriptor describe_sum(
    const OpContext& ctx,
    const SumCall& call,
    const std::vector<ReduceTensor>& tensors) {
  OpDescriptor d = facts(call);
  for (const ReduceTensor& t : tensors) {
    check_nan(ctx, d, t.data, t.count);
  }
  return d;
}

Plan::Epilogue reduction_epilogue(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args) {
  return [&kernels, args](
             size_t /* tensor */,
             size_t /* begin */,
             size_t count,
             void* const* dsts,
             size_t num_dsts,
             const Sources& srcs,
             bool stream) {
    combine(kernels, args, dsts, num_dsts, srcs, count, stream);
  };
}

Plan in_place(
    const kernels::Table& kernels,
    int world_size,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  Plan plan;
  plan.src_size = plan.dst_size = dtype_size(args.dtype);
  plan.src_type = args.dtype;
  plan.op = args.op;
  if (args.op == RedOp::kPremulSum) {
    plan.weights.assign(world_size, args.factor);
  }
  plan.epilogue = reduction_epilogue(kernels, args);
  plan.reduction = args;
  std::vector<size_t> counts;
  for (const ReduceTensor& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {static_cast<const char*>(t.data), static_cast<char*>(t.data)});
  }
  plan.lanes = Plan::shards(counts, world_size);
  return plan;
}

} // namespace fusedpg
