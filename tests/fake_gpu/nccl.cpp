// The exported functions of the fake NCCL.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "comm.hpp"
#include "memory.hpp"

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

// What this thread has called since its outermost ncclGroupStart.
thread_local int group_depth = 0;
thread_local std::vector<std::function<NcclResult()>> group_calls;

// Launches now, or at the end of the thread's group.
NcclResult launch(Comm& comm, std::function<NcclResult(Comm&)> call) {
  if (group_depth == 0) {
    return call(comm);
  }
  group_calls.push_back([of = comm.shared_from_this(), call = std::move(call)] {
    return call(*of);
  });
  return kNcclSuccess;
}

NcclResult end_group(const NcclSimInfo* info) {
  if (group_depth == 0) {
    return kNcclInvalidUsage;
  }
  if (--group_depth > 0) {
    return kNcclSuccess;
  }
  const auto held = std::exchange(group_calls, {});
  if (info != nullptr) {
    return info->magic == kSimInfoMagic ? kNcclSuccess : kNcclInvalidArgument;
  }
  NcclResult result = kNcclSuccess;
  for (const auto& one : held) {
    const NcclResult launched = one();
    result = result == kNcclSuccess ? launched : result;
  }
  return result;
}

NcclResult collective(
    const char* function,
    NcclComm handle,
    Collective c,
    void* stream) {
  return with_comm(function, handle, [&](Comm& comm) {
    return launch(comm, [=](Comm& of) { return of.launch(c, stream); });
  });
}

NcclResult faulty(const char* function) {
  return static_cast<NcclResult>(calls().enter(function));
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
  return end_group(nullptr);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclGroupSimulateEnd(NcclSimInfo* info) {
  return end_group(info);
}

FUSEDPG_FAKE_EXPORT const char* ncclGetErrorString(NcclResult result) {
  switch (result) {
    case kNcclSuccess:
      return "no error";
    case kNcclUnhandledCudaError:
      return "unhandled cuda error";
    case kNcclSystemError:
      return "unhandled system error";
    case kNcclInternalError:
      return "internal error";
    case kNcclInvalidArgument:
      return "invalid argument";
    case kNcclInvalidUsage:
      return "invalid usage";
    case kNcclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}

FUSEDPG_FAKE_EXPORT const char* ncclGetLastError(NcclComm /*comm*/) {
  return "";
}

FUSEDPG_FAKE_EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  const NcclResult fault = faulty("ncclGetUniqueId");
  if (fault == kNcclSuccess) {
    try {
      *id = Segment::make_id();
    } catch (const std::exception&) {
      return kNcclSystemError;
    }
  }
  return fault;
}

FUSEDPG_FAKE_EXPORT NcclResult ncclCommInitRankConfig(
    NcclComm* handle,
    int size,
    NcclUniqueId id,
    int rank,
    void* /* config */) {
  *handle = nullptr;
  if (const int fault = calls().enter("ncclCommInitRankConfig", rank)) {
    return static_cast<NcclResult>(fault);
  }
  if (rank < 0 || rank >= size || size > kMaxRanks) {
    return kNcclInvalidArgument;
  }
  const auto comm = std::make_shared<Comm>(id, rank, size);
  const NcclResult result = comm->meet();
  *handle = result == kNcclSuccess ? comms().add(comm) : nullptr;
  return result;
}

// Communicators block.
FUSEDPG_FAKE_EXPORT NcclResult
ncclCommGetAsyncError(NcclComm /* handle */, NcclResult* error) {
  *error = kNcclSuccess;
  return kNcclSuccess;
}

FUSEDPG_FAKE_EXPORT NcclResult ncclCommDestroy(NcclComm handle) {
  return with_comm("ncclCommDestroy", handle, [&](Comm& comm) {
    const auto ended = comms().remove(handle);
    comm.destroy();
    return kNcclSuccess;
  });
}

FUSEDPG_FAKE_EXPORT NcclResult ncclCommAbort(NcclComm handle) {
  return with_comm("ncclCommAbort", handle, [&](Comm& comm) {
    const auto ended = comms().remove(handle);
    comm.abort();
    return kNcclSuccess;
  });
}

FUSEDPG_FAKE_EXPORT NcclResult ncclAllReduce(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    NcclRedOp op,
    NcclComm comm,
    NcclStream stream) {
  return collective(
      "ncclAllReduce", comm, {kAllReduce, src, dst, count, type, op}, stream);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclReduceScatter(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    NcclRedOp op,
    NcclComm comm,
    NcclStream stream) {
  return collective(
      "ncclReduceScatter",
      comm,
      {kReduceScatter, src, dst, count, type, op},
      stream);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclAllGather(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    NcclComm comm,
    NcclStream stream) {
  return collective(
      "ncclAllGather",
      comm,
      {kAllGather, src, dst, count, type, kNcclSum},
      stream);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclAlltoAll(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    NcclComm comm,
    NcclStream stream) {
  return collective(
      "ncclAlltoAll",
      comm,
      {kAllToAll, src, dst, count, type, kNcclSum},
      stream);
}

FUSEDPG_FAKE_EXPORT NcclResult ncclBroadcast(
    const void* src,
    void* dst,
    size_t count,
    NcclDataType type,
    int root,
    NcclComm comm,
    NcclStream stream) {
  return collective(
      "ncclBroadcast",
      comm,
      {kBroadcast, src, dst, count, type, static_cast<NcclRedOp>(root)},
      stream);
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
    size_t skip_bytes,
    int how,
    NcclComm handle,
    NcclStream stream) {
  return with_comm("ncclFusedpgReduceScatterUpdate", handle, [&](Comm& comm) {
    if (skip_bytes != 0) {
      return kNcclInvalidArgument; // the engine does not use it
    }
    // FUSEDPG_FAKE_PROTOCOLS: of those that NCCL has, as bits.
    const int64_t protocols = from_environment("FUSEDPG_FAKE_PROTOCOLS", 7);
    const int protocol = how / 2 - 1;
    if (protocol >= 0 && (protocols >> protocol) % 2 == 0) {
      return kNcclInvalidUsage;
    }
    return launch(comm, [=](Comm& of) {
      return of.launch_ring(
          {kReduceScatter, src, dst, count, type, kNcclSum},
          static_cast<const RingUpdate*>(update),
          how,
          stream);
    });
  });
}

} // namespace fusedpg::fake
