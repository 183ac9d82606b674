#pragma once

#include <functional>

#include "collectives/net_blocks.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/plan.hpp"

namespace fusedpg {

// Runs a plan between machines of one or several ranks. Lanes are cut into
// segments, of which several are under way: while one's contributions travel,
// those of another are combined, and the results of a third travel: wire, memory
// and arithmetic work at the same time. Where the transport allows it, segments
// go from tensor to tensor without a copy.
//
// A lane crosses the link of every other machine once each way: there one rank,
// its proxy (HostMap), adds up what the machine's ranks contribute, where it
// lies in their arenas or out of staging buffers, and passes the results on.
//
// With `blocks`, of a plan that skips, each host sends the blocks that any of its
// ranks has; and where zeros stay, owners the blocks that anybody has.
//
// Sums are those of HostFold. `d` names the operation in errors.
void net_pipeline(
    NetContext& ctx,
    const Plan& plan,
    const OpDescriptor& d,
    const NetBlocks* blocks = nullptr);

// What the ranks of a host do together: an error fails the group, so that no
// neighbour waits for this rank.
void net_together(NetContext& ctx, const std::function<void()>& body);

} // namespace fusedpg
