#pragma once

#include <cstdint>
#include <vector>

#include "collectives/plan.hpp"
#include "host/arena.hpp"

namespace fusedpg {

// The places of a plan's tensors in this rank's arena, for peers that map it.
struct Locations {
  // kReadsDirect if all contributions lie there, kWritesDirect if all results
  // do.
  uint64_t flags = 0;
  // Two words a tensor: of its contribution and of its result. What
  // Domain::address() takes, where the flag is set.
  std::vector<uint64_t> table;
};

Locations locate(const Plan& plan, const Arena& arena);

} // namespace fusedpg
