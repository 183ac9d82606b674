#include "collectives/collectives.hpp"
#include "collectives/host_fold.hpp"
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
    Way& way,
    const ReduceTensor& output,
    const std::vector<ReduceTensor>& inputs,
    const kernels::ReduceArgs& args) {
  OpDescriptor d = describe_sum(
      way.op(), sum_call(OpCode::kReduceScatter, inputs, args), inputs);
  const int me = way.rank();
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
  const auto finish = [&](const Sources& srcs) {
    combine(way.kernels(), args, &output.data, 1, srcs, output.count);
  };
  size_t begin = 0;
  for (int p = 0; p < me; ++p) {
    begin += inputs[p].count;
  }
  auto small = Way::AtOnce::kNo;
  if (one_tensor) {
    small = way.at_once(d, {args, whole, begin, output.count, finish});
  } else if (way.takes_at_once(bytes)) {
    std::vector<char> gathered;
    gathered.reserve(bytes);
    for (const ReduceTensor& t : inputs) {
      const char* begin = static_cast<const char*>(t.data);
      gathered.insert(gathered.end(), begin, begin + t.count * size);
    }
    small = way.at_once(
        d, {args, {gathered.data(), bytes}, begin, output.count, finish});
  }
  if (small == Way::AtOnce::kDone) {
    return;
  }
  Plan plan;
  plan.src_size = plan.dst_size = size;
  plan.receiver = Plan::kOwner;
  plan.src_type = args.dtype;
  plan.op = args.op;
  if (args.op == RedOp::kPremulSum) {
    plan.weights.assign(way.size(), args.factor);
  }
  plan.epilogue = reduction_epilogue(way.kernels(), args);
  for (int p = 0; p < way.size(); ++p) {
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
