#include "cuda/selector.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cuda/launch.hpp"

namespace fusedpg::cuda {

bool select_ring(const RingConfig& c) {
  // Inside a machine the stock path is as good as any.
  return c.world_size > 1 && c.has_ring &&
      (c.choice == NcclChoice::kPatched ||
       (c.choice == NcclChoice::kAuto && c.spans_hosts));
}

GpuPath select_step_path(const StepConfig& c) {
  // The others' kernels know the optimizers alone.
  const bool whole_step = c.reduces && c.updates && !c.generated;
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

// Cut into n chunks of c bytes, an operation takes about
//
//   what the wire takes + n * call + c * fill
//
// `call`: the launches of a chunk's two NCCL calls and of its kernels, and the
// hops of both rings, in which the wire is not full. `fill`: packing the first
// chunk and updating the last one, which no transfer hides. With n = bytes / c
// the best c is sqrt(bytes * call / fill). The constants are assumed, from
// H100s, not measured; an error of two in one of them costs 6 % of the sum.
size_t select_chunk_bytes(const ChunkConfig& c) {
  constexpr double kLaunches = 40e-6;
  constexpr double kHop = 2e-6;
  constexpr double kHopBetweenHosts = 20e-6;
  constexpr double kFill = 3e-12; // a byte, moved 6 times at 2 TB/s
  constexpr size_t kLeast = size_t(1) << 20;
  constexpr size_t kMost = size_t(128) << 20; // there are up to four buffers
  const double hop = c.spans_hosts ? kHopBetweenHosts : kHop;
  const double call = kLaunches + 2 * (c.world_size - 1) * hop;
  const double best = std::sqrt(static_cast<double>(c.bytes) * call / kFill);
  // The same on all ranks, whatever their last bits are.
  return std::clamp(std::bit_floor(static_cast<size_t>(best)), kLeast, kMost);
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
