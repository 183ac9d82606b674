// What fusedpg's backend calls in a patched NCCL; it looks the functions up by
// name, so it needs no header of ours.
#pragma once

#include <cuda_runtime.h>

#include "nccl.h"

extern "C" {

// Says what `update` must look like: see kRingAbi in cuda/launch.hpp.
uint64_t ncclFusedpgAbi();

// Rank r's part of the sum over ranks of sendbuff[r * block, (r + 1) * block)
// goes to the same place of recvbuff, is updated there, and goes on to all
// ranks' recvbuff. `update` is a fusedpg::cuda::RingUpdate in device memory,
// which must stay until the operation has ended. count: `block`, the elements of
// a rank's part. how: 0 leaves out the last part, 1 does not; 2 * p + 2 more
// asks for NCCL's protocol p (NCCL_PROTO_LL, ...), and is an invalid usage where
// NCCL has that switched off for this communicator. Types: half, bfloat16 and
// float. Two or more ranks. Both buffers hold nranks parts, and may be the same.
ncclResult_t ncclFusedpgReduceScatterUpdate(
    const void* sendbuff,
    void* recvbuff,
    size_t count,
    ncclDataType_t datatype,
    const void* update,
    int how,
    ncclComm_t comm,
    cudaStream_t stream);

} // extern "C"
