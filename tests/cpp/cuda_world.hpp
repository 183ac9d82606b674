#pragma once

#include "cuda_tiles.hpp"

// An optimizer's step on tiles, and its reference on the CPU.
namespace fusedpg::test {

// What a step reads and writes.
struct World {
  struct Tensor {
    Array param, grad, master, state[3];
  };
  std::vector<Tensor> tensors;
  Array grads; // this rank's block
  Array params_out;

  World(const Cut& cut, const Types& types, size_t shift) {
    uint32_t seed = 1;
    for (size_t t = 0; t < cut.counts.size(); ++t) {
      const auto slice = static_cast<size_t>(cut.slice(t).length);
      Tensor tensor;
      tensor.param = Array(types.param, cut.counts[t], shift, seed++);
      tensor.grad = Array(types.grad, slice, shift, seed++);
      tensor.master = Array(DType::kFloat32, slice, shift, seed++);
      for (int k = 0; k < 3; ++k) {
        tensor.state[k] = Array(types.state, slice, shift, seed++);
        for (size_t i = 0; k > 0 && i < slice; ++i) {
          tensor.state[k].set(i, std::fabs(tensor.state[k].get(i)));
        }
      }
      tensors.push_back(std::move(tensor));
    }
    grads = Array(types.grad, cut.block, shift, seed++);
    params_out = Array(types.param, cut.block, shift, seed++);
  }
  std::vector<TensorInfo> infos(const Cut& cut) const {
    std::vector<TensorInfo> infos(tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      infos[t].param = tensors[t].param.pointer();
      infos[t].grad = tensors[t].grad.pointer();
      infos[t].master = tensors[t].master.pointer();
      for (int k = 0; k < 3; ++k) {
        infos[t].state[k] = tensors[t].state[k].pointer();
      }
      infos[t].count = cut.counts[t];
      infos[t].shard = cut.shard(t);
    }
    return infos;
  }
  bool operator==(const World& o) const {
    bool same = params_out.bytes() == o.params_out.bytes() &&
        grads.bytes() == o.grads.bytes();
    for (size_t t = 0; t < tensors.size(); ++t) {
      const Tensor& a = tensors[t];
      const Tensor& b = o.tensors[t];
      same = same && a.param.bytes() == b.param.bytes() &&
          a.grad.bytes() == b.grad.bytes() &&
          a.master.bytes() == b.master.bytes();
      for (int k = 0; k < 3; ++k) {
        same = same && a.state[k].bytes() == b.state[k].bytes();
      }
    }
    return same;
  }
};

inline std::vector<TensorScalars> scalars_of(const Variant& v, size_t tensors) {
  std::vector<TensorScalars> all(tensors);
  for (size_t t = 0; t < tensors; ++t) {
    kernels::resolve_scalars(v.hyper, 3.0 + static_cast<double>(t), all[t]);
    all[t].lamb.step_size = 0.007;
    all[t].grad_factor = -1.0 / 3;
    all[t].skip = t == 2;
  }
  return all;
}

inline cuda::UpdateArgs update_args(
    const Variant& v,
    const Types& types,
    const Chunk& chunk,
    const std::vector<TensorScalars>& scalars) {
  cuda::UpdateArgs a{};
  a.chunk = chunk;
  a.formula = v.formula;
  a.param_type = types.param;
  a.grad_type = types.grad;
  a.state_type = types.state;
  a.masters = types.masters;
  a.decoupled = v.hyper.decoupled;
  a.amsgrad = v.hyper.amsgrad;
  a.momentum = v.hyper.momentum != 0;
  a.nesterov = v.hyper.nesterov;
  a.scalars = scalars.data();
  return a;
}

// The same piece by piece with the CPU's kernels; returns the sums of squares
// of LAMB's first half.
inline std::vector<double> update_on_cpu(
    const Cut& cut,
    const Types& types,
    const Variant& v,
    const std::vector<TensorScalars>& scalars,
    bool moments,
    bool from_block,
    bool to_block,
    World& world) {
  std::vector<double> sums(2 * cut.counts.size());
  for (const ShardPiece& piece : cut.pieces) {
    World::Tensor& tensor = world.tensors[piece.tensor];
    const TensorScalars& s = scalars[piece.tensor];
    const auto first =
        static_cast<size_t>(cut.slice(piece.tensor).offset) + piece.begin;
    const size_t n = cut.valid(piece);
    void* param = n == 0 ? nullptr : tensor.param.pointer(first);
    void* out = to_block ? world.params_out.pointer(piece.wire) : param;
    if (n == 0) {
      continue;
    }
    if (s.skip) {
      if (out != param && !moments) {
        std::memcpy(out, param, n * dtype_size(types.param));
      }
      continue;
    }
    const void* grad = from_block ? world.grads.pointer(piece.wire)
                                  : tensor.grad.pointer(piece.begin);
    kernels::UpdateArgs args;
    static_cast<kernels::StepScalars&>(args) = s;
    args.formula = v.formula;
    args.grad_factor = s.grad_factor;
    kernels::UpdateSpans spans;
    spans.param_type = types.param;
    spans.grad_type = types.grad;
    spans.state_type = types.state;
    spans.params_out = &out;
    spans.num_out = moments ? 0 : 1;
    spans.param = param;
    spans.grads = &grad;
    spans.num_grads = 1;
    spans.master = types.masters ? tensor.master.pointer(piece.begin) : nullptr;
    for (int k = 0; k < 3; ++k) {
      spans.state[k] = tensor.state[k].pointer(piece.begin);
    }
    spans.count = n;
    if (!moments) {
      kernels::table()->update(args, spans);
      continue;
    }
    std::vector<double> blocks(2 * (n / kernels::kSumBlock + 1));
    kernels::table()->lamb_moments(args, spans, blocks.data());
    for (size_t i = 0; i < blocks.size(); ++i) {
      sums[2 * piece.tensor + i % 2] += blocks[i];
    }
  }
  return sums;
}

} // namespace fusedpg::test
