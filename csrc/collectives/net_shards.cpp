#include "collectives/net_shards.hpp"

#include <cstring>

#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

// Of an empty tensor there need be no address.
void copy(char* to, const char* from, size_t bytes) {
  if (bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

} // namespace

void widen(
    const kernels::Table& kernels,
    char* to,
    const void* from,
    DType type,
    size_t count,
    double weight) {
  if (count == 0) {
    return;
  }
  kernels::ReduceArgs args;
  args.dtype = wide_type(type);
  kernels.cast(args.dtype, to, type, from, count);
  if (weight != 1) {
    args.op = RedOp::kPremulSum;
    args.factor = weight;
    void* out = to;
    const void* in = to;
    kernels.reduce(args, &out, 1, &in, 1, count, false);
  }
}

// --- NetShards ---------------------------------------------------------------

NetShards::NetShards(NetContext& ctx, size_t element)
    : ctx_(ctx),
      element_(element),
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
      folds_(select_net_path(ctx.ranks_share_hosts) == NetPath::kChain),
      rank_(ctx.transport.rank()),
      shards_(ctx, dtype_size(folds_ ? wide_type(type) : type)) {}

void ReceivedShards::add(const void* tensor, size_t count) {
  shards_.add(count);
  tensors_.push_back(tensor);
}

void ReceivedShards::exchange() {
  if (!folds_) {
    blocks_ = shards_.scatter(tensors_);
    return;
  }
  const double weight = weights_.empty() ? 1 : weights_[rank_];
  std::vector<NetBuffer> blocks;
  for (int p = 0; p < ctx_.transport.size(); ++p) {
    blocks.push_back(shards_.make(p));
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const ShardRange shard = shards_.shard(i, p);
      widen(
          ctx_.kernels,
          shards_.in_block(blocks[p], i, p),
          static_cast<const char*>(tensors_[i]) +
              static_cast<size_t>(shard.offset) * dtype_size(type_),
          type_,
          static_cast<size_t>(shard.length),
          weight);
    }
  }
  blocks_ = {net_fold(ctx_, blocks, wide_type(type_))};
}

std::vector<const void*> ReceivedShards::sources(size_t i) const {
  if (folds_) {
    return {shards_.in_block(blocks_[0], i, rank_)};
  }
  std::vector<const void*> all;
  for (size_t p = 0; p < blocks_.size(); ++p) {
    all.push_back(
        static_cast<int>(p) == rank_ ? shards_.in_tensor(tensors_[i], i, rank_)
                                     : shards_.in_block(blocks_[p], i, rank_));
  }
  return all;
}

} // namespace fusedpg
