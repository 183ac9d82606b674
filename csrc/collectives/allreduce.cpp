#include "collectives/collectives.hpp"
#include "collectives/one_shot.hpp"
#include "collectives/reduction.hpp"
#include "collectives/selector.hpp"
#include "collectives/sparse_all_reduce.hpp"
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
  const auto choice =
      select_skip(ctx.skip, ctx.size(), d.shape_hash, bytes, args);
  if (choice == DensityEstimates::Choice::kSkip) {
    run_skipping(ctx, d, OpCode::kAllReduce, tensors, args, {ctx.skip.block});
    return;
  }
  const bool staged = tensors.size() == 1 &&
      select_one_shot(bytes, ctx.in_arena({data, bytes}));
  const auto finish = [&](const void* const* srcs) {
    ctx.kernels.reduce(args, &data, 1, srcs, ctx.size(), d.count, false);
  };
  if (staged && one_shot(ctx, d, {data, bytes}, finish)) {
    const uint64_t all = bytes * static_cast<size_t>(ctx.size() - 1);
    ctx.stats.add(OpCode::kAllReduce, DataPath::kOneShot, {all, all});
    return;
  }
  const Plan plan = in_place(ctx, tensors, args);
  if (!staged) {
    const bool probes = choice == DensityEstimates::Choice::kProbe;
    TwoShot(ctx, plan).begin(
        d,
        probes ? sample_blocks(ctx.kernels, tensors, args.dtype, ctx.skip.block)
               : std::vector<uint64_t>());
    count_dense(ctx.skip, ctx.size(), d.shape_hash, bytes, args);
    if (probes) {
      std::vector<const uint64_t*> samples;
      for (int p = 0; p < ctx.size(); ++p) {
        samples.push_back(TwoShot(ctx, plan).extra_words(p));
      }
      ctx.skip.estimates.observe(
          d.shape_hash,
          args.dtype,
          sampled_density(samples),
          select_skip_limit(select_path(ctx)));
    }
  }
  const DataPath path = data_path(select_path(ctx));
  TwoShot(ctx, plan).run(d);
  ctx.stats.add(OpCode::kAllReduce, path, lane_stats(plan, ctx));
}

} // namespace fusedpg
