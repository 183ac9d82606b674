#pragma once

#include <atomic>
#include <cstring>
#include <string>

#include "cuda/carrier.hpp"
#include "testing.hpp"

namespace fusedpg::test {

// Moves data by a communicator of the fake NCCL, for threads and processes. Its
// streams are late, and who does not wait for them finds a wrong number.
class FakeCarrier final : public cuda::Carrier {
 public:
  // Collective. For a rank on the device of its number.
  FakeCarrier(
      int rank,
      int size,
      Store& store,
      const std::string& key,
      const std::atomic<bool>* lost)
      : lost_(lost) {
    const cuda::DeviceScope scope(fake_gpu::gpu(), rank);
    fake::NcclUniqueId id;
    if (rank == 0) {
      check("ncclGetUniqueId", fake_gpu::nccl().get_unique_id(&id));
      store.set(key, std::string(id.internal, sizeof id.internal));
    }
    const std::string text = store.get(key, Deadline(kLong));
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    fake::NcclConfig config;
    check(
        "ncclCommInitRankConfig",
        fake_gpu::nccl().comm_init_rank_config(
            &comm_, size, id, rank, &config));
  }
  ~FakeCarrier() override {
    if (!aborted_.exchange(true)) {
      fake_gpu::nccl().comm_destroy(comm_);
    }
  }

  void reduce_scatter(
      const void* from,
      void* to,
      size_t count,
      DType type,
      RedOp op,
      cuda::Stream stream) override {
    check(
        "ncclReduceScatter",
        fake_gpu::nccl().reduce_scatter(
            from,
            to,
            count,
            type == DType::kFloat64     ? cuda::kNcclFloat64
                : type == DType::kInt32 ? cuda::kNcclInt32
                : type == DType::kInt64 ? cuda::kNcclInt64
                                        : cuda::nccl_type(type),
            op == RedOp::kMin       ? fake::kNcclMin
                : op == RedOp::kMax ? fake::kNcclMax
                                    : fake::kNcclSum,
            comm_,
            stream));
  }
  void all_gather(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override {
    check(
        "ncclAllGather",
        fake_gpu::nccl().all_gather(
            from, to, bytes, cuda::kNcclUint8, comm_, stream));
  }
  void all_to_all(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override {
    check(
        "ncclAlltoAll",
        fake_gpu::nccl().all_to_all(
            from, to, bytes, cuda::kNcclUint8, comm_, stream));
  }
  cuda::NcclComm nccl_comm() override {
    return comm_;
  }
  bool lost_nccl_comm() const override {
    return lost_ != nullptr && *lost_;
  }
  void abort() override {
    if (!aborted_.exchange(true)) {
      fake_gpu::nccl().comm_abort(comm_);
    }
  }

 private:
  // NCCL_COMM_BLOCKING=0 makes its calls return at once.
  void check(const char* what, cuda::NcclResult result) const {
    while (result == cuda::kNcclInProgress && !aborted_) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      fake_gpu::nccl().comm_get_async_error(comm_, &result);
    }
    if (aborted_ || result != cuda::kNcclSuccess) {
      fail(
          aborted_ ? ErrorKind::kAborted : ErrorKind::kSystem,
          "fused: {}: {}",
          what,
          fake_gpu::nccl().get_error_string(result));
    }
  }

  const std::atomic<bool>* const lost_;
  std::atomic<bool> aborted_{false};
  cuda::NcclComm comm_ = nullptr;
};

} // namespace fusedpg::test
