#pragma once

#include <ctime>

#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {

// Whether the host said to stop before this block began; for the whole block. It
// unmaps windows then, so nothing of them may be used. Once begun, a kernel that
// does not wait for its peers is quicker than the host, which waits for it.
__device__ __forceinline__ bool told_to_stop(const uint64_t* stop) {
  return __syncthreads_and(threadIdx.x != 0 || ask_host(stop) == 0) == 0;
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

// A barrier of the thread blocks of one number on all ranks. NCCL has one, but
// that waits for a dead peer for ever; this one ends in time, or when the host
// says so.
class PeerBarrier {
 public:
  // Thread t speaks with rank t: `to` are that rank's signals, `mine` this
  // rank's, both of this block. At least `size` threads.
  __device__ PeerBarrier(
      const DirectSignals* to,
      DirectSignals* mine,
      int rank,
      int size,
      const DirectArgs& args)
      : to_(const_cast<uint64_t*>(to->passed + rank)),
        mine_(mine),
        args_(args),
        until_(now_in_nanoseconds() + args.nanoseconds),
        size_(size),
        epoch_(mine->epoch) {}

  // What a thread of this block wrote before is seen by all ranks' blocks
  // behind it. False, for the whole block, if the host said to stop, or if the
  // time is up.
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
        if (looks % 256 != 0) {
          look_again();
          continue;
        }
        const bool late = now_in_nanoseconds() > until_;
        // A later kernel may be late as the consequence of an earlier one.
        if (late && ask_host(args_.late) == 0) {
          tell_host(args_.late, args_.sequence);
        }
        if (late || ask_host(args_.stop) != 0) {
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
  const DirectArgs& args_;
  uint64_t until_;
  int size_;
  uint64_t epoch_;
};

} // namespace fusedpg::cuda
