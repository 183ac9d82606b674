#include "base/call.hpp"

#include "base/error.hpp"
#include "base/hash.hpp"

namespace fusedpg {
namespace {

uint64_t hyper_hash(const StepHyper& h) {
  Hash hash;
  kernels::for_each_hyper(
      h, [&](const char*, auto value) { hash.add(double(value)); });
  return hash.value();
}

uint16_t options_of(const GradReduction& reduction, const uint8_t* used) {
  return (reduction.weight ? kWeighted : 0) |
      (used != nullptr ? kUsedFlags : 0);
}

RedOp red_op_of(const GradReduction& reduction) {
  return reduction.mean ? RedOp::kAvg : RedOp::kSum;
}

} // namespace

kernels::Formula formula(OpCode op) {
  const auto found = step_formula(op);
  if (!found) {
    fail(
        ErrorKind::kInvalid, "fused: {} is not an optimizer step", op_name(op));
  }
  return *found;
}

OpDescriptor facts(const Call& call) {
  if (const auto* step = std::get_if<const StepCall*>(&call.fused)) {
    return facts(**step, /*on_device=*/false);
  }
  if (const auto* shards = std::get_if<const ShardsCall*>(&call.fused)) {
    return facts(**shards);
  }
  if (const auto* program = std::get_if<const ProgramCall*>(&call.fused)) {
    return facts(**program);
  }
  OpDescriptor d;
  d.op = call.op;
  d.dtype = call.dtype;
  d.root = call.root;
  const bool to_outputs =
      call.op == OpCode::kAllGather || call.op == OpCode::kScatter;
  Hash shape;
  for (const Buffer& b : to_outputs ? call.outputs : call.inputs) {
    d.count += b.count;
    shape.add(static_cast<uint64_t>(b.count));
  }
  if (call.op == OpCode::kAllToAll) {
    d.count = 0; // each rank has its own sizes
  }
  if (reduces(call.op)) {
    const SkipOptions skip = call.skip.value_or(SkipOptions{0});
    d.red_op = call.red_op;
    d.options = skip.may_go_dense ? kMayGoDense : 0;
    d.block = static_cast<uint32_t>(skip.block);
    d.items = call.inputs.size();
    d.shape_hash = shape.value();
    // An owner scales every rank's contribution, so all must mean one factor.
    d.value_hash = Hash().add(call.factor).add(skip.threshold).value();
  }
  return d;
}

OpDescriptor facts(const ShardsCall& call) {
  OpDescriptor d;
  d.op = OpCode::kReduceShards;
  d.dtype = call.dtype;
  d.red_op = red_op_of(call.reduction);
  d.options = options_of(call.reduction, call.used);
  d.items = call.counts.size();
  Hash shape;
  shape.add(call.layout_hash);
  for (const size_t count : call.counts) {
    d.count += count;
    shape.add(static_cast<uint64_t>(count));
  }
  d.shape_hash = shape.value();
  return d;
}

OpDescriptor facts(const StepCall& call, bool on_device) {
  OpDescriptor d;
  d.op = call.op;
  d.dtype = call.param_type;
  d.grad_type = call.grad_type;
  d.state_type = call.state_type;
  d.red_op = red_op_of(call.reduction);
  d.options = options_of(call.reduction, call.used) |
      (call.has_masters ? kMasters : 0) | (call.follow ? kFollow : 0) |
      (call.reduced ? kReducedGrads : 0) |
      (call.shared_params ? kSharedParams : 0) |
      (on_device && call.grad_scale != nullptr ? kGradScale : 0);
  d.block = static_cast<uint32_t>(call.skip_block);
  d.items = call.tensors.size();
  Hash shape;
  Hash values;
  for (const StepHyper& h : call.hypers) {
    values.add(hyper_hash(h));
  }
  values.add(call.grad_scale && !on_device ? double(*call.grad_scale) : 1.0);
  for (const StepTensor& t : call.tensors) {
    d.count += t.count;
    shape.add(static_cast<uint64_t>(t.count)).add(t.layout_hash);
    values.add(t.step && !on_device ? double(*t.step) : 0.0);
    values.add(uint64_t(t.hyper));
  }
  d.shape_hash = shape.value();
  d.value_hash = values.add(call.call_hash).value();
  return d;
}

} // namespace fusedpg
