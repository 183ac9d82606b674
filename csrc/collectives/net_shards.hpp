#pragma once

#include <vector>

#include "base/ownership.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/plan.hpp"

// Lists of tensors on their way between machines and their owners.
namespace fusedpg {

// to[i] = from[i] * weight, in the wide type; a weight of 1 changes nothing.
void widen(
    const kernels::Table& kernels,
    char* to,
    const void* from,
    DType type,
    size_t count,
    double weight);

// The shards of a list of tensors: each rank's in a block of its own, one
// behind the other.
class NetShards {
 public:
  NetShards(NetContext& ctx, size_t element); // bytes

  void add(size_t count);
  ShardRange shard(size_t i, int owner) const {
    return shard_range(counts_[i], size_, owner);
  }
  ShardRange own(size_t i) const {
    return shard(i, rank_);
  }
  // An owner's shard in the whole tensor ...
  char* in_tensor(const void* tensor, size_t i, int owner) const {
    return static_cast<char*>(const_cast<void*>(tensor)) +
        static_cast<size_t>(shard(i, owner).offset) * element_;
  }
  // ... and in that owner's block.
  char* in_block(const NetBuffer& block, size_t i, int owner) const {
    return block.data() + offsets_[i * static_cast<size_t>(size_) + owner];
  }
  NetBuffer make(int owner) const {
    return NetBuffer(bytes_[owner]);
  }

  // Sends the owners their blocks of these tensors. What the other ranks have
  // in this one's, by rank.
  std::vector<NetBuffer> scatter(const std::vector<const void*>& tensors);
  // Sends everybody this rank's block, and puts the others' into the tensors.
  void gather(const NetBuffer& mine, const std::vector<void*>& tensors);

 private:
  size_t bytes(size_t i, int owner) const {
    return static_cast<size_t>(shard(i, owner).length) * element_;
  }

  NetContext& ctx_;
  const size_t element_;
  const int rank_;
  const int size_;
  std::vector<size_t> bytes_; // of blocks, by owner
  std::vector<int64_t> counts_;
  std::vector<size_t> offsets_; // a tensor's in all blocks, the next one's, ...
};

// All ranks' contributions to the shards that this rank owns, or their sum.
class ReceivedShards {
 public:
  // `weights` by rank, or none; must outlive this.
  ReceivedShards(
      NetContext& ctx,
      DType type,
      const std::vector<double>& weights);

  void add(const void* tensor, size_t count);
  void exchange();

  // What is to be added, in this order; lives as long as this.
  std::vector<const void*> sources(size_t i) const;
  // Whether sources are one sum, in the wide type and of products with weights.
  bool folded() const {
    return folds_;
  }

 private:
  NetContext& ctx_;
  const DType type_;
  const std::vector<double>& weights_;
  const bool folds_; // on the way
  const int rank_;
  NetShards shards_;
  std::vector<const void*> tensors_;
  std::vector<NetBuffer> blocks_; // by rank, or one sum
};

} // namespace fusedpg
