#include "collectives/context.hpp"

#include <cstring>

namespace fusedpg {

void enter(
    Context& ctx,
    OpDescriptor& mine,
    const uint64_t* table,
    size_t table_entries) {
  Domain& domain = ctx.domain;
  const int half = domain.next_half();
  if (table_entries > kTableEntries) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: more tensors or ranks in one call than supported; split "
        "the list",
        op_name(mine.op));
  }
  ctx.entered = true;
  ctx.identify(mine);
  mine.table_entries = table_entries;
  domain.descriptor(ctx.rank(), half) = mine;
  if (table_entries != 0) {
    std::memcpy(
        domain.table(ctx.rank(), half),
        table,
        table_entries * sizeof(uint64_t));
  }
  domain.barrier(mine, ctx.deadline);
  if (mine.flags & kRefused) {
    return; // the caller has its own error
  }
  check_said(
      mine,
      ctx.rank(),
      ctx.size(),
      [&](int p) -> const OpDescriptor& { return domain.descriptor(p, half); },
      [&](int p) { return std::string(domain.control(p).reason); });
}

void check_nan(
    const OpContext& ctx,
    OpDescriptor& mine,
    const void* data,
    size_t count) {
  if (ctx.nan_check && ctx.kernels.has_nan(mine.dtype, data, count)) {
    mine.flags |= kHasNan;
  }
}

void check_nan(const OpContext& ctx, OpDescriptor& mine, Buffers inputs) {
  for (const Buffer& b : inputs) {
    check_nan(ctx, mine, b.data, b.count);
  }
}

bool all_ranks(Context& ctx, uint64_t bits) {
  const int half = ctx.domain.half();
  for (int p = 0; p < ctx.size(); ++p) {
    if ((ctx.domain.descriptor(p, half).flags & bits) != bits) {
      return false;
    }
  }
  return true;
}

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
