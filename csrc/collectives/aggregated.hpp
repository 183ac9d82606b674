#pragma once

#include "collectives/net_blocks.hpp"

// Reductions by a group's aggregators: see aggregate/protocol.hpp.
namespace fusedpg {

// Whether the group has some, and a plan is one that they can carry out.
bool may_aggregate(const NetContext& ctx, const Plan& plan);

// All of a plan's tensors.
void aggregate_dense(NetContext& ctx, const Plan& plan);

// The blocks of a plan that skips what nobody has, of one operation.
class AggregatedBlocks {
 public:
  // Collective: agrees on the length of messages.
  AggregatedBlocks(NetContext& ctx, const Plan& plan, OwnBlocks own);

  void run(NetContext& ctx, const Plan& plan);
  // The share of blocks that any rank has; before run(), as if no two ranks had
  // the same ones.
  double density() const {
    return density_;
  }

 private:
  const OwnBlocks own_;
  const size_t blocks_; // of the tensors
  size_t present_ = 0; // all ranks' blocks, added up
  double density_ = 1;
};

} // namespace fusedpg
