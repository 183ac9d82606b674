#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "hooks.hpp"

// The part of the fake NCCL that the engine does not call: torch's
// ProcessGroupNCCL does, and what stands for it in tests.
namespace fusedpg::fake {

struct NcclUniqueId {
  char internal[128];
};

enum NcclRedOp : int {
  kNcclSum = 0,
  kNcclMax = 2,
  kNcclMin = 3,
  kNcclAvg = 4,
};

struct NcclFunctions : cuda::NcclApi {
  NcclFunctions(const cuda::NcclApi& api, const Hooks& from) : NcclApi(api) {
    from.find("ncclGetUniqueId", get_unique_id);
    from.find("ncclCommInitRankConfig", comm_init_rank_config);
    from.find("ncclCommDestroy", comm_destroy);
    from.find("ncclCommAbort", comm_abort);
    from.find("ncclAllReduce", all_reduce);
    from.find("ncclReduceScatter", reduce_scatter);
    from.find("ncclAllGather", all_gather);
    from.find("ncclAlltoAll", all_to_all);
    from.find("ncclBroadcast", broadcast);
  }

  void check(const char* what, cuda::NcclResult result) const {
    if (result != cuda::kNcclSuccess) {
      throw std::runtime_error(
          std::string(what) + ": NCCL error: " + get_error_string(result));
    }
  }

  cuda::NcclResult (*get_unique_id)(NcclUniqueId* id) = nullptr;
  cuda::NcclResult (*comm_init_rank_config)(
      cuda::NcclComm* comm,
      int size,
      NcclUniqueId id,
      int rank,
      void* config) = nullptr;
  cuda::NcclResult (*comm_destroy)(cuda::NcclComm comm) = nullptr;
  cuda::NcclResult (*comm_abort)(cuda::NcclComm comm) = nullptr;
  cuda::NcclResult (*all_reduce)(
      const void* src,
      void* dst,
      size_t count,
      cuda::NcclDataType type,
      NcclRedOp op,
      cuda::NcclComm comm,
      cuda::NcclStream stream) = nullptr;
  cuda::NcclResult (*reduce_scatter)(
      const void* src,
      void* dst,
      size_t count, // of a rank's result
      cuda::NcclDataType type,
      NcclRedOp op,
      cuda::NcclComm comm,
      cuda::NcclStream stream) = nullptr;
  cuda::NcclResult (*all_gather)(
      const void* src,
      void* dst,
      size_t count, // of a rank's part
      cuda::NcclDataType type,
      cuda::NcclComm comm,
      cuda::NcclStream stream) = nullptr;
  cuda::NcclResult (*all_to_all)(
      const void* src,
      void* dst, // another place
      size_t count, // from each rank to each
      cuda::NcclDataType type,
      cuda::NcclComm comm,
      cuda::NcclStream stream) = nullptr;
  cuda::NcclResult (*broadcast)(
      const void* src,
      void* dst,
      size_t count,
      cuda::NcclDataType type,
      int root,
      cuda::NcclComm comm,
      cuda::NcclStream stream) = nullptr;
};

} // namespace fusedpg::fake
