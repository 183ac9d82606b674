#pragma once

#include <vector>

#include "collectives/perform.hpp"

// The collectives as functions, in shared memory (a Context) or by any way.
namespace fusedpg::test {

using fusedpg::perform;
inline bool perform(Context& ctx, const Call& call) {
  ShmWay way(ctx);
  return perform(way, call);
}

inline Call sum_call(
    OpCode op,
    const kernels::ReduceArgs& args,
    Buffers inputs,
    Buffers outputs = {},
    int root = -1) {
  return {op, args.dtype, inputs, outputs, root, args.op, args.factor};
}

template <typename Where>
void all_reduce(
    Where& where,
    const std::vector<Buffer>& tensors,
    const kernels::ReduceArgs& args) {
  perform(where, sum_call(OpCode::kAllReduce, args, tensors));
}

template <typename Where>
void sparse_all_reduce(
    Where& where,
    const std::vector<Buffer>& tensors,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  Call call = sum_call(OpCode::kSparseAllReduce, args, tensors);
  call.skip = options;
  perform(where, call);
}

template <typename Where>
void reduce(
    Where& where,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root) {
  const Buffer tensor{data, count};
  perform(where, sum_call(OpCode::kReduce, args, single(tensor), {}, root));
}

template <typename Where>
void reduce_scatter(
    Where& where,
    const Buffer& output,
    const std::vector<Buffer>& inputs,
    const kernels::ReduceArgs& args) {
  perform(
      where, sum_call(OpCode::kReduceScatter, args, inputs, single(output)));
}

template <typename Where>
void move_spans(
    Where& where,
    OpCode op,
    const std::vector<Span>& inputs,
    const std::vector<Span>& outputs,
    DType dtype,
    int root = -1) {
  const auto buffers = [dtype](const std::vector<Span>& spans) {
    std::vector<Buffer> all;
    for (const Span& s : spans) {
      all.push_back({s.data, s.bytes / dtype_size(dtype)});
    }
    return all;
  };
  const std::vector<Buffer> from = buffers(inputs), to = buffers(outputs);
  perform(where, {op, dtype, from, to, root});
}

template <typename Where>
void all_gather(
    Where& where,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype) {
  move_spans(where, OpCode::kAllGather, {input}, outputs, dtype);
}

template <typename Where>
void broadcast(Where& where, const Span& tensor, DType dtype, int root) {
  move_spans(where, OpCode::kBroadcast, {tensor}, {}, dtype, root);
}

template <typename Where>
void gather(
    Where& where,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype,
    int root) {
  move_spans(where, OpCode::kGather, {input}, outputs, dtype, root);
}

template <typename Where>
void scatter(
    Where& where,
    const Span& output,
    const std::vector<Span>& inputs,
    DType dtype,
    int root) {
  move_spans(where, OpCode::kScatter, inputs, {output}, dtype, root);
}

template <typename Where>
void all_to_all(
    Where& where,
    const std::vector<Span>& outputs,
    const std::vector<Span>& inputs,
    DType dtype) {
  move_spans(where, OpCode::kAllToAll, inputs, outputs, dtype);
}

template <typename Where>
void barrier(Where& where) {
  perform(where, {OpCode::kBarrier});
}

} // namespace fusedpg::test
