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
  const size_t size = dtype_size(args.dtype);
  if (tensors.size() == 1 && d.count * size <= kOneShotBytes) {
    void* data = tensors[0].data;
    one_shot(ctx, d, {data, d.count * size}, [&](const void* const* srcs) {
      ctx.kernels.reduce(args, &data, 1, srcs, ctx.size(), d.count, false);
    });
    return;
  }
  TwoShot plan = in_place(ctx, tensors, args);
  plan.begin(ctx, d);
  plan.run(ctx, d);
}

} // namespace fusedpg
