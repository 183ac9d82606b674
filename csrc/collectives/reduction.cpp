#include "collectives/reduction.hpp"

#include <optional>

#include "collectives/skip.hpp"

namespace fusedpg {
namespace {

using Choice = DensityEstimates::Choice;

kernels::ReduceArgs args_of(const Call& call, int world_size) {
  check_reduction(call.op, call.dtype, call.red_op);
  kernels::ReduceArgs args;
  args.dtype = call.dtype;
  args.op = call.red_op;
  args.factor = call.factor;
  args.divisor = call.red_op == RedOp::kAvg ? world_size : 1;
  return args;
}

// Stores what the sources of a reduction come to.
void combine(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args,
    void* const* dsts,
    size_t num_dsts,
    const Sources& srcs,
    size_t count,
    bool stream = false) {
  if (!srcs.folded) {
    kernels.reduce(args, dsts, num_dsts, srcs.data, srcs.num, count, stream);
    return;
  }
  kernels::ReduceArgs rest = args;
  rest.dtype = wide_type(args.dtype, args.op);
  if (rest.op == RedOp::kPremulSum) {
    rest.op = RedOp::kSum; // the products have been summed
    rest.weights = nullptr;
  }
  if (rest.dtype == args.dtype) {
    kernels.reduce(rest, dsts, num_dsts, srcs.data, srcs.num, count, stream);
    return;
  }
  void* sum = const_cast<void*>(srcs.data[0]);
  kernels.reduce(rest, &sum, 1, srcs.data, srcs.num, count, false);
  for (size_t i = 0; i < num_dsts; ++i) {
    kernels.cast(args.dtype, dsts[i], rest.dtype, sum, count);
  }
}

// The second half of both: an operation that looks for zeros. `flags`: what the
// NaN check has said.
void reduce_skipping(
    Way& way,
    Call call,
    uint64_t flags,
    const kernels::ReduceArgs& args) {
  const OpCode named = std::exchange(call.op, OpCode::kSparseAllReduce);
  // Whoever asks for skipping gets it, so ranks that did not ask alike would
  // carry out different plans.
  SkipState& state = way.op().skip;
  call.skip->may_go_dense =
      state.mode == BlockSkip::kAuto && named == OpCode::kAllReduce;
  OpDescriptor d = facts(call);
  d.flags = flags;
  Plan plan = in_place(way.kernels(), way.size(), call.inputs, args);
  plan.skip = call.skip;
  plan.zeros_stay = true;
  way.enter(&plan, d, {});
  std::optional<SkipLimits> limits; // known between enter() and run()
  if (call.skip->may_go_dense) {
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

// A plan without tensors.
Plan reduction_plan(
    const kernels::Table& kernels,
    int world_size,
    const kernels::ReduceArgs& args) {
  Plan plan;
  plan.src_size = plan.dst_size = dtype_size(args.dtype);
  plan.src_type = args.dtype;
  plan.op = args.op;
  if (args.op == RedOp::kPremulSum) {
    plan.weights.assign(world_size, args.factor);
  }
  plan.epilogue = reduction_epilogue(kernels, args);
  return plan;
}

// True if the inputs follow one another in memory, as in one tensor.
bool adjacent(Buffers inputs, size_t size) {
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

void check_reduction(OpCode op, DType dtype, RedOp red_op) {
  if (!reduction_supported(dtype, red_op)) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: {} is not defined for {}",
        op_name(op),
        red_op_name(red_op),
        dtype_name(dtype));
  }
}

void all_reduce(Way& way, const Call& call) {
  const kernels::ReduceArgs args = args_of(call, way.size());
  const Buffers tensors = call.inputs;
  OpDescriptor d = facts(call);
  check_nan(way.op(), d, tensors);
  SkipState& state = way.op().skip;
  void* data = tensors[0].data;
  const size_t bytes = d.count * dtype_size(args.dtype);
  const SkipConfig config = skip_config(state, way.size(), d, args);
  const Choice choice = select_skip(config);
  if (choice == Choice::kSkip) {
    Call skipping = call;
    skipping.skip = SkipOptions{state.block};
    reduce_skipping(way, skipping, d.flags, args);
    return;
  }
  const auto small = tensors.size() == 1
      ? way.at_once(d, {args, {data, bytes}, 0, d.count})
      : Way::AtOnce();
  if (small.sources) {
    combine(way.kernels(), args, &data, 1, *small.sources, d.count);
  } else {
    const Plan plan = in_place(way.kernels(), way.size(), tensors, args);
    if (!small.entered) {
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

void sparse_all_reduce(Way& way, const Call& call) {
  const kernels::ReduceArgs args = args_of(call, way.size());
  check_can_skip(call.op, args);
  if (call.skip->threshold > 0 && call.inputs.size() != 1) {
    fail(
        ErrorKind::kInvalid,
        "fused: sparse_all_reduce: a threshold takes one tensor a call");
  }
  OpDescriptor d;
  d.dtype = call.dtype;
  check_nan(way.op(), d, call.inputs);
  reduce_skipping(way, call, d.flags, args);
}

void reduce(Way& way, const Call& call) {
  const kernels::ReduceArgs args = args_of(call, way.size());
  OpDescriptor d = facts(call);
  check_nan(way.op(), d, call.inputs);
  void* data = call.inputs[0].data;
  const size_t count = call.inputs[0].count;
  const size_t bytes = count * dtype_size(args.dtype);
  const size_t wanted = way.rank() == call.root ? count : 0;
  const auto small = way.at_once(d, {args, {data, bytes}, 0, wanted});
  if (small.sources) {
    combine(way.kernels(), args, &data, 1, *small.sources, wanted);
    return;
  }
  Plan plan = in_place(way.kernels(), way.size(), call.inputs, args);
  plan.receiver = call.root;
  if (!small.entered) {
    way.enter(&plan, d, {});
  }
  way.run(plan, d);
}

void reduce_scatter(Way& way, const Call& call) {
  const kernels::ReduceArgs args = args_of(call, way.size());
  const Buffers inputs = call.inputs;
  Buffer output = call.outputs[0];
  OpDescriptor d = facts(call);
  check_nan(way.op(), d, inputs);
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
  size_t begin = 0;
  for (int p = 0; p < me; ++p) {
    begin += inputs[p].count;
  }
  Way::AtOnce small;
  if (one_tensor) {
    small = way.at_once(d, {args, whole, begin, output.count});
  } else if (way.takes_at_once(bytes)) {
    std::vector<char> gathered;
    gathered.reserve(bytes);
    for (const Buffer& t : inputs) {
      const char* begin = static_cast<const char*>(t.data);
      gathered.insert(gathered.end(), begin, begin + t.count * size);
    }
    small =
        way.at_once(d, {args, {gathered.data(), bytes}, begin, output.count});
  }
  if (small.sources) {
    combine(way.kernels(), args, &output.data, 1, *small.sources, output.count);
    return;
  }
  Plan plan = reduction_plan(way.kernels(), way.size(), args);
  plan.receiver = Plan::kOwner;
  for (int p = 0; p < way.size(); ++p) {
    plan.tensors.push_back(
        {static_cast<const char*>(inputs[p].data),
         p == me ? static_cast<char*>(output.data) : nullptr});
    plan.lanes.push_back({{static_cast<size_t>(p), 0, inputs[p].count}});
  }
  if (!small.entered) {
    way.enter(&plan, d, {});
  }
  way.run(plan, d);
}

Plan::Epilogue reduction_epilogue(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args) {
  return [&kernels, args](
             size_t /* tensor */,
             size_t /* begin */,
             size_t count,
             void* const* dsts,
             size_t num_dsts,
             const Sources& srcs,
             bool stream) {
    combine(kernels, args, dsts, num_dsts, srcs, count, stream);
  };
}

Plan in_place(
    const kernels::Table& kernels,
    int world_size,
    Buffers tensors,
    const kernels::ReduceArgs& args) {
  Plan plan = reduction_plan(kernels, world_size, args);
  plan.reduction = args;
  std::vector<size_t> counts;
  for (const Buffer& t : tensors) {
    counts.push_back(t.count);
    plan.tensors.push_back(
        {static_cast<const char*>(t.data), static_cast<char*>(t.data)});
  }
  plan.lanes = Plan::shards(counts, world_size);
  return plan;
}

} // namespace fusedpg
