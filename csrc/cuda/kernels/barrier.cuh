#pragma once

#include <ctime>

#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {

__device__ __forceinline__ DirectRoom* room_of(
    const PeerAccess& peers,
    int rank) {
  return reinterpret_cast<DirectRoom*>(peers.arenas[rank] + peers.room);
}

// Whether to stop, as of when this block began; for the whole block.
__device__ __forceinline__ bool told_to_stop(const PeerAccess& peers) {
  return __syncthreads_and(
             threadIdx.x != 0 || !stopped(peers.stop, peers.late)) == 0;
}

__device__ __forceinline__ uint64_t now_in_nanoseconds() {
#if defined(__CUDA_ARCH__)
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 +
      static_cast<uint64_t>(now.tv_nsec);
#endif
}

// A barrier of the thread blocks of one number on all ranks. It ends in time
// where a peer has died, or when the host says so.
class PeerBarrier {
 public:
  // Thread t speaks with rank t: at least as many threads as ranks.
  __device__ explicit PeerBarrier(const PeerAccess& peers)
      : peers_(peers),
        mine_(room_of(peers, peers.rank)->signals + blockIdx.x),
        until_(now_in_nanoseconds() + peers.nanoseconds),
        epoch_(mine_->epoch) {}

  // What a thread of this block wrote before is seen by all ranks' blocks
  // behind it. False, for the whole block, if the host said to stop, or if the
  // time is up.
  __device__ bool sync() {
    ++epoch_;
    bool met = true;
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < peers_.size) {
      DirectSignals* theirs = room_of(peers_, peer)->signals + blockIdx.x;
      store_release(theirs->passed + peers_.rank, epoch_);
      // The word for stopping is the host's memory: slow to read.
      for (uint32_t looks = 1; load_acquire(mine_->passed + peer) < epoch_;
           ++looks) {
        if (looks % 256 != 0) {
          look_again();
          continue;
        }
        const bool late = now_in_nanoseconds() > until_;
        // A later kernel may be late as the consequence of an earlier one.
        if (late && ask_host(peers_.late) == 0) {
          tell_host(peers_.late, peers_.sequence);
        }
        if (late || ask_host(peers_.stop) != 0) {
          met = false;
          break;
        }
        look_again();
      }
    }
    return __syncthreads_and(met) != 0;
  }

  // For the next kernel.
  __device__ void leave() {
    if (threadIdx.x == 0) {
      mine_->epoch = epoch_;
    }
  }

 private:
  const PeerAccess& peers_;
  DirectSignals* mine_;
  uint64_t until_;
  uint64_t epoch_;
};

} // namespace fusedpg::cuda
