#pragma once

#include "device.h"

struct ncclShmemData {
  int channelId;
  struct {
    int nRanks;
  } comm;
  struct {
    ncclRing ring;
  } channel;
};
__shared__ ncclShmemData ncclShmem;

template <ncclFunc_t function, typename T, typename RedOp, int algorithm, int protocol>
struct RunWorkColl {
  __device__ void run(int, int, ncclDevWorkColl*) {}
};

__device__ inline void barrier_sync(int name, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
