#include "collectives/collectives.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {

void reduce(
    Context& ctx,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root) {
  const std::vector<ReduceTensor> tensors{{data, count}};
  SumCall call = sum_call(OpCode::kReduce, tensors, args);
  call.root = root;
  OpDescriptor d = describe_sum(ctx, call, tensors);
  const size_t bytes = count * dtype_size(args.dtype);
  const auto finish = [&](const void* const* srcs) {
    if (ctx.rank() == root) {
      ctx.kernels.reduce(args, &data, 1, srcs, ctx.size(), count, false);
    }
  };
  ShmWay way(ctx);
  const auto small = way.at_once(d, {data, bytes}, finish);
  if (small == Way::AtOnce::kDone) {
    return;
  }
  Plan plan = in_place(ctx.kernels, ctx.size(), tensors, args);
  plan.receiver = root;
  if (small == Way::AtOnce::kNo) {
    way.enter(&plan, d, {});
  }
  way.run(plan, d);
}

} // namespace fusedpg
