#pragma once

#include <vector>

#include "collectives/collectives.hpp"

namespace fusedpg {

// The skeleton of every operation that only moves data: each rank offers bytes
// to each rank, and each rank pulls what is meant for it. Small inputs are
// staged before the first barrier; inputs in arenas are pulled in place; the
// rest go through the staging buffers in chunks.
struct Move {
  // sends[p]: what rank p pulls from this rank. When `shared`, all ranks pull
  // the same sends[0].
  std::vector<Span> sends;
  bool shared = false;
  // recvs[p]: where this rank puts what it pulls from rank p.
  std::vector<Span> recvs;

  Span send_to(int rank) const {
    return shared ? sends[0] : sends[rank];
  }

  // enter() and the transfer. Throws Error(kMismatch) on all ranks when one
  // offers a size that another does not expect.
  void run(Context& ctx, OpDescriptor& d) const;
};

} // namespace fusedpg
