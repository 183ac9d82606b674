#pragma once

#include <functional>
#include <vector>

#include "base/calls.hpp"
#include "collectives/context.hpp"

// One function per collective. All ranks of the group call the same one in the
// same order. Spans are contiguous. Each throws Error; kMismatch and kInvalid
// leave the group usable, everything else means that it has failed.
//
// Reductions are left folds in rank order, so every rank gets the same bits
// (docs/reference/numerics.md); bytes and steps of each are in docs/develop/algorithms.md. The
// fused optimizer steps are in fused_step.hpp.
namespace fusedpg {

// In place on the concatenation of `tensors`.
struct ReduceTensor {
  void* data;
  size_t count;
};
class Way;
void all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

// Skips blocks of zeros. The result is that of all_reduce(), bit for bit but
// for NaN payloads. Throws Error(kInvalid) when !can_skip(args), or for a
// threshold with several tensors.
struct SkipOptions;
void sparse_all_reduce(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options);

// In place on the root; other ranks' tensors keep their values.
void reduce(
    Way& way,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root);

// inputs[p] is this rank's contribution to rank p; `output` receives the
// reduction of all ranks' inputs[rank].
void reduce_scatter(
    Way& way,
    const ReduceTensor& output,
    const std::vector<ReduceTensor>& inputs,
    const kernels::ReduceArgs& args);

// outputs[p] receives rank p's input; sizes may differ between ranks.
void all_gather(
    Way& way,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype);

void broadcast(Way& way, const Span& tensor, DType dtype, int root);

// `outputs` is empty but on the root.
void gather(
    Way& way,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype,
    int root);

// `inputs` is empty but on the root.
void scatter(
    Way& way,
    const Span& output,
    const std::vector<Span>& inputs,
    DType dtype,
    int root);

// inputs[p] goes to outputs[rank] of rank p.
void all_to_all(
    Way& way,
    const std::vector<Span>& outputs,
    const std::vector<Span>& inputs,
    DType dtype);

void barrier(Way& way);

// Memory of rank 0's arena, as this rank sees it. It is never given back to the
// arena, because peers may use it for longer than any of its tensors lives on
// rank 0. Contents are undefined.
void* share_memory(Context& ctx, size_t bytes);

} // namespace fusedpg
