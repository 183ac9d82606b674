#include "fusedpg_api.h"

#include "argcheck.h"
#include "collectives.h"
#include "comm.h"
#include "enqueue.h"
#include "fusedpg/cuda/launch.hpp"
#include "info.h"

#define FUSEDPG_API extern "C" __attribute__((visibility("default")))

FUSEDPG_API uint64_t ncclFusedpgAbi() {
  return fusedpg::cuda::kRingAbi;
}

FUSEDPG_API ncclResult_t ncclFusedpgReduceScatterUpdate(
    const void* sendbuff,
    void* recvbuff,
    size_t count,
    ncclDataType_t datatype,
    const void* update,
    int how,
    ncclComm_t comm,
    cudaStream_t stream) {
  NCCLCHECK(CommCheck(comm, "ncclFusedpgReduceScatterUpdate", "comm"));
  NCCLCHECK(PtrCheck(
      const_cast<void*>(update), "ncclFusedpgReduceScatterUpdate", "update"));
  NCCLCHECK(ncclCommEnsureReady(comm));
  if (comm->nRanks < 2 || how < 0 || how > 2 * NCCL_NUM_PROTOCOLS + 1 ||
      (datatype != ncclFloat && datatype != ncclHalf &&
       datatype != ncclBfloat16)) {
    WARN("ncclFusedpgReduceScatterUpdate: invalid arguments");
    return ncclInvalidArgument;
  }
  const int protocol = how / 2 - 1;
  if (protocol >= 0 &&
      comm->bandwidths[ncclFuncReduceScatter][NCCL_ALGO_RING][protocol] == 0) {
    return ncclInvalidUsage; // it never chooses that
  }
  // An operation of the user's, as for a premultiplied sum, whose scalar is
  // where the update lies. Nothing else of NCCL's reads proxyOp.
  uint64_t zero = 0;
  ncclRedOp_t op;
  NCCLCHECK(ncclRedOpCreatePreMulSum(
      &op, &zero, datatype, ncclScalarHostImmediate, comm));
  ncclUserRedOp* user =
      &comm->userRedOps[int(ncclUserRedOpMangle(comm, op)) - int(ncclNumOps)];
  user->opFull.op = ncclDevFusedpgUpdate;
  user->opFull.scalarArgIsPtr = false;
  user->opFull.scalarArg = reinterpret_cast<uint64_t>(update);
  user->opFull.proxyOp = ncclRedOp_t(how);
  struct ncclInfo info = {
      ncclFuncReduceScatter,
      "FusedpgReduceScatterUpdate",
      sendbuff,
      recvbuff,
      count,
      datatype,
      op,
      0,
      comm,
      stream,
      REDUCESCATTER_CHUNKSTEPS,
      REDUCESCATTER_SLICESTEPS};
  const ncclResult_t result = ncclEnqueueCheck(&info);
  NCCLCHECK(ncclRedOpDestroy(op, comm));
  return result;
}
