#include "collectives/one_shot.hpp"

#include <vector>

namespace fusedpg {

void one_shot(
    Context& ctx,
    OpDescriptor& d,
    const Span& input,
    const std::function<void(const void* const* srcs)>& fn) {
  ctx.kernels.copy(
      ctx.domain.stage_in(ctx.rank(), ctx.domain.next_half()),
      input.data,
      input.bytes,
      false);
  enter(ctx, d);
  std::vector<const void*> srcs(ctx.size());
  for (int p = 0; p < ctx.size(); ++p) {
    srcs[p] = ctx.domain.stage_in(p, ctx.domain.half());
  }
  fn(srcs.data());
}

} // namespace fusedpg
