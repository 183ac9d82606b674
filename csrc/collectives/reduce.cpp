#include "collectives/collectives.hpp"
#include "collectives/one_shot.hpp"
#include "collectives/reduction.hpp"
#include "collectives/selector.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {

void reduce(
    Context& ctx,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root) {
  OpDescriptor d = reduction_descriptor(OpCode::kReduce, args);
  d.root = root;
  const std::vector<ReduceTensor> tensors{{data, count}};
  ShmWay way(ctx);
  describe_tensors(way, d, tensors);
  const size_t bytes = count * dtype_size(args.dtype);
  const bool staged = select_one_shot(bytes, ctx.in_arena({data, bytes}));
  const auto finish = [&](const void* const* srcs) {
    if (ctx.rank() == root) {
      ctx.kernels.reduce(args, &data, 1, srcs, ctx.size(), count, false);
    }
  };
  if (staged && one_shot(ctx, d, {data, bytes}, finish)) {
    return;
  }
  Plan plan = in_place(way, tensors, args);
  plan.receiver = root;
  if (!staged) {
    TwoShot(ctx, plan).begin(d);
  }
  TwoShot(ctx, plan).run(d);
}

} // namespace fusedpg
