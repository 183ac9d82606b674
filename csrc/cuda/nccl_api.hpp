#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.hpp"

namespace fusedpg::cuda {

// The part of NCCL's C ABI that we use (nccl.h of 2.28 and later), so that
// neither its header is needed to build nor its library to load the module.
using NcclComm = void*;
using NcclStream = void*;

enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};

enum NcclDataType : int {
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

// Of what a ring takes.
inline NcclDataType nccl_type(DType type) {
  return type == DType::kFloat16 ? kNcclFloat16
      : type == DType::kBFloat16 ? kNcclBfloat16
                                 : kNcclFloat32;
}

// ncclSimInfo_t.
struct NcclSimInfo {
  size_t size = sizeof(NcclSimInfo);
  unsigned int magic = 0; // not NCCL's
  unsigned int version = 0;
  float estimated_time = 0;
};

// The symbols of one libnccl, and what it can do.
struct NcclApi {
  std::string path;
  int version = 0; // 22809 is 2.28.9
  // Whether communicators of this process's torch are its own: torch has loaded
  // it, or none.
  bool is_torchs = false;

  NcclResult (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(NcclResult result) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;
  NcclResult (*comm_get_async_error)(NcclComm comm, NcclResult* error) =
      nullptr;

  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_simulate_end)(NcclSimInfo* info) = nullptr;
  // Of a patched NCCL (patches/nccl/files/src/include/fusedpg_api.h).
  uint64_t (*ring_abi)() = nullptr;
  NcclResult (*reduce_scatter_update)(
      const void* src,
      void* dst,
      size_t count, // of a rank's part
      NcclDataType type,
      const void* update, // RingUpdate in device memory
      int how, // kRingGathers, ring_by(protocol)
      NcclComm comm,
      NcclStream stream) = nullptr;

  // Whether the calling thread is inside a group: NCCL then holds back every
  // collective until the thread's outermost ncclGroupEnd().
  bool in_group() const;
  // Whether it is patched, for this version of the backend.
  bool has_ring() const;
};

// The libnccl at `path`, or if that is empty the one this process has loaded
// (torch's), or the system's. Loaded and probed once a path. Throws
// Error(kSystem) with what to do.
const NcclApi& load_nccl_api(const std::string& path);

} // namespace fusedpg::cuda
