#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fusedpg::cuda {

// The part of NCCL's C ABI that we use (nccl.h of 2.28 and later), so that
// neither its header is needed to build nor its library to load the module.
using NcclComm = void*;
using NcclWindow = void*;
using NcclStream = void*;

struct NcclUniqueId {
  char internal[128];
};

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
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclUint32 = 3,
  kNcclInt64 = 4,
  kNcclUint64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9,
};

enum NcclRedOp : int {
  kNcclSum = 0,
  kNcclProd = 1,
  kNcclMax = 2,
  kNcclMin = 3,
  kNcclAvg = 4,
};

// ncclConfig_t as of 2.18: newer libraries take older, shorter structures.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = 1;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  static constexpr int kUndefined = INT32_MIN;
};

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

  NcclResult (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(NcclResult result) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;
  NcclResult (*get_unique_id)(NcclUniqueId* id) = nullptr;
  NcclResult (*comm_init_rank_config)(
      NcclComm* comm,
      int size,
      NcclUniqueId id,
      int rank,
      NcclConfig* config) = nullptr;
  NcclResult (*comm_get_async_error)(NcclComm comm, NcclResult* error) =
      nullptr;
  NcclResult (*comm_finalize)(NcclComm comm) = nullptr;
  NcclResult (*comm_destroy)(NcclComm comm) = nullptr;
  NcclResult (*comm_abort)(NcclComm comm) = nullptr;
  NcclResult (*all_reduce)(
      const void* src,
      void* dst,
      size_t count,
      NcclDataType type,
      NcclRedOp op,
      NcclComm comm,
      NcclStream stream) = nullptr;
  NcclResult (*reduce_scatter)(
      const void* src,
      void* dst,
      size_t count, // of a rank's result
      NcclDataType type,
      NcclRedOp op,
      NcclComm comm,
      NcclStream stream) = nullptr;
  NcclResult (*all_gather)(
      const void* src,
      void* dst,
      size_t count, // of a rank's part
      NcclDataType type,
      NcclComm comm,
      NcclStream stream) = nullptr;
  NcclResult (*all_to_all)(
      const void* src,
      void* dst, // another place
      size_t count, // from each rank to each
      NcclDataType type,
      NcclComm comm,
      NcclStream stream) = nullptr;

  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_simulate_end)(NcclSimInfo* info) = nullptr;
  NcclResult (*mem_alloc)(void** memory, size_t bytes) = nullptr;
  NcclResult (*mem_free)(void* memory) = nullptr;
  // Symmetric windows.
  NcclResult (*comm_window_register)(
      NcclComm comm,
      void* memory,
      size_t bytes,
      NcclWindow* window,
      int flags) = nullptr;
  NcclResult (*comm_window_deregister)(NcclComm comm, NcclWindow window) =
      nullptr;
  // The device API, called by libfusedpg_cuda.so.
  void* dev_comm_create = nullptr;
  void* dev_comm_destroy = nullptr;
  void* team_lsa = nullptr;

  // Of a patched NCCL (patches/nccl/files/src/include/fusedpg_api.h).
  uint64_t (*ring_abi)() = nullptr;
  NcclResult (*reduce_scatter_update)(
      const void* src,
      void* dst,
      size_t count, // of a rank's part
      NcclDataType type,
      const void* update, // RingUpdate in device memory
      size_t skip_bytes,
      int how, // kRingGathers, ring_by(protocol)
      NcclComm comm,
      NcclStream stream) = nullptr;

  // Whether the calling thread is inside a group: NCCL then holds back every
  // collective until the thread's outermost ncclGroupEnd().
  bool in_group() const;
  // Whether it is patched, for this version of the backend.
  bool has_ring() const;
};

constexpr int kNcclWindowSymmetric = 0x01; // NCCL_WIN_COLL_SYMMETRIC

// The libnccl at `path`, or if that is empty the one this process has loaded
// (torch's), or the system's. Loaded and probed once a path. Throws
// Error(kSystem) with what to do.
const NcclApi& load_nccl_api(const std::string& path);

} // namespace fusedpg::cuda
