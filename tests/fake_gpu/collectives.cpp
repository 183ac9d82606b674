// What the collectives of the fake NCCL do when their turn on the stream comes.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/dtype.hpp"
#include "comm.hpp"
#include "cuda/kernels/ranges.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: NCCL's names

namespace {

DType element(NcclDataType type) {
  switch (type) {
    case kNcclUint8:
      return DType::kUInt8;
    case kNcclInt32:
      return DType::kInt32;
    case kNcclInt64:
      return DType::kInt64;
    case kNcclFloat16:
      return DType::kFloat16;
    case kNcclFloat32:
      return DType::kFloat32;
    case kNcclFloat64:
      return DType::kFloat64;
    case kNcclBfloat16:
      return DType::kBFloat16;
  }
  return DType::kOpaque;
}

RedOp operation(NcclRedOp op) {
  switch (op) {
    case kNcclSum:
      return RedOp::kSum;
    case kNcclMax:
      return RedOp::kMax;
    case kNcclMin:
      return RedOp::kMin;
    case kNcclAvg:
      return RedOp::kAvg;
  }
  return RedOp::kPremulSum;
}

} // namespace

size_t type_size(NcclDataType type) {
  const DType known = element(type);
  return known == DType::kOpaque ? 0 : dtype_size(known);
}

NcclResult Comm::launch(const Collective& c, void* stream) {
  const bool reduces = c.op == kAllReduce || c.op == kReduceScatter;
  if (type_size(c.type) == 0 ||
      (reduces && !reduction_supported(element(c.type), operation(c.red_op)))) {
    return kNcclInvalidArgument;
  }
  if (c.count == 0) {
    return kNcclSuccess;
  }
  if (c.src == nullptr || c.dst == nullptr) {
    return kNcclInvalidArgument;
  }
  // NCCL sends from there while it receives.
  const auto apart = std::abs(
      static_cast<const char*>(c.src) - static_cast<const char*>(c.dst));
  if (c.op == kAllToAll &&
      static_cast<size_t>(apart) <
          c.count * type_size(c.type) * static_cast<size_t>(size)) {
    return kNcclInvalidArgument;
  }
  return enqueue(stream, [this, c] { execute(c); });
}

// What the patch of NCCL does on the way, here one after the other.
NcclResult Comm::launch_ring(
    const Collective& c,
    const cuda::RingUpdate* update,
    int how,
    void* stream) {
  if (size < 2 || type_size(c.type) == 0 || c.count == 0) {
    return kNcclInvalidArgument;
  }
  // Of a library that was built without the functions (2), or without one
  // protocol's (3), which NCCL takes for sizes between; or whose functions
  // forget LAMB's half (4), amsgrad (5) or Nesterov's momentum (6).
  const int64_t kind = from_environment("FUSEDPG_FAKE_PATCHED", 0);
  const size_t bytes = c.count * type_size(c.type) * static_cast<size_t>(size);
  const bool between = bytes > (size_t(1) << 14) && bytes < (size_t(1) << 18);
  const int protocol = how / 2 - 1;
  const bool line = protocol < 0 ? between : protocol == 1;
  const bool gathers = how % 2 != 0;
  const bool empty = kind == 2 || (kind == 3 && line);
  const auto run = [this, c, update, gathers, empty, kind] {
    if (empty) {
      return;
    }
    Collective part = c;
    part.dst = static_cast<char*>(c.dst) +
        static_cast<size_t>(rank) * c.count * type_size(c.type);
    execute(part);
    cuda::RingUpdate ring = *update;
    const cuda::RingMode mode =
        gathers ? cuda::RingMode::kUpdate : cuda::RingMode::kMoments;
    const bool valid = ring.mode == mode && ring.skip_block == 0 &&
        ring.update.chunk.block == c.count && ring.update.grads == part.dst &&
        ring.update.params_out == part.dst;
    if (!valid) {
      calls().bad_handle(0, "a RingUpdate that does not fit its call");
      return;
    }
    ring.update.amsgrad = ring.update.amsgrad && kind != 5;
    ring.update.nesterov = ring.update.nesterov && kind != 6;
    if (!gathers && kind == 4) {
      return;
    }
    if (!gathers) {
      // As channels do, which need not end where pieces do.
      const uint64_t half = c.count / 2;
      const auto add = [](const cuda::Sums& sums) { return sums; };
      cuda::moments_range(ring, 0, 0, half, 0, 1, add);
      cuda::moments_range(
          ring, cuda::kRingChannels - 1, half, c.count, 0, 1, add);
      return;
    }
    cuda::update_range(ring, 0, c.count, 0, 1);
    execute({kAllGather, part.dst, c.dst, c.count, c.type, kNcclSum});
  };
  return enqueue(stream, run);
}

// In rank order, rounded to the type at each step as a ring does it.
void Comm::reduce(const Collective& c, char* dst, size_t first, size_t count)
    const {
  const kernels::Table& table = *kernels::table();
  const size_t bytes = type_size(c.type);
  kernels::ReduceArgs args;
  args.dtype = element(c.type);
  std::memcpy(dst, segment_->slot(0) + first * bytes, count * bytes);
  for (int r = 1; r < size; ++r) {
    const bool last = r == size - 1;
    const bool average = c.red_op == kNcclAvg;
    args.op = average && !last ? RedOp::kSum : operation(c.red_op);
    args.divisor = average && last ? size : 1;
    void* const to = dst;
    const void* const from[] = {dst, segment_->slot(r) + first * bytes};
    table.reduce(args, &to, 1, from, 2, count, false);
  }
}

void Comm::execute(const Collective& c) {
  const std::lock_guard<std::mutex> lock(executing_);
  const size_t bytes = type_size(c.type);
  const bool by_rank = c.op == kReduceScatter || c.op == kAllToAll;
  const size_t blocks = by_rank ? static_cast<size_t>(size) : 1;
  Executed executed{0, 0, c.count, c.op, rank};
  if (!begin(executed)) {
    return;
  }
  const auto* src = static_cast<const char*>(c.src);
  auto* dst = static_cast<char*>(c.dst);
  const size_t most = kSlotBytes / bytes / blocks;
  Announcement announcement{};
  announcement = {
      executed.sequence,
      0,
      c.count,
      c.op,
      c.type,
      c.op == kAllGather ? 0 : c.red_op,
      0};
  for (size_t at = 0; at < c.count; at += most) {
    const size_t part = std::min(most, c.count - at);
    const auto publish = [&] {
      for (size_t block = 0; block < blocks; ++block) {
        std::memcpy(
            segment_->slot(rank) + block * most * bytes,
            src + (block * c.count + at) * bytes,
            part * bytes);
      }
    };
    const auto consume = [&] {
      if (c.op == kBroadcast) {
        std::memcpy(dst + at * bytes, segment_->slot(c.red_op), part * bytes);
        return;
      }
      const size_t own = by_rank ? static_cast<size_t>(rank) * most : 0;
      if (c.op == kAllReduce || c.op == kReduceScatter) {
        reduce(c, dst + at * bytes, own, part);
        return;
      }
      for (int r = 0; r < size; ++r) {
        std::memcpy(
            dst + (static_cast<size_t>(r) * c.count + at) * bytes,
            segment_->slot(r) + own * bytes,
            part * bytes);
      }
    };
    if (!exchange(announcement, publish, consume)) {
      break;
    }
    ++announcement.part;
  }
  end();
}

} // namespace fusedpg::fake
