#pragma once

#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {

// Whether the host said to stop before this block began; for the whole block. It
// unmaps windows then, so nothing of them may be used. Once begun, a kernel that
// does not wait for its peers is quicker than the host, which waits for it.
__device__ __forceinline__ bool told_to_stop(const uint64_t* stop) {
  return __syncthreads_and(threadIdx.x != 0 || ask_host(stop) == 0) == 0;
}

// A barrier of the thread blocks of one number on all ranks. NCCL has one, but
// that waits for a dead peer for ever; the host can end this one.
class PeerBarrier {
 public:
  // Thread t speaks with rank t: `to` are that rank's signals, `mine` this
  // rank's, both of this block. At least `size` threads.
  __device__ PeerBarrier(
      const DirectSignals* to,
      DirectSignals* mine,
      int rank,
      int size,
      const uint64_t* stop)
      : to_(const_cast<uint64_t*>(to->passed + rank)),
        mine_(mine),
        stop_(stop),
        size_(size),
        epoch_(mine->epoch) {}

  // What a thread of this block wrote before is seen by all ranks' blocks
  // behind it. False, for the whole block, if the host said to stop.
  __device__ bool sync() {
    ++epoch_;
    bool met = true;
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < size_) {
      store_release(to_, epoch_);
      // The word for stopping is the host's memory: slow to read.
      for (uint32_t looks = 1; load_acquire(mine_->passed + peer) < epoch_;
           ++looks) {
        if (looks % 256 == 0 && ask_host(stop_) != 0) {
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
  uint64_t* to_;
  DirectSignals* mine_;
  const uint64_t* stop_;
  int size_;
  uint64_t epoch_;
};

} // namespace fusedpg::cuda
