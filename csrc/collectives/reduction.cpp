#include "collectives/reduction.hpp"

namespace fusedpg {

OpDescriptor reduction_descriptor(OpCode op, const kernels::ReduceArgs& args) {
  if (!reduction_supported(args.dtype, args.op)) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: {} is not defined for {}",
        op_name(op),
        red_op_name(args.op),
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

Plan::Epilogue identity_epilogue(
    Context& ctx,
    const kernels::ReduceArgs& args) {
  return [&ctx, args](
             size_t /* tensor */,
             size_t /* begin */,
             size_t count,
             void* const* dsts,
             size_t num_dsts,
             const Sources& srcs,
             bool stream) {
    ctx.kernels.reduce(
        args, dsts, num_dsts, srcs.data, srcs.num, count, stream);
  };
}

OpStats lane_stats(const Plan& plan, Context& ctx) {
  OpStats stats;
  const auto peers = static_cast<size_t>(ctx.size() - 1);
  for (int p = 0; p < ctx.size(); ++p) {
    size_t elements = 0;
    for (const Piece& piece : plan.lanes[p]) {
      elements += piece.count;
    }
    const size_t contributed = elements * plan.src_size;
    const size_t given = elements * plan.dst_size;
    const bool mine = p == ctx.rank();
    stats.bytes_sent += mine ? peers * given : contributed;
    stats.bytes_received += mine ? peers * contributed : given;
  }
  return stats;
}

DataPath data_path(const Path& path) {
  return path.reads_direct && path.writes_direct ? DataPath::kDirect
                                                 : DataPath::kStaged;
}

Plan in_place(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  Plan plan;
  plan.src_size = plan.dst_size = dtype_size(args.dtype);
  plan.epilogue = identity_epilogue(ctx, args);
  std::vector<size_t> counts;
  for (const ReduceTensor& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {static_cast<const char*>(t.data), static_cast<char*>(t.data)});
  }
  plan.lanes = Plan::shards(counts, ctx.size());
  return plan;
}

} // namespace fusedpg
