#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/options.hpp"
#include "base/program_call.hpp"
#include "kernels/formulas/hyper.hpp"

// An operation as data: every engine takes it in this form.
namespace fusedpg {

using StepHyper = kernels::Hyper;

// How the ranks' gradients are combined.
struct GradReduction {
  bool mean = true; // divide the sum by the world size
  // Weight of this rank's gradients: gradient = sum of (weight * gradient)
  // divided by the sum of the weights. On all ranks or on none; needs `mean`.
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

// A contiguous tensor, or a part of one. Elements of types that the kernels do
// not know (kOpaque) are bytes.
struct Buffer {
  void* data = nullptr;
  size_t count = 0; // elements
};
using Buffers = std::span<const Buffer>;
inline Buffers single(const Buffer& buffer) {
  return {&buffer, 1};
}

// Blocks of zeros that a reduction does not send.
struct SkipOptions {
  size_t block = kBlockSize; // elements; larger for tensors of many millions
  // Blocks without an element of a larger magnitude are not sent but left in
  // `residual`, which is added to the tensor first: a tensor of its size and
  // type. 0: none. One tensor a call.
  double threshold = 0;
  void* residual = nullptr;
  // The caller's choice: a byte for each block of `bitmap_block` elements, 0 for
  // one that counts as zeros whatever it holds. nullptr: look at the elements.
  // One tensor a call, and no threshold.
  const uint8_t* bitmap = nullptr;
  size_t bitmap_block = 0; // `block` is a multiple of it
  bool may_go_dense = false; // if too many blocks would travel
};

// One operation of a group. It owns nothing: what it points to must live until
// the operation ends. All ranks of the group do the same ones in the same order.
struct Call {
  OpCode op = OpCode::kNone;
  DType dtype = DType::kOpaque; // of all buffers
  // - all_reduce, sparse_all_reduce, reduce: `inputs` are reduced in place, as
  //   if joined; reduce() changes those of the root only;
  // - reduce_scatter: inputs[p] is for rank p, which gets the reduction of all
  //   ranks' inputs[p] as its one output;
  // - broadcast: the root's one input comes to the others';
  // - all_gather: the one input comes to every rank's outputs[this rank]; sizes
  //   may differ from rank to rank;
  // - gather, scatter: one input, or output, and on the root, which alone has
  //   such a list, as many of the other as ranks;
  // - all_to_all: inputs[p] comes to outputs[this rank] of rank p.
  Buffers inputs{};
  Buffers outputs{};
  int root = -1;
  RedOp red_op = RedOp::kSum;
  double factor = 1; // of kPremulSum
  std::optional<SkipOptions> skip{}; // of sparse_all_reduce
  // A fused operation has this in place of buffers.
  std::variant<
      std::monostate,
      const StepCall*,
      const ShardsCall*,
      const ProgramCall*>
      fused{};
};

// Facts that all ranks must agree on. `on_device`: counters and the scale are
// in the memory of a device, and not looked at.
OpDescriptor facts(const Call& call);
OpDescriptor facts(const ShardsCall& call);
OpDescriptor facts(const StepCall& call, bool on_device);

// Throws Error(kInvalid) if it is not an optimizer step.
kernels::Formula formula(OpCode op);

// Tensors in one operation, so that their tables fit in a descriptor's.
constexpr size_t kMaxStepTensors = 4000;

} // namespace fusedpg
