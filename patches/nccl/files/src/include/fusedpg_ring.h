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

// A piece of one rank's block that travels at once.
struct Part {
  size_t offset; // in the block, in elements
  int count;
};

// Everything: a channel has elements [begin, begin + count) of every block.
struct Dense {
  size_t begin;
  size_t count;
  size_t chunk;

  FUSEDPG_RING size_t chunks() const {
    return (count + chunk - 1) / chunk;
  }
  FUSEDPG_RING Part at(int /* rank */, size_t index) const {
    const size_t done = index * chunk;
    const size_t left = count - done;
    return {begin + done, static_cast<int>(left < chunk ? left : chunk)};
  }
};

// Only the skip-blocks that are listed: those of rank r's block on the wire
// are present[first[r]] ... [first[r + 1] - 1]. NCCL counts the chunks of a
// channel as if the listed blocks lay one behind the other; the k-th chunk of
// the communicator is then the k-th chunk of that row. A chunk divides a block.
struct Listed {
  const uint32_t* present;
  const uint32_t* first;
  size_t skip_block; // elements
  size_t block; // elements of a rank's block on the wire
  size_t chunk;
  size_t first_chunk; // of this channel
  size_t num_chunks;

  FUSEDPG_RING size_t chunks() const {
    return num_chunks;
  }
  // No elements where a rank has fewer blocks than another; the ring still
  // takes that step.
  FUSEDPG_RING Part at(int rank, size_t index) const {
    const size_t position = (first_chunk + index) * chunk;
    const size_t entry = first[rank] + position / skip_block;
    if (entry >= first[rank + 1]) {
      return {0, 0};
    }
    const size_t offset =
        size_t(present[entry]) * skip_block + position % skip_block;
    const size_t left = offset < block ? block - offset : 0;
    return {offset, static_cast<int>(left < chunk ? left : chunk)};
  }
};

// Runs one channel. `ranks[k]` is the k-th rank behind this one on the ring,
// `stride` the distance of the ranks' blocks in the buffers. Element i of the
// block of rank r is summed in the order of the ring, beginning behind r and
// ending at r. update(offset, count) gets this rank's parts as soon as the
// output has their sums; with kGather what it leaves there goes to all ranks.
template <bool kGather, typename Prims, typename Layout, typename Update>
FUSEDPG_RING void run(
    Prims& prims,
    const int* ranks,
    int size,
    size_t stride,
    const Layout& layout,
    Update&& update) {
  const size_t chunks = layout.chunks();
  for (size_t i = 0; i < chunks; ++i) {
    Part part = layout.at(ranks[size - 1], i);
    prims.send(ranks[size - 1] * stride + part.offset, part.count);
    for (int k = 2; k < size; ++k) {
      part = layout.at(ranks[size - k], i);
      prims.recvReduceSend(ranks[size - k] * stride + part.offset, part.count);
    }
    const Part mine = layout.at(ranks[0], i);
    const size_t here = ranks[0] * stride + mine.offset;
    prims.recvReduceCopy(here, here, mine.count);
    if (mine.count > 0) {
      update(mine.offset, mine.count);
    }
    if constexpr (kGather) {
      prims.sendFromOutput(here, mine.count);
      for (int k = 1; k < size - 1; ++k) {
        part = layout.at(ranks[size - k], i);
        prims.recvCopySend(ranks[size - k] * stride + part.offset, part.count);
      }
      part = layout.at(ranks[1], i);
      prims.recv(ranks[1] * stride + part.offset, part.count);
    }
  }
}

} // namespace fusedpg_ring
