// fusedpg's ring: reduce-scatter, an update of this rank's part, all-gather.
// Nothing here depends on NCCL or on a GPU: the tests run it on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDPG_RING __host__ __device__ __forceinline__
#else
#define FUSEDPG_RING inline
#endif

namespace fusedpg_ring {

// A piece of a rank's block that travels at once.
struct Part {
  size_t offset; // in the block, in elements
  int count;
};

// A channel has elements [begin, begin + count) of every rank's block.
struct Channel {
  size_t begin;
  size_t count;
  size_t chunk;

  FUSEDPG_RING size_t chunks() const {
    return (count + chunk - 1) / chunk;
  }
  FUSEDPG_RING Part at(size_t index) const {
    const size_t done = index * chunk;
    const size_t left = count - done;
    return {begin + done, static_cast<int>(left < chunk ? left : chunk)};
  }
};

// Runs one channel. `ranks[k]` is the k-th rank behind this one on the ring,
// `stride` the distance of the ranks' blocks in the buffers. Element i of the
// block of rank r is summed in the order of the ring, beginning behind r and
// ending at r. update(offset, count) gets this rank's parts as soon as the
// output has their sums; with kGather what it leaves there goes to all ranks.
template <bool kGather, typename Prims, typename Update>
FUSEDPG_RING void run(
    Prims& prims,
    const int* ranks,
    int size,
    size_t stride,
    const Channel& channel,
    Update&& update) {
  const size_t chunks = channel.chunks();
  for (size_t i = 0; i < chunks; ++i) {
    const Part part = channel.at(i);
    prims.send(ranks[size - 1] * stride + part.offset, part.count);
    for (int k = 2; k < size; ++k) {
      prims.recvReduceSend(ranks[size - k] * stride + part.offset, part.count);
    }
    const size_t here = ranks[0] * stride + part.offset;
    prims.recvReduceCopy(here, here, part.count);
    update(part.offset, part.count);
    if constexpr (kGather) {
      prims.sendFromOutput(here, part.count);
      for (int k = 1; k < size - 1; ++k) {
        prims.recvCopySend(ranks[size - k] * stride + part.offset, part.count);
      }
      prims.recv(ranks[1] * stride + part.offset, part.count);
    }
  }
}

} // namespace fusedpg_ring
