#pragma once

#include "collectives/net_exchange.hpp"
#include "collectives/plan.hpp"

namespace fusedpg {

// Runs a plan between machines, every rank with a link of its own: each owner
// gets all contributions to its lane, combines them, and sends everybody the
// results. Lanes are cut into segments, and while one's contributions are on
// their way, those of another are combined, and the results of a third travel:
// wire, memory and arithmetic work at the same time. Where the transport allows
// it, segments go from tensor to tensor without a copy.
//
// Sources reach the epilogue in rank order, as in shared memory.
void net_pipeline(NetContext& ctx, const Plan& plan);

} // namespace fusedpg
