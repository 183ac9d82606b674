#include "collectives/fused_step.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// One bit a tensor.
std::vector<uint64_t> to_bits(const uint8_t* used, size_t count) {
  std::vector<uint64_t> bits((count + 63) / 64);
  for (size_t t = 0; t < count; ++t) {
    if (used[t]) {
      bits[t / 64] |= uint64_t(1) << (t % 64);
    }
  }
  return bits;
}

} // namespace

void divide_by_sum(std::vector<double>& weights) {
  double total = 0;
  for (const double weight : weights) {
    total += weight;
  }
  for (double& weight : weights) {
    weight = total > 0 ? weight / total : 0;
  }
}

std::vector<double> begin_reduction(
    Context& ctx,
    TwoShot& plan,
    OpDescriptor& d,
    const GradReduction& reduction,
    uint8_t* used) {
  const size_t count = plan.tensors.size();
  if (count > kMaxStepTensors) {
    fail(
        ErrorKind::kInvalid,
        "fused: ",
        op_name(d.op),
        ": more than ",
        kMaxStepTensors,
        " tensors in one operation; split the list");
  }
  if (reduction.weight) {
    d.weight = *reduction.weight;
  }
  // Which of the extras a call has must agree, or peers misread the table.
  d.shape_hash = Hash()
                     .add(d.shape_hash)
                     .add(uint64_t(used != nullptr))
                     .add(uint64_t(reduction.weight.has_value()))
                     .value();
  plan.begin(ctx, d, used ? to_bits(used, count) : std::vector<uint64_t>());
  if (used) {
    for (size_t t = 0; t < count; ++t) {
      used[t] = 0;
      for (int p = 0; p < ctx.size(); ++p) {
        used[t] |= plan.extra_words(ctx, p)[t / 64] >> (t % 64) & 1;
      }
      if (!used[t]) {
        plan.drop(t);
      }
    }
  }
  std::vector<double> weights;
  if (reduction.weight) {
    for (int p = 0; p < ctx.size(); ++p) {
      weights.push_back(ctx.domain.descriptor(p, ctx.domain.half()).weight);
    }
    divide_by_sum(weights);
  }
  return weights;
}

void reduce_shards(Context& ctx, const ShardsCall& call) {
  OpDescriptor d;
  d.op = OpCode::kReduceShards;
  d.dtype = call.dtype;
  d.items = call.grads.size();
  Hash shape;
  shape.add(call.layout_hash);
  d.value_hash = Hash().add(uint64_t(call.reduction.mean)).value();
  TwoShot plan;
  plan.src_size = plan.dst_size = dtype_size(call.dtype);
  plan.receiver = TwoShot::kOwner;
  plan.lanes = TwoShot::shards(call.counts, ctx.size());
  for (size_t t = 0; t < call.grads.size(); ++t) {
    d.count += call.counts[t];
    shape.add(static_cast<uint64_t>(call.counts[t]));
    check_nan(ctx, d, call.grads[t], call.counts[t]);
    plan.tensors.push_back(
        {static_cast<const char*>(call.grads[t]),
         static_cast<char*>(call.outputs[t])});
  }
  d.shape_hash = shape.value();
  const std::vector<double> weights =
      begin_reduction(ctx, plan, d, call.reduction, call.used);
  plan.epilogue =
      identity_epilogue(ctx, shards_reduction(call, weights, ctx.size()));
  plan.run(ctx, d);
}

kernels::ReduceArgs shards_reduction(
    const ShardsCall& call,
    const std::vector<double>& weights,
    int world_size) {
  kernels::ReduceArgs args;
  args.dtype = call.dtype;
  args.op = !weights.empty() ? RedOp::kPremulSum
      : call.reduction.mean  ? RedOp::kAvg
                             : RedOp::kSum;
  args.divisor = world_size;
  args.reciprocal = true;
  args.weights = weights.empty() ? nullptr : weights.data();
  return args;
}

} // namespace fusedpg
