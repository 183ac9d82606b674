#include "c10d/net_shards.hpp"

#include <cstring>

#include <ATen/ATen.h>

#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

at::ScalarType scalar_type(DType gradients) {
  switch (gradients) {
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

at::Tensor view(const void* data, DType type, size_t count) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<int64_t>(count)},
      scalar_type(type));
}

// Of an empty tensor there need be no address.
void copy(char* to, const char* from, size_t bytes) {
  if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

} // namespace

DType wide_type(DType gradients) {
  return gradients == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void widen(
    char* to,
    const void* from,
    DType type,
    size_t count,
    double weight) {
  if (count == 0) {
    return;
  }
  at::Tensor wide = view(to, wide_type(type), count);
  wide.copy_(view(from, type, count));
  if (weight != 1) {
    wide.mul_(weight);
  }
}

// --- NetShards ---------------------------------------------------------------

NetShards::NetShards(NetContext& ctx, DType type)
    : ctx_(ctx),
      element_(dtype_size(type)),
      rank_(ctx.transport.rank()),
      size_(ctx.transport.size()),
      bytes_(size_) {}

void NetShards::add(size_t count) {
  counts_.push_back(static_cast<int64_t>(count));
  for (int p = 0; p < size_; ++p) {
    offsets_.push_back(bytes_[p]);
    bytes_[p] += bytes(counts_.size() - 1, p);
  }
}

std::vector<NetBuffer> NetShards::scatter(
    const std::vector<const void*>& tensors) {
  std::vector<NetBuffer> outs(size_), ins(size_);
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) {
      continue;
    }
    outs[p] = make(p);
    ins[p] = make(rank_);
    for (size_t i = 0; i < tensors.size(); ++i) {
      copy(in_block(outs[p], i, p), in_tensor(tensors[i], i, p), bytes(i, p));
    }
  }
  net_exchange(ctx_, outs, ins);
  return ins;
}

void NetShards::gather(
    const NetBuffer& mine,
    const std::vector<void*>& tensors) {
  std::vector<NetBuffer> ins(size_);
  for (int p = 0; p < size_; ++p) {
    ins[p] = p == rank_ ? mine : make(p);
  }
  net_gather(ctx_, mine, ins);
  for (int p = 0; p < size_; ++p) {
    for (size_t i = 0; i < tensors.size() && p != rank_; ++i) {
      copy(in_tensor(tensors[i], i, p), in_block(ins[p], i, p), bytes(i, p));
    }
  }
}

// --- ReceivedShards ----------------------------------------------------------

ReceivedShards::ReceivedShards(
    NetContext& ctx,
    DType type,
    const std::vector<double>& weights)
    : ctx_(ctx),
      type_(type),
      weights_(weights),
      folds_(select_net_path(ctx) == NetPath::kChain),
      rank_(ctx.transport.rank()),
      shards_(ctx, this->type()) {}

void ReceivedShards::add(const void* grad, size_t count) {
  shards_.add(count);
  grads_.push_back(grad);
}

void ReceivedShards::exchange() {
  if (!folds_) {
    blocks_ = shards_.scatter(grads_);
    return;
  }
  const double weight = weights_.empty() ? 1 : weights_[rank_];
  std::vector<NetBuffer> blocks;
  for (int p = 0; p < ctx_.transport.size(); ++p) {
    blocks.push_back(shards_.make(p));
    for (size_t i = 0; i < grads_.size(); ++i) {
      const ShardRange shard = shards_.shard(i, p);
      widen(
          shards_.in_block(blocks[p], i, p),
          static_cast<const char*>(grads_[i]) +
              static_cast<size_t>(shard.offset) * dtype_size(type_),
          type_,
          static_cast<size_t>(shard.length),
          weight);
    }
  }
  blocks_ = {net_fold(ctx_, blocks, type())};
}

std::vector<const void*> ReceivedShards::sources(size_t i) const {
  if (folds_) {
    return {shards_.in_block(blocks_[0], i, rank_)};
  }
  std::vector<const void*> all;
  for (size_t p = 0; p < blocks_.size(); ++p) {
    all.push_back(
        static_cast<int>(p) == rank_ ? shards_.in_tensor(grads_[i], i, rank_)
                                     : shards_.in_block(blocks_[p], i, rank_));
  }
  return all;
}

void ReceivedShards::reduce(size_t i, const ShardsCall& call, void* output)
    const {
  const ShardRange own = shards_.own(i);
  const auto count = static_cast<size_t>(own.length);
  kernels::ReduceArgs args =
      shards_reduction(call, weights_, ctx_.transport.size());
  std::vector<const void*> srcs = sources(i);
  void* out = static_cast<char*>(output) +
      static_cast<size_t>(own.offset) * dtype_size(type_);
  if (!folds_) {
    ctx_.kernels.reduce(args, &out, 1, srcs.data(), srcs.size(), count, false);
    return;
  }
  // What is left: the division, and one rounding.
  args.dtype = type();
  if (args.weights != nullptr) {
    args.op = RedOp::kSum;
    args.weights = nullptr;
  }
  void* sum = const_cast<void*>(srcs[0]);
  ctx_.kernels.reduce(args, &sum, 1, srcs.data(), 1, count, false);
  if (count != 0) {
    view(out, type_, count).copy_(view(sum, type(), count));
  }
}

} // namespace fusedpg
