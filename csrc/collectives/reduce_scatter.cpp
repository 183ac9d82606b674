#include "collectives/collectives.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// Whether the inputs follow one another in memory, as in one tensor.
bool adjacent(const std::vector<ReduceTensor>& inputs, size_t size) {
  for (size_t p = 1; p < inputs.size(); ++p) {
    const auto& before = inputs[p - 1];
    if (static_cast<char*>(before.data) + before.count * size !=
        inputs[p].data) {
      return false;
    }
  }
  return true;
}

} // namespace

void reduce_scatter(
    Context& ctx,
    const ReduceTensor& output,
    const std::vector<ReduceTensor>& inputs,
    const kernels::ReduceArgs& args) {
  OpDescriptor d =
      describe_sum(ctx, sum_call(OpCode::kReduceScatter, inputs, args), inputs);
  const int me = ctx.rank();
  const size_t size = dtype_size(args.dtype);
  if (output.count != inputs[me].count) {
    fail(
        ErrorKind::kInvalid,
        "fused: reduce_scatter: the output has {} elements, the input for this "
        "rank {}",
        output.count,
        inputs[me].count);
  }
  const size_t bytes = d.count * size;
  const Span whole{inputs[0].data, bytes};
  const bool one_tensor = adjacent(inputs, size);
  const auto finish = [&](const void* const* staged_inputs) {
    size_t offset = 0;
    for (int p = 0; p < me; ++p) {
      offset += inputs[p].count * size;
    }
    std::vector<const void*> srcs(staged_inputs, staged_inputs + ctx.size());
    for (const void*& src : srcs) {
      src = static_cast<const char*>(src) + offset;
    }
    ctx.kernels.reduce(
        args, &output.data, 1, srcs.data(), ctx.size(), output.count, false);
  };
  ShmWay way(ctx);
  auto small = Way::AtOnce::kNo;
  if (one_tensor) {
    small = way.at_once(d, whole, finish);
  } else if (select_one_shot(bytes, false)) {
    std::vector<char> gathered;
    gathered.reserve(bytes);
    for (const ReduceTensor& t : inputs) {
      const char* begin = static_cast<const char*>(t.data);
      gathered.insert(gathered.end(), begin, begin + t.count * size);
    }
    small = way.at_once(d, {gathered.data(), bytes}, finish);
  }
  if (small == Way::AtOnce::kDone) {
    return;
  }
  Plan plan;
  plan.src_size = plan.dst_size = size;
  plan.receiver = Plan::kOwner;
  plan.epilogue = reduction_epilogue(ctx.kernels, args);
  for (int p = 0; p < ctx.size(); ++p) {
    plan.tensors.push_back(
        {static_cast<const char*>(inputs[p].data),
         p == me ? static_cast<char*>(output.data) : nullptr});
    plan.lanes.push_back({{static_cast<size_t>(p), 0, inputs[p].count}});
  }
  if (small == Way::AtOnce::kNo) {
    way.enter(&plan, d, {});
  }
  way.run(plan, d);
}

} // namespace fusedpg
