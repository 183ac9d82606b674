#pragma once

#include <functional>
#include <string>
#include <vector>

#include "collectives/move.hpp"
#include "collectives/net_exchange.hpp"

namespace fusedpg {

// Carries out a move between machines. Ranks tell each other what they are about
// to do and how many bytes they send and expect, and small data travel along.
// The rest goes in segments, several of them under way: what all ranks get, once
// to each host, to the rank there that is proxy for its owner and passes it on
// to its host's others; what is for one rank alone, directly. Inside a host data
// go through the staging buffers of its domain.
//
// Throws Error(kMismatch) on all ranks where two disagree; the group stays
// usable then.
void net_move(NetContext& ctx, const Move& move, OpDescriptor& d);

// Tells the peers, which are about to enter an operation that this rank cannot
// execute, that it does not: they raise, too.
void net_refuse(NetContext& ctx, const std::string& reason);

} // namespace fusedpg
