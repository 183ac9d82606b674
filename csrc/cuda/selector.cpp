#include "cuda/selector.hpp"

#include <algorithm>

#include "cuda/launch.hpp"

namespace fusedpg::cuda {

bool select_ring(const RingConfig& c) {
  // Inside a machine the stock path is as good as any.
  return c.world_size > 1 && c.has_ring &&
      (c.choice == NcclChoice::kPatched ||
       (c.choice == NcclChoice::kAuto && c.spans_hosts));
}

GpuPath select_step_path(const StepConfig& c) {
  const bool whole_step = c.reduces && c.updates;
  if (whole_step && c.has_direct && c.in_arena && !c.lamb) {
    return GpuPath::kDirect;
  }
  // One type on the wire both ways.
  if (whole_step && c.has_ring && c.grad_type == c.param_type &&
      c.param_type != DType::kFloat64) {
    return GpuPath::kRing;
  }
  return GpuPath::kStock;
}

bool select_step_skip(size_t block, size_t tiles, int world_size) {
  const size_t words = tiles * static_cast<size_t>(world_size);
  return block != 0 && words * sizeof(uint16_t) <= kDirectFlags;
}

size_t select_whole(const StepConfig& c, GpuPath path, bool weighted) {
  // Below this a whole tensor is not worth a chunk of its own.
  constexpr size_t kWholeBytes = size_t(1) << 20;
  // Products with a weight are rounded on the way into the wire, sums that are
  // left in outputs copied out of it, and the ring's sums would overwrite the
  // parameters: none can use whole tensors.
  return c.updates && !weighted && path != GpuPath::kRing ? kWholeBytes /
          std::max(dtype_size(c.grad_type), dtype_size(c.param_type))
                                                          : ~size_t(0);
}

GpuPath select_sum_path(const SumConfig& c) {
  return c.has_direct && c.in_arena && c.elements != 0 &&
          c.blocks <= kDirectFlags
      ? GpuPath::kDirect
      : GpuPath::kStock;
}

bool select_sum_skip(size_t blocks_union, size_t blocks, double limit) {
  return static_cast<double>(blocks_union) <
      limit * static_cast<double>(blocks);
}

} // namespace fusedpg::cuda
