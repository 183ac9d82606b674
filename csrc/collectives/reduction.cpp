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

uint64_t shape_hash(const std::vector<ReduceTensor>& tensors) {
  Hash shape;
  for (const ReduceTensor& t : tensors) {
    shape.add(static_cast<uint64_t>(t.count));
  }
  return shape.value();
}

void describe_tensors(
    Way& way,
    OpDescriptor& d,
    const std::vector<ReduceTensor>& tensors) {
  d.items = tensors.size();
  for (const ReduceTensor& t : tensors) {
    d.count += t.count;
    check_nan(way.op(), d, t.data, t.count);
  }
  d.shape_hash = shape_hash(tensors);
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
    if (!srcs.folded) {
      kernels.reduce(args, dsts, num_dsts, srcs.data, srcs.num, count, stream);
      return;
    }
    // What is left: the division, and one rounding.
    kernels::ReduceArgs rest = args;
    rest.dtype = wide_type(args.dtype);
    if (rest.weights != nullptr) {
      rest.op = RedOp::kSum;
      rest.weights = nullptr;
    }
    void* sum = const_cast<void*>(srcs.data[0]);
    kernels.reduce(rest, &sum, 1, srcs.data, 1, count, false);
    for (size_t i = 0; i < num_dsts; ++i) {
      kernels.cast(args.dtype, dsts[i], rest.dtype, sum, count);
    }
  };
}

Plan in_place(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  Plan plan;
  plan.src_size = plan.dst_size = dtype_size(args.dtype);
  if (args.op == RedOp::kSum || args.op == RedOp::kAvg) {
    plan.src_type = args.dtype;
  }
  plan.epilogue = reduction_epilogue(way.kernels(), args);
  std::vector<size_t> counts;
  for (const ReduceTensor& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {static_cast<const char*>(t.data), static_cast<char*>(t.data)});
  }
  plan.lanes = Plan::shards(counts, way.size());
  return plan;
}

} // namespace fusedpg
