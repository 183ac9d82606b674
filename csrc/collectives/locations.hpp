#pragma once

#include <cstdint>
#include <vector>

#include "base/descriptor.hpp"
#include "collectives/move.hpp"
#include "collectives/plan.hpp"
#include "host/domain.hpp"

namespace fusedpg {

// The places of an operation's tensors in a rank's arena, for peers that map it:
// what Domain::address() takes, or kNotInArena.
struct Locations {
  // A plan has kReadsDirect if all contributions lie there, kWritesDirect if all
  // results do.
  uint64_t flags = 0;
  // A plan has two words a tensor, for its contribution and for its result. A move
  // has one for each of its sends, then one for each of its recvs.
  std::vector<uint64_t> table;
};

Locations locate(const Plan& plan, const Arena& arena);
Locations locate(const Move& move, const Arena& arena);

// Between hosts: tells this host's other ranks, with the next barrier. Too long
// a table is not told, as if nothing lay in the arena. Returns the flags told.
uint64_t publish(Domain& domain, const OpDescriptor& op, Locations own);
// After that barrier: what they have told, by place on this host.
std::vector<Locations> published(Domain& domain);

} // namespace fusedpg
