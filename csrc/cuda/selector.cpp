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
  // One type on the wire both ways, whose sums may be rounded at every hop.
  if (whole_step && c.has_ring && c.grad_type == c.param_type &&
      c.param_type != DType::kFloat64 &&
      !(c.wide_half_sums && wide_type(c.grad_type) != c.grad_type)) {
    return GpuPath::kRing;
  }
  return GpuPath::kStock;
}

bool select_folds(const StepConfig& c, GpuPath path) {
  return c.wide_half_sums && c.reduces && !c.generated && c.world_size > 1 &&
      path == GpuPath::kStock && wide_type(c.grad_type) != c.grad_type;
}

bool select_rides(const StepConfig& c, GpuPath path, bool weighted) {
  // Headers of a reduce-scatter have room for every rank's weight, for every
  // rank: 8 elements each, which are 128 KiB of fp32 here.
  constexpr int kMostWeights = 64;
  const bool fits =
      !weighted || c.world_size <= kMostWeights || select_folds(c, path);
  return path == GpuPath::kStock && c.reduces && c.world_size > 1 && fits;
}

size_t select_whole(const StepConfig& c, GpuPath path, bool packs) {
  // Below this a whole tensor is not worth a chunk of its own.
  constexpr size_t kWholeBytes = size_t(1) << 20;
  // Sums that are left in outputs are copied out of the wire, and the ring's
  // sums would overwrite the gradients: neither can use whole tensors.
  return packs || !c.updates || path == GpuPath::kRing ? ~size_t(0)
                                                       : kWholeBytes /
          std::max(dtype_size(c.grad_type), dtype_size(c.param_type));
}

// Cut into n chunks of c bytes, an operation takes about
//
//   what the wire takes + n * call + c * fill
//
// `call`: the launches of a chunk's two collectives and of its kernels, and the
// hops of both rings, in which the wire is not full. `fill`: packing the first
// chunk and updating the last one, which no transfer hides. With n = bytes / c
// the best c is sqrt(bytes * call / fill). The constants are assumed, from
// H100s, not measured; an error of two in one of them costs 6 % of the sum.
size_t select_chunk_bytes(const ChunkConfig& c) {
  constexpr double kLaunches = 100e-6; // 35 for each of two calls of torch
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

} // namespace fusedpg::cuda
