#pragma once

#include <functional>

#include "collectives/block_map.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/plan.hpp"

namespace fusedpg {

// Which blocks of a plan's contributions hold anything, as far as a rank has to
// know.
struct NetBlocks {
  // By place on this host: of the lanes for which this rank works.
  BlockMap local;
  // By host: of this rank's lane.
  BlockMap hosts;
  // What anybody has, of all lanes.
  BlockMap all;
};

// This rank's blocks, of all lanes: bits as in BlockMap.
struct OwnBlocks {
  std::vector<uint64_t> bits;
  size_t blocks = 0; // of the tensors that were looked at
  size_t unseen = 0; // and of the others, which count as present
};

// Finds them. `looks`: at which tensors.
OwnBlocks find_own_blocks(
    OpContext& ctx,
    const Plan& plan,
    const std::function<bool(size_t tensor)>& looks);

// Learns what the other ranks have: bitmaps go first, so everybody knows the
// length of every message before it comes, and nobody waits for who has
// nothing. `d` names the operation in errors.
NetBlocks share_blocks(
    NetContext& ctx,
    const Plan& plan,
    const OwnBlocks& own,
    const OpDescriptor& d);

} // namespace fusedpg
