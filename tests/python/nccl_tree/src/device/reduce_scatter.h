#include "device.h"
#include "primitives.h"

// The general case, which our operation's is more special than.
template <typename T, typename RedOp>
struct RunWorkColl<ncclFuncReduceScatter, T, RedOp, NCCL_ALGO_RING, NCCL_PROTO_SIMPLE> {
  __device__ void run(int, int, ncclDevWorkColl*) {}
};
