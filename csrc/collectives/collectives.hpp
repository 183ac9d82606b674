#pragma once

#include <functional>
#include <vector>

#include "collectives/context.hpp"

// One function per collective. All ranks of the group call the same one in the
// same order. Spans are contiguous. Each throws Error; kMismatch and kInvalid
// leave the group usable, everything else means that it has failed.
//
// Reductions are left folds in rank order, so every rank gets the same bits
// (docs/numerics.md); bytes and steps of each are in docs/algorithms.md.
namespace fusedpg {

// In place on the concatenation of `tensors`.
struct ReduceTensor {
  void* data;
  size_t count;
};
void all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

// In place on the root; other ranks' tensors keep their values.
void reduce(
    Context& ctx,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root);

// inputs[p] is this rank's contribution to rank p; `output` receives the
// reduction of all ranks' inputs[rank].
void reduce_scatter(
    Context& ctx,
    const ReduceTensor& output,
    const std::vector<ReduceTensor>& inputs,
    const kernels::ReduceArgs& args);

// outputs[p] receives rank p's input; sizes may differ between ranks.
void all_gather(
    Context& ctx,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype);

void broadcast(Context& ctx, const Span& tensor, DType dtype, int root);

// `outputs` is empty but on the root.
void gather(
    Context& ctx,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype,
    int root);

// `inputs` is empty but on the root.
void scatter(
    Context& ctx,
    const Span& output,
    const std::vector<Span>& inputs,
    DType dtype,
    int root);

// inputs[p] goes to outputs[rank] of rank p.
void all_to_all(
    Context& ctx,
    const std::vector<Span>& outputs,
    const std::vector<Span>& inputs,
    DType dtype);

void barrier(Context& ctx);

// One parameter of a fused AdamW step. The optimizer's state covers only this
// rank's shard_range of the parameter, in memory order.
struct AdamwTensor {
  float* param; // whole, replicated
  const float* grad; // whole, this rank's contribution
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq; // nullptr unless amsgrad
  float* step; // a counter
  size_t count; // elements of param and grad
  uint64_t layout_hash; // of sizes and strides
};

struct AdamwHyper {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  bool amsgrad;
  bool maximize;
  bool mean; // divide the summed gradient by the world size
  const float* grad_scale; // nullptr: 1
  float* found_inf; // nullptr, or a flag; set on all ranks if it is on one
};

// Reduce-scatter of the gradients, AdamW on the owned slices, all-gather of the
// parameters. Counters are incremented unless a rank found an infinity.
void fused_adamw(
    Context& ctx,
    const std::vector<AdamwTensor>& tensors,
    const AdamwHyper& hyper);

// The scalars of one update; `step` counts this one.
kernels::AdamwArgs adamw_args(
    const AdamwHyper& hyper,
    float step,
    int world_size);

} // namespace fusedpg
