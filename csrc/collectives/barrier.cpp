#include "collectives/collectives.hpp"

namespace fusedpg {

void barrier(Context& ctx) {
  OpDescriptor d;
  d.op = OpCode::kBarrier;
  enter(ctx, d);
}

} // namespace fusedpg
