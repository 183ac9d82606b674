#include "collectives/reduction.hpp"

namespace fusedpg {

OpDescriptor reduction_descriptor(OpCode op, const kernels::ReduceArgs& args) {
  if (!reduction_supported(args.dtype, args.op)) {
    fail(
        ErrorKind::kInvalid,
        "fused: ",
        op_name(op),
        ": ",
        red_op_name(args.op),
        " is not defined for ",
        dtype_name(args.dtype));
  }
  OpDescriptor d;
  d.op = op;
  d.dtype = args.dtype;
  d.red_op = args.op;
  // An owner scales every rank's contribution, so all must mean one factor.
  d.value_hash = Hash().add(args.factor).value();
  return d;
}

void describe_tensors(
    Context& ctx,
    OpDescriptor& d,
    const std::vector<ReduceTensor>& tensors) {
  Hash shape;
  d.items = tensors.size();
  for (const ReduceTensor& t : tensors) {
    d.count += t.count;
    shape.add(static_cast<uint64_t>(t.count));
    check_nan(ctx, d, t.data, t.count);
  }
  d.shape_hash = shape.value();
}

TwoShot::Epilogue identity_epilogue(
    Context& ctx,
    const kernels::ReduceArgs& args) {
  return [&ctx, args](
             size_t /* tensor */,
             size_t /* begin */,
             size_t count,
             void* const* dsts,
             size_t num_dsts,
             const void* const* srcs,
             bool stream) {
    ctx.kernels.reduce(args, dsts, num_dsts, srcs, ctx.size(), count, stream);
  };
}

TwoShot in_place(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  TwoShot plan;
  plan.src_size = plan.dst_size = dtype_size(args.dtype);
  plan.epilogue = identity_epilogue(ctx, args);
  std::vector<size_t> counts;
  for (const ReduceTensor& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {static_cast<const char*>(t.data), static_cast<char*>(t.data)});
  }
  plan.lanes = TwoShot::shards(counts, ctx.size());
  return plan;
}

} // namespace fusedpg
