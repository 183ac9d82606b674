// NCCL's ring for the operation FuncFusedpgUpdate, over its own primitives.
// Included at the end of the includes of reduce_scatter.h.
#pragma once

#include "fusedpg/cuda/kernels/ranges.hpp"
#include "fusedpg_ring.h"

// Only names the operation: the sums are FuncSum's.
template <typename T>
struct FuncFusedpgUpdate {
  using EltType = T;
  __device__ __forceinline__ FuncFusedpgUpdate(uint64_t = 0) {}
};

namespace fusedpg_ring {

using fusedpg::cuda::RingMode;
using fusedpg::cuda::RingUpdate;
using fusedpg::cuda::Sums;

static_assert(MAXCHANNELS <= fusedpg::cuda::kRingChannels);

// The primitives use the last ones, and the kernel 0.
constexpr int kBarrier = 8;

// Added over the warps in their order.
__device__ __forceinline__ Sums
add_threads(Sums sums, int thread, int threads) {
  __shared__ double warps[2][32];
  for (int other = 16; other > 0; other /= 2) {
    sums.param += __shfl_down_sync(~0u, sums.param, other);
    sums.direction += __shfl_down_sync(~0u, sums.direction, other);
  }
  if (thread % 32 == 0) {
    warps[0][thread / 32] = sums.param;
    warps[1][thread / 32] = sums.direction;
  }
  barrier_sync(kBarrier, threads);
  if (thread == 0) {
    for (int warp = 1; warp < threads / 32; ++warp) {
      sums.param += warps[0][warp];
      sums.direction += warps[1][warp];
    }
  }
  barrier_sync(kBarrier, threads);
  return sums;
}

// A function of its own, so that the ring keeps its registers.
static __device__ __noinline__ void apply_update(
    const RingUpdate* update,
    int channel,
    size_t offset,
    int count,
    int thread,
    int threads) {
  if (update->mode == RingMode::kUpdate) {
    fusedpg::cuda::update_range(
        *update, offset, offset + count, thread, threads);
  } else {
    fusedpg::cuda::moments_range(
        *update,
        channel,
        offset,
        offset + count,
        thread,
        threads,
        [&](const Sums& sums) { return add_threads(sums, thread, threads); });
  }
}

template <typename T, typename Proto>
__device__ __forceinline__ void run_channel(
    int thread,
    int threads,
    struct ncclDevWorkColl* work) {
  ncclRing* ring = &ncclShmem.channel.ring;
  const auto* update = reinterpret_cast<const RingUpdate*>(work->redOpArg);
  const RingMode mode = update->mode;
  const int channel = ncclShmem.channelId;
  const int size = ncclShmem.comm.nRanks;
  const size_t stride = update->update.chunk.block;
  size_t count, begin, part, chunk;
  ncclCollCbdPart(
      work, channel, Proto::Id, sizeof(T), &count, &begin, &part, &chunk);
  Primitives<T, FuncSum<T>, FanSymmetric<1>, 0, Proto, 0> prims(
      thread,
      threads,
      &ring->prev,
      &ring->next,
      work->sendbuff,
      work->recvbuff,
      0);
  const auto apply = [&](size_t offset, int elements) {
    barrier_sync(kBarrier, threads);
    apply_update(update, channel, offset, elements, thread, threads);
    barrier_sync(kBarrier, threads);
  };
  const Channel own{begin, part, chunk};
  if (mode == RingMode::kMoments) {
    run<false>(prims, ring->userRanks, size, stride, own, apply);
  } else {
    run<true>(prims, ring->userRanks, size, stride, own, apply);
  }
}

} // namespace fusedpg_ring

template <typename T>
struct RunWorkColl<
    ncclFuncReduceScatter,
    T,
    FuncFusedpgUpdate<T>,
    NCCL_ALGO_RING,
    NCCL_PROTO_SIMPLE> {
  __device__ __forceinline__ void run(
      int tid,
      int nthreads,
      struct ncclDevWorkColl* work) {
    using Proto = ProtoSimple<
        REDUCESCATTER_CHUNKSTEPS / REDUCESCATTER_SLICESTEPS,
        REDUCESCATTER_SLICESTEPS>;
    fusedpg_ring::run_channel<T, Proto>(tid, nthreads, work);
  }
};

template <typename T>
struct RunWorkColl<
    ncclFuncReduceScatter,
    T,
    FuncFusedpgUpdate<T>,
    NCCL_ALGO_RING,
    NCCL_PROTO_LL> {
  __device__ __forceinline__ void run(
      int tid,
      int nthreads,
      struct ncclDevWorkColl* work) {
    fusedpg_ring::run_channel<T, ProtoLL>(tid, nthreads, work);
  }
};

template <typename T>
struct RunWorkColl<
    ncclFuncReduceScatter,
    T,
    FuncFusedpgUpdate<T>,
    NCCL_ALGO_RING,
    NCCL_PROTO_LL128> {
  __device__ __forceinline__ void run(
      int tid,
      int nthreads,
      struct ncclDevWorkColl* work) {
    fusedpg_ring::run_channel<T, ProtoLL128>(tid, nthreads, work);
  }
};
