#pragma once

#include <vector>

#include "collectives/context.hpp"

namespace fusedpg {

// What every operation is that only moves data: each rank offers bytes to each
// rank, and each rank gets what is meant for it. Way::move() carries it out: in
// shared memory shm_move(), between hosts net_move() (net_moves.hpp).
struct Move {
  // sends[p]: what rank p pulls from this rank. When `shared`, all ranks pull
  // the same sends[0].
  std::vector<Span> sends;
  bool shared = false;
  // recvs[p]: where this rank puts what it pulls from rank p. None shares memory
  // with what a peer pulls from this rank (need_apart() in c10d/tensors.hpp sees
  // to it).
  std::vector<Span> recvs;

  Span send_to(int rank) const {
    return shared ? sends[0] : sends[rank];
  }
};

// Throws Error(kMismatch) where they differ.
void check_sizes(
    const OpDescriptor& d,
    int from,
    int to,
    uint64_t sent,
    uint64_t expected);

// In shared memory, where ranks pull: small inputs are staged before the first
// barrier; inputs in arenas are pulled in place; the rest go through the staging
// buffers in chunks. enter() and the transfer. Throws Error(kMismatch) on all
// ranks when one offers a size that another does not expect.
void shm_move(Context& ctx, const Move& move, OpDescriptor& d);

} // namespace fusedpg
