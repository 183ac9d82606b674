// The exported functions of the fake NCCL: those that the engine loads, and a
// communicator for what stands for torch's ProcessGroupNCCL in tests.

#include <iterator>
#include <memory>

#include "calls.hpp"
#include "comm.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: NCCL's names

namespace {

constexpr unsigned kSimInfoMagic = 0x74685283;

// Counts the call, makes its fault, finds the communicator and calls `body`.
template <typename Body>
NcclResult with_comm(const char* function, NcclComm handle, Body&& body) {
  const std::shared_ptr<Comm> comm = comms().find(handle);
  const int fault = calls().enter(function, comm ? comm->rank : -1);
  if (fault == kHang && comm != nullptr) {
    comm->wait_aborted();
    return kNcclInternalError;
  }
  if (fault != 0) {
    return static_cast<NcclResult>(fault);
  }
  return comm == nullptr ? kNcclInvalidArgument : body(*comm);
}

// The thread's ncclGroupStart. What NCCL holds back until the outermost end is
// launched at once here: the engine calls nothing inside of a group.
thread_local int group_depth = 0;

DType ring_type(NcclDataType type) {
  return type == kNcclFloat16 ? DType::kFloat16
      : type == kNcclBfloat16 ? DType::kBFloat16
                              : DType::kFloat32;
}

} // namespace

FUSEDPG_FAKE_EXPORT NcclResult ncclGetVersion(int* version) {
  *version = nccl_version();
  return kNcclSuccess;
}

FUSEDPG_FAKE_EXPORT NcclResult ncclGroupStart() {
  ++group_depth;
  return kNcclSuccess;
}

FUSEDPG_FAKE_EXPORT NcclResult ncclGroupEnd() {
  return group_depth == 0 ? kNcclInvalidUsage : (--group_depth, kNcclSuccess);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclGroupSimulateEnd(NcclSimInfo* info) {
  const NcclResult ended = ncclGroupEnd();
  const bool outermost = ended == kNcclSuccess && group_depth == 0;
  return outermost && info->magic != kSimInfoMagic ? kNcclInvalidArgument
                                                   : ended;
}

FUSEDPG_FAKE_EXPORT const char* ncclGetErrorString(NcclResult result) {
  static constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error",
      "unhandled system error",
      "internal error",
      "invalid argument",
      "invalid usage",
      "remote process exited or there was a network error"};
  const auto number = static_cast<size_t>(result);
  return number < std::size(kTexts) ? kTexts[number] : "unknown result code";
}

FUSEDPG_FAKE_EXPORT const char* ncclGetLastError(NcclComm /*comm*/) {
  return "";
}

// Communicators block.
FUSEDPG_FAKE_EXPORT NcclResult
ncclCommGetAsyncError(NcclComm /* handle */, NcclResult* error) {
  *error = kNcclSuccess;
  return kNcclSuccess;
}

FUSEDPG_FAKE_EXPORT uint64_t ncclFusedpgAbi() {
  return from_environment("FUSEDPG_FAKE_PATCHED", 0) != 0 ? kRingAbi : 0;
}

FUSEDPG_FAKE_EXPORT NcclResult ncclFusedpgReduceScatterUpdate(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    const void* update,
    int how,
    NcclComm handle,
    NcclStream stream) {
  return with_comm("ncclFusedpgReduceScatterUpdate", handle, [&](Comm& comm) {
    // FUSEDPG_FAKE_PROTOCOLS: of those that NCCL has, as bits.
    const int64_t protocols = from_environment("FUSEDPG_FAKE_PROTOCOLS", 7);
    const int protocol = how / 2 - 1;
    if (protocol >= 0 && (protocols >> protocol) % 2 == 0) {
      return kNcclInvalidUsage;
    }
    return comm.launch_ring(
        {kReduceScatter, src, dst, count, ring_type(type)},
        static_cast<const RingUpdate*>(update),
        how,
        stream);
  });
}

// --- communicators -------------------------------------------------------------

FUSEDPG_FAKE_EXPORT NcclResult fusedpg_fake_make_id(CommId* id) {
  const int fault = calls().enter("ncclGetUniqueId");
  if (fault == 0) {
    *id = make_comm_id();
  }
  return static_cast<NcclResult>(fault);
}

FUSEDPG_FAKE_EXPORT NcclResult
fusedpg_fake_connect(NcclComm* handle, const CommId* id, int rank, int size) {
  *handle = nullptr;
  if (const int fault = calls().enter("ncclCommInitRankConfig", rank)) {
    return static_cast<NcclResult>(fault);
  }
  if (rank < 0 || rank >= size || size > kMaxRanks) {
    return kNcclInvalidArgument;
  }
  const auto comm = std::make_shared<Comm>(*id, rank, size);
  const NcclResult result = comm->meet();
  *handle = result == kNcclSuccess ? comms().add(comm) : nullptr;
  return result;
}

FUSEDPG_FAKE_EXPORT NcclResult
fusedpg_fake_disconnect(NcclComm handle, bool aborts) {
  const char* name = aborts ? "ncclCommAbort" : "ncclCommDestroy";
  return with_comm(name, handle, [&](Comm& comm) {
    comms().remove(handle);
    aborts ? comm.abort() : comm.destroy();
    return kNcclSuccess;
  });
}

FUSEDPG_FAKE_EXPORT NcclResult fusedpg_fake_collective(
    NcclComm handle,
    const Collective* collective,
    NcclStream stream) {
  return with_comm(nccl_name(collective->op), handle, [&](Comm& comm) {
    return comm.launch(*collective, stream);
  });
}

} // namespace fusedpg::fake
