#pragma once

#include <cstddef>
#include <cstdint>

enum ncclFunc_t { ncclFuncReduceScatter };
enum { NCCL_ALGO_RING = 1 };
enum { NCCL_PROTO_LL, NCCL_PROTO_LL128, NCCL_PROTO_SIMPLE };
#define MAXCHANNELS 64
enum { REDUCESCATTER_SLICESTEPS = 2, REDUCESCATTER_CHUNKSTEPS = 4 };

enum ncclDevRedOp_t { ncclDevSum, ncclDevSumPostDiv, ncclNumDevRedOps };

struct ncclRing {
  int prev, next;
  int* userRanks;
};

struct ncclDevWorkColl {
  uint32_t channelLo, channelHi;
  void* sendbuff;
  void* recvbuff;
  uint64_t redOpArg;
};

template <typename Int>
__host__ __device__ void ncclCollCbdPart(
    ncclDevWorkColl* work,
    uint32_t channel,
    int protocol,
    int size,
    Int* count,
    Int* begin,
    Int* part,
    Int* chunk) {
  const Int each = Int(1) << 20;
  *count = each * (work->channelHi - work->channelLo + 1);
  *begin = each * (channel - work->channelLo);
  *part = each;
  *chunk = Int(protocol == NCCL_PROTO_SIMPLE ? 1 << 17 : 1 << 13) / size;
}
