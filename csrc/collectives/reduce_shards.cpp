#include <cmath>

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

// Makes the ranks' weights those of a mean; zeros if their sum is zero. They are
// finite and not negative, but one may be -0, times which 0 would be -0.
void divide_by_sum(std::vector<double>& weights) {
  double total = 0;
  for (const double weight : weights) {
    total += weight;
  }
  for (double& weight : weights) {
    weight = total > 0 ? std::abs(weight) / total : 0;
  }
}

// What owners do with the ranks' gradients. `weights` must outlive the result.
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

} // namespace

void begin_reduction(
    Way& way,
    Plan& plan,
    OpDescriptor& d,
    const GradReduction& reduction,
    uint8_t* used) {
  const size_t count = plan.tensors.size();
  if (count > kMaxStepTensors) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: more than {} tensors in one operation; split the list",
        op_name(d.op),
        kMaxStepTensors);
  }
  if (reduction.weight) {
    d.weight = *reduction.weight;
  }
  way.enter(&plan, d, used ? to_bits(used, count) : std::vector<uint64_t>());
  if (used) {
    for (size_t t = 0; t < count; ++t) {
      used[t] = 0;
      for (int p = 0; p < way.size(); ++p) {
        used[t] |= way.extra(p)[t / 64] >> (t % 64) & 1;
      }
      if (!used[t]) {
        plan.drop(t);
      }
    }
  }
  if (reduction.weight) {
    for (int p = 0; p < way.size(); ++p) {
      plan.weights.push_back(way.said(p).weight);
    }
    divide_by_sum(plan.weights);
  }
}

void reduce_shards(Way& way, const ShardsCall& call) {
  OpDescriptor d = facts(call);
  Plan plan;
  plan.src_size = plan.dst_size = dtype_size(call.dtype);
  plan.src_type = call.dtype;
  plan.receiver = Plan::kOwner;
  plan.lanes = Plan::shards(call.counts, way.size());
  for (size_t t = 0; t < call.grads.size(); ++t) {
    check_nan(way.op(), d, call.grads[t], call.counts[t]);
    plan.tensors.push_back(
        {static_cast<const char*>(call.grads[t]),
         static_cast<char*>(call.outputs[t])});
  }
  begin_reduction(way, plan, d, call.reduction, call.used);
  plan.epilogue = reduction_epilogue(
      way.kernels(), shards_reduction(call, plan.weights, way.size()));
  way.run(plan, d);
  way.count(d.op);
}

} // namespace fusedpg
