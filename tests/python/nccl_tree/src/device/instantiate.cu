// What generate.py would make of the operation.
#include "reduce_scatter.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T, int protocol>
__global__ void ring_kernel(ncclShmemData shared, ncclDevWorkColl* work) {
  if (threadIdx.x == 0) {
    ncclShmem = shared;
  }
  __syncthreads();
  RunWorkColl<ncclFuncReduceScatter, T, FuncFusedpgUpdate<T>, NCCL_ALGO_RING, protocol>().run(
      threadIdx.x, blockDim.x, work);
}

#define RING_KERNEL(T, protocol) \
  template __global__ void ring_kernel<T, protocol>(ncclShmemData, ncclDevWorkColl*);
#define RING_KERNELS(T)             \
  RING_KERNEL(T, NCCL_PROTO_SIMPLE) \
  RING_KERNEL(T, NCCL_PROTO_LL)     \
  RING_KERNEL(T, NCCL_PROTO_LL128)
RING_KERNELS(float)
RING_KERNELS(half)
RING_KERNELS(__nv_bfloat16)
