#include <optional>
#include <utility>

#include "collectives/collectives.hpp"
#include "collectives/host_fold.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

using Choice = DensityEstimates::Choice;

// The second half of both: an operation that looks for zeros. `flags`: what the
// NaN check has said.
void reduce_skipping(
    Way& way,
    SumCall call,
    uint64_t flags,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  const OpCode named = std::exchange(call.op, OpCode::kSparseAllReduce);
  call.block = options.block;
  call.threshold = options.threshold;
  // Whoever asks for skipping gets it, so ranks that did not ask alike would
  // carry out different plans.
  SkipState& state = way.op().skip;
  call.may_go_dense =
      state.mode == BlockSkip::kAuto && named == OpCode::kAllReduce;
  OpDescriptor d = facts(call);
  d.flags = flags;
  Plan plan = in_place(way.kernels(), way.size(), tensors, args);
  plan.skip = options;
  plan.zeros_stay = true;
  way.enter(&plan, d, {});
  std::optional<SkipLimits> limits; // known between enter() and run()
  if (call.may_go_dense) {
    limits = way.skip_limits();
    if (way.density() >= limits->now) {
      plan.skip.reset();
      plan.zeros_stay = false;
    }
  }
  way.run(plan, d);
  if (limits) {
    state.estimates.observe(
        d.shape_hash, args.dtype, way.density(), limits->next);
  }
  way.count(named);
}

} // namespace

void all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args) {
  const SumCall call = sum_call(OpCode::kAllReduce, tensors, args);
  OpDescriptor d = describe_sum(way.op(), call, tensors);
  SkipState& state = way.op().skip;
  void* data = tensors[0].data;
  const size_t bytes = d.count * dtype_size(args.dtype);
  const SkipConfig config = skip_config(state, way.size(), d, args);
  const Choice choice = select_skip(config);
  if (choice == Choice::kSkip) {
    reduce_skipping(way, call, d.flags, tensors, args, {state.block});
    return;
  }
  const auto combine = [&](const Sources& srcs) {
    fusedpg::combine(way.kernels(), args, &data, 1, srcs, d.count);
  };
  const auto small = tensors.size() == 1
      ? way.at_once(d, {args, {data, bytes}, 0, d.count, combine})
      : Way::AtOnce::kNo;
  if (small != Way::AtOnce::kDone) {
    const Plan plan = in_place(way.kernels(), way.size(), tensors, args);
    if (small == Way::AtOnce::kNo) {
      const bool probes = choice == Choice::kProbe;
      d.block = probes ? static_cast<uint32_t>(state.block) : 0;
      way.enter(
          &plan,
          d,
          probes
              ? sample_blocks(way.kernels(), tensors, args.dtype, state.block)
              : std::vector<uint64_t>());
      if (select_estimate(config)) {
        state.estimates.count_dense(d.shape_hash, d.dtype);
      }
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

void sparse_all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  const SumCall call = sum_call(OpCode::kSparseAllReduce, tensors, args);
  check_can_skip(call.op, args);
  if (options.threshold > 0 && tensors.size() != 1) {
    fail(
        ErrorKind::kInvalid,
        "fused: sparse_all_reduce: a threshold takes one tensor a call");
  }
  const OpDescriptor d = describe_sum(way.op(), call, tensors);
  reduce_skipping(way, call, d.flags, tensors, args, options);
}

} // namespace fusedpg
