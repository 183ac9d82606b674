#include "collectives/way.hpp"

#include "base/hash.hpp"

namespace fusedpg {

void check_nan(Way& way, OpDescriptor& mine, const void* data, size_t count) {
  if (way.checks_nan() && way.kernels().has_nan(mine.dtype, data, count)) {
    mine.flags |= kHasNan;
  }
}

bool any_rank(Way& way, uint64_t bits) {
  for (int p = 0; p < way.size(); ++p) {
    if ((way.said(p).flags & bits) != 0) {
      return true;
    }
  }
  return false;
}

void ShmWay::enter(
    const Plan* plan,
    OpDescriptor& mine,
    const std::vector<uint64_t>& extra) {
  if (plan != nullptr) {
    before_extra_ = 2 * plan->tensors.size();
    TwoShot(ctx_, *plan).begin(mine, extra);
  } else {
    before_extra_ = 0;
    fusedpg::enter(ctx_, mine, extra.data(), extra.size());
  }
}

uint64_t ShmWay::shared_place(const void* data, size_t bytes) {
  const auto found = ctx_.domain.locate_any(data, bytes);
  if (!found) {
    fail(
        ErrorKind::kInvalid,
        "fused: a parameter is said to be shared between the ranks of a "
        "machine, but does not lie in an arena of this group");
  }
  return Hash()
      .add(static_cast<uint64_t>(found->rank))
      .add(found->offset)
      .value();
}

} // namespace fusedpg
