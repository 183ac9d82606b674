#pragma once

#include <optional>
#include <vector>

#include "collectives/context.hpp"
#include "collectives/two_shot.hpp"

// Optimizer steps as one collective: reduce-scatter of the gradients, update of
// the owned slices, all-gather of the parameters; and its first third alone,
// for callers that decide something about the reduced gradients in between.
//
// Every tensor is cut by the ownership map (base/ownership.hpp), by itself, so
// that who owns what depends on neither the list nor its order.
namespace fusedpg {

// How the ranks' gradients are combined.
struct GradReduction {
  bool mean = true; // divide the sum by the world size
  // Of this rank's gradients: gradient = sum of (weight * gradient) divided by
  // the sum of the weights. On all ranks or on none; needs `mean`.
  std::optional<double> weight;
};

// Hyperparameters of some tensors; which ones mean something depends on the
// formula.
struct StepHyper {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool first_step = false; // SGD: the momentum buffers hold nothing yet
  bool decoupled = true; // AdamW; else Adam
  bool amsgrad = false;
  bool maximize = false;
  bool trust_clip = false; // LAMB: trust ratios of at most 1
  bool always_adapt = false; // LAMB: also without weight decay
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

struct StepCall {
  OpCode op = OpCode::kFusedAdamW;
  DType param_type = DType::kFloat32;
  DType grad_type = DType::kFloat32;
  DType state_type = DType::kFloat32;
  std::vector<StepTensor> tensors;
  std::vector<StepHyper> hypers;
  GradReduction reduction;
  bool has_masters = false;
  bool reduced = false; // the gradients have been through reduce_shards()
  bool shared_params = false; // all ranks see one copy of the parameters
  // One byte a tensor: whether this rank used it; afterwards whether any rank
  // did. Unused tensors keep their bits and counters. Null: all are used.
  uint8_t* used = nullptr;
  const float* grad_scale = nullptr; // gradients are divided by it
  float* found_inf = nullptr; // a flag; set on all ranks if it is on one
  uint64_t call_hash = 0; // of the rest of a call that is cut into several
};

// Counters are incremented unless a rank found an infinity.
void fused_step(Context& ctx, const StepCall& call);

// The scalars of one update of `tensor`, on a group of this size.
kernels::UpdateArgs update_args(
    const StepCall& call,
    const StepTensor& tensor,
    int world_size);

// LAMB's trust ratio from the sums of squares of parameter and direction.
double trust_ratio(const StepHyper& hyper, double param, double direction);

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
void reduce_shards(Context& ctx, const ShardsCall& call);

// --- shared by the files of this family --------------------------------------

// Tensors in one operation, so that their tables fit in a descriptor's.
constexpr size_t kMaxStepTensors = 4000;

// Publishes `used` with the operation and takes what nobody used out of it;
// returns the weights of a weighted mean, by rank, or nothing.
std::vector<double> begin_reduction(
    Context& ctx,
    TwoShot& plan,
    OpDescriptor& d,
    const GradReduction& reduction,
    uint8_t* used);

} // namespace fusedpg
