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

// Finds this rank's blocks, and learns what the other ranks have: bitmaps go
// first, so everybody knows the length of every message before it comes, and
// nobody waits for who has nothing. `looks`: at which tensors; all blocks of the
// others count as present. `d` names the operation in errors.
NetBlocks find_net_blocks(
    NetContext& ctx,
    const Plan& plan,
    const std::function<bool(size_t tensor)>& looks,
    const OpDescriptor& d);

} // namespace fusedpg
