#pragma once

#include "common.h"

template <typename T>
struct FuncSum {};
template <int n>
struct FanSymmetric {};
template <int slicesPerChunk, int stepsPerSlice>
struct ProtoSimple {
  static constexpr int Id = NCCL_PROTO_SIMPLE;
};
struct ProtoLL {
  static constexpr int Id = NCCL_PROTO_LL;
};
struct ProtoLL128 {
  static constexpr int Id = NCCL_PROTO_LL128;
};

// Goes through memory in some way, so that nothing is optimised away.
template <typename T, typename RedOp, typename Fan, int direct, typename Proto, int p2p>
class Primitives {
 public:
  __device__ Primitives(
      int thread,
      int threads,
      int const*,
      int const*,
      void const* input,
      void* output,
      uint64_t)
      : thread_(thread),
        threads_(threads),
        input_(static_cast<const T*>(input)),
        output_(static_cast<T*>(output)) {}
  __device__ void send(intptr_t at, int n) {
    copy(input_ + at, output_, n);
  }
  __device__ void sendFromOutput(intptr_t at, int n) {
    copy(output_ + at, output_, n);
  }
  __device__ void recv(intptr_t at, int n, bool = false) {
    copy(input_, output_ + at, n);
  }
  __device__ void recvReduceSend(intptr_t at, int n, bool = false) {
    copy(input_ + at, output_, n);
  }
  __device__ void recvReduceCopy(intptr_t from, intptr_t to, int n, bool = false) {
    copy(input_ + from, output_ + to, n);
  }
  __device__ void recvCopySend(intptr_t at, int n, bool = false) {
    copy(input_, output_ + at, n);
  }

 private:
  __device__ void copy(const T* from, T* to, int n) {
    for (int i = thread_; i < n; i += threads_) {
      to[i] = from[i];
    }
    barrier_sync(15, threads_);
  }
  int thread_;
  int threads_;
  const T* input_;
  T* output_;
};
