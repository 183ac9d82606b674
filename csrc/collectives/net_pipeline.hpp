#pragma once

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
// its proxy (HostMap), adds up what the machine's ranks contribute, which they
// leave in shared memory, and passes the results on to them.
//
// Sums are those of HostFold. `d` names the operation in errors.
void net_pipeline(NetContext& ctx, const Plan& plan, const OpDescriptor& d);

} // namespace fusedpg
