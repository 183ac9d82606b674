#include "collectives/one_shot.hpp"

#include <vector>

namespace fusedpg {

bool one_shot(
    Context& ctx,
    OpDescriptor& d,
    const Span& input,
    const std::function<void(const void* const* srcs)>& fn) {
  ctx.kernels.copy(
      ctx.domain.stage_in(ctx.rank(), ctx.domain.next_half()),
      input.data,
      input.bytes,
      false);
  d.flags |= kStaged;
  enter(ctx, d);
  if (!all_ranks(ctx, kStaged)) {
    return false;
  }
  std::vector<const void*> srcs(ctx.size());
  for (int p = 0; p < ctx.size(); ++p) {
    srcs[p] = ctx.domain.stage_in(p, ctx.domain.half());
  }
  fn(srcs.data());
  return true;
}

} // namespace fusedpg
