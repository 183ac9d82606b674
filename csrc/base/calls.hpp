#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/descriptor.hpp"
#include "kernels/formulas/hyper.hpp"

// What an operation is, as data: every engine takes it in this form.
namespace fusedpg {

using StepHyper = kernels::Hyper;

// How the ranks' gradients are combined.
struct GradReduction {
  bool mean = true; // divide the sum by the world size
  // Of this rank's gradients: gradient = sum of (weight * gradient) divided by
  // the sum of the weights. On all ranks or on none; needs `mean`.
  std::optional<double> weight;
};

// One parameter of a step. Slices are this rank's shard_range of the tensor in
// memory order.
struct StepTensor {
  void* param = nullptr; // whole, replicated
  // Whole, this rank's contribution; in a step on reduced gradients the slice.
  const void* grad = nullptr;
  void* master = nullptr; // slice in fp32 of a half parameter
  void* state[3] = {nullptr, nullptr, nullptr}; // slices, see UpdateSpans
  float* step = nullptr; // a counter, which SGD need not have
  size_t count = 0; // elements of param
  uint64_t layout_hash = 0; // of sizes and strides
  size_t hyper = 0; // index into StepCall::hypers
};

// A scalar in the memory of the device that executes the step.
struct DeviceScalar {
  const void* data = nullptr;
  DType type = DType::kFloat32; // or kFloat64
};

// Pointers are to the memory of the device that executes the step.
struct StepCall {
  OpCode op = OpCode::kFusedAdamW;
  DType param_type = DType::kFloat32;
  DType grad_type = DType::kFloat32;
  DType state_type = DType::kFloat32;
  std::vector<StepTensor> tensors;
  std::vector<StepHyper> hypers;
  // CUDA: hypers[i].lr is lrs[i] unless that is null. Empty: none.
  std::vector<DeviceScalar> lrs;
  GradReduction reduction;
  bool has_masters = false;
  bool follow = false; // masters take over what was written into parameters
  bool reduced = false; // the gradients have been through reduce_shards()
  bool shared_params = false; // all ranks see one copy of the parameters
  // Elements of the blocks of gradients that are skipped where they are zero;
  // 0: none is. For speed alone: results are the same.
  size_t skip_block = 0;
  // One byte a tensor: whether this rank used it; afterwards whether any rank
  // did. Unused tensors keep their bits and counters. Null: all are used.
  uint8_t* used = nullptr;
  const float* grad_scale = nullptr; // gradients are divided by it
  float* found_inf = nullptr; // a flag; set on all ranks if it is on one
  uint64_t call_hash = 0; // of the rest of a call that is cut into several
};

// Reduces every tensor to its owners: afterwards the slice of the output that
// this rank owns holds the combined gradient, the rest is as it was.
struct ShardsCall {
  DType dtype = DType::kFloat32;
  std::vector<const void*> grads;
  std::vector<void*> outputs; // may be the gradients
  std::vector<size_t> counts;
  uint64_t layout_hash = 0;
  GradReduction reduction;
  uint8_t* used = nullptr; // as in StepCall
};

// A reduction of tensors, or of what they are joined to.
struct SumCall {
  OpCode op = OpCode::kAllReduce;
  DType dtype = DType::kFloat32;
  RedOp red_op = RedOp::kSum;
  double factor = 1; // of kPremulSum
  int root = -1; // of kReduce
  std::vector<size_t> counts;
  size_t block = 0; // as skip_block; of kSparseAllReduce
  double threshold = 0; // what decides which blocks travel
  double limit = 0; // CUDA: share of blocks in the result from which all travel
  bool may_go_dense = false; // if too many would
};

// What all ranks must say of a call. `on_device`: counters and the scale are
// in the memory of a device, and not looked at.
OpDescriptor facts(const SumCall& call);
OpDescriptor facts(const ShardsCall& call);
OpDescriptor facts(const StepCall& call, bool on_device);

// Throws Error(kInvalid) if it is not an optimizer step.
kernels::Formula formula(OpCode op);

// Tensors in one operation, so that their tables fit in a descriptor's.
constexpr size_t kMaxStepTensors = 4000;

} // namespace fusedpg
