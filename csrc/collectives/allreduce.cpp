#include "collectives/collectives.hpp"
#include "collectives/one_shot.hpp"
#include "collectives/reduction.hpp"
#include "collectives/selector.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {

void all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  OpDescriptor d = reduction_descriptor(OpCode::kAllReduce, args);
  describe_tensors(ctx, d, tensors);
  void* data = tensors[0].data;
  const size_t bytes = d.count * dtype_size(args.dtype);
  const bool staged = tensors.size() == 1 &&
      select_one_shot(bytes, ctx.in_arena({data, bytes}));
  const auto finish = [&](const void* const* srcs) {
    ctx.kernels.reduce(args, &data, 1, srcs, ctx.size(), d.count, false);
  };
  if (staged && one_shot(ctx, d, {data, bytes}, finish)) {
    return;
  }
  const TwoShot plan = in_place(ctx, tensors, args);
  if (!staged) {
    plan.begin(ctx, d);
  }
  plan.run(ctx, d);
}

} // namespace fusedpg
