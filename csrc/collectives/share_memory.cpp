#include "collectives/collectives.hpp"

namespace fusedpg {

void* share_memory(Context& ctx, size_t bytes) {
  OpDescriptor d;
  d.op = OpCode::kShareMemory;
  d.count = bytes;
  if (bytes == 0) {
    enter(ctx, d);
    return nullptr;
  }
  uint64_t location = 0;
  if (ctx.rank() == 0) {
    Arena& arena = *ctx.domain.arena();
    location = *arena.locate(arena.allocate(bytes), bytes);
  }
  enter(ctx, d, &location, 1);
  location = *ctx.domain.table(0, ctx.domain.half());
  ctx.domain.add_shared(location, bytes);
  return ctx.domain.address(0, location);
}

} // namespace fusedpg
