#pragma once

#include <vector>

#include "collectives/block_map.hpp"
#include "collectives/context.hpp"
#include "collectives/plan.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {

// What all ranks have said of their tensors' places; after enter(), until the
// next barrier.
Path agreed_path(Context& ctx);

// A plan in shared memory. Lanes are cut into *chunks*; in each step a rank
// copies in chunk s for all other owners, applies the epilogue to chunk s-1 of
// its own lane, and copies out chunk s-2 of the others' results. Where all
// tensors lie in arenas, peers read or write them in place and that part of the
// step vanishes.
class TwoShot {
 public:
  TwoShot(Context& ctx, const Plan& plan) : ctx_(ctx), plan_(plan) {}

  // enter() for this operation: publishes where the tensors lie, two words a
  // tensor, followed by the words of `extra`.
  void begin(OpDescriptor& d, const std::vector<uint64_t>& extra = {}) const;
  // The rest. `d` names the operation in errors. `blocks`: of a plan that skips,
  // those that ranks have; null: all do.
  void run(const OpDescriptor& d, const BlockMap* blocks = nullptr) const;

 private:
  Context& ctx_;
  const Plan& plan_;
};

} // namespace fusedpg
