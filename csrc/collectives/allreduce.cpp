#include "collectives/collectives.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

using Choice = DensityEstimates::Choice;

// The second half of both: an operation that looks for zeros, and that `d`
// describes but for that.
void reduce_skipping(
    Way& way,
    OpDescriptor& d,
    OpCode named,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  d.op = OpCode::kSparseAllReduce;
  d.value_hash = Hash()
                     .add(d.value_hash)
                     .add(static_cast<uint64_t>(options.block))
                     .add(options.threshold)
                     .value();
  Plan plan = in_place(way, tensors, args);
  plan.skip = options;
  plan.zeros_stay = true;
  way.enter(&plan, d, {});
  // Whoever asks for skipping gets it.
  SkipState& state = way.op().skip;
  if (state.mode == BlockSkip::kAuto && named == OpCode::kAllReduce) {
    const SkipLimits limits = way.skip_limits();
    const double density = way.density();
    state.estimates.observe(d.shape_hash, args.dtype, density, limits.next);
    if (density >= limits.now) {
      plan.skip.reset();
      plan.zeros_stay = false;
    }
  }
  way.run(plan, d);
  way.count(named);
}

} // namespace

void all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  OpDescriptor d = reduction_descriptor(OpCode::kAllReduce, args);
  describe_tensors(way, d, tensors);
  SkipState& state = way.op().skip;
  void* data = tensors[0].data;
  const size_t bytes = d.count * dtype_size(args.dtype);
  const Choice choice =
      select_skip(state, way.size(), d.shape_hash, bytes, args);
  if (choice == Choice::kSkip) {
    reduce_skipping(way, d, OpCode::kAllReduce, tensors, args, {state.block});
    return;
  }
  const auto combine = [&](const void* const* srcs) {
    way.kernels().reduce(args, &data, 1, srcs, way.size(), d.count, false);
  };
  const auto small = tensors.size() == 1
      ? way.at_once(d, {data, bytes}, combine)
      : Way::AtOnce::kNo;
  if (small != Way::AtOnce::kDone) {
    const Plan plan = in_place(way, tensors, args);
    if (small == Way::AtOnce::kNo) {
      const bool probes = choice == Choice::kProbe;
      way.enter(
          &plan,
          d,
          probes
              ? sample_blocks(way.kernels(), tensors, args.dtype, state.block)
              : std::vector<uint64_t>());
      count_dense(state, way.size(), d.shape_hash, bytes, args);
      if (probes) {
        std::vector<const uint64_t*> samples;
        for (int p = 0; p < way.size(); ++p) {
          samples.push_back(way.extra(p));
        }
        state.estimates.observe(
            d.shape_hash,
            args.dtype,
            sampled_density(samples),
            way.skip_limits().next);
      }
    }
    way.run(plan, d);
  }
  way.count(OpCode::kAllReduce);
}

void all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  ShmWay way(ctx);
  all_reduce(way, tensors, args);
}

void sparse_all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  OpDescriptor d = reduction_descriptor(OpCode::kSparseAllReduce, args);
  check_can_skip(d.op, args);
  if (options.threshold > 0 && tensors.size() != 1) {
    fail(
        ErrorKind::kInvalid,
        "fused: sparse_all_reduce: a threshold takes one tensor a call");
  }
  describe_tensors(way, d, tensors);
  reduce_skipping(way, d, OpCode::kSparseAllReduce, tensors, args, options);
}

void sparse_all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  ShmWay way(ctx);
  sparse_all_reduce(way, tensors, args, options);
}

} // namespace fusedpg
