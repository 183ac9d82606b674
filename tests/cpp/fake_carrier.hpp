#pragma once

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/carrier.hpp"
#include "testing.hpp"

namespace fusedpg::test {

// What ranks on threads of this process share.
class SharedBlocks {
 public:
  using Block = std::shared_ptr<char>;
  static Block make(size_t bytes) {
    const Block made(
        static_cast<char*>(
            std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)),
        [](char* data) {
          --alive;
          std::free(data);
        });
    std::memset(made.get(), 0xff, bytes); // NaN, and no word of a signal
    ++alive;
    return made;
  }
  // All ranks' blocks, in their order, as soon as all are there.
  static std::vector<Block> meet(
      Store& store,
      const std::string& key,
      int rank,
      int size,
      const Block& mine) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      by_address[reinterpret_cast<uintptr_t>(mine.get())] = mine;
    }
    const auto of = [&](int r) { return key + std::to_string(r); };
    store.set(
        of(rank), std::to_string(reinterpret_cast<uintptr_t>(mine.get())));
    std::vector<Block> all;
    for (int r = 0; r < size; ++r) {
      const auto address = std::stoull(store.get(of(r), Deadline(kLong)));
      const std::lock_guard<std::mutex> lock(mutex);
      all.push_back(by_address.at(address).lock());
    }
    store.meet(key + "met", size);
    return all;
  }
  static inline std::atomic<int> alive{0};

 private:
  static inline std::mutex mutex;
  static inline std::map<uintptr_t, std::weak_ptr<char>> by_address;
};

// How ranks reach each other's memory.
enum class Reach {
  kNone, // there is no such memory
  kAll,
  kMulticast, // likewise, and stores may go to all at once
  kNotTheFirst, // rank 1's GPU does not see rank 0's
  kFirstFails, // rank 0 finds out alone, and the others wait
  kNever, // all wait for a rank that has gone
};

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
      Reach reach)
      : rank_(rank),
        size_(size),
        store_(store),
        key_(key),
        reach_(reach) {
    const cuda::DeviceScope scope(fake_gpu::gpu(), rank);
    fake::NcclUniqueId id;
    if (rank == 0) {
      check("ncclGetUniqueId", fake_gpu::nccl().get_unique_id(&id));
      store.set(key, std::string(id.internal, sizeof id.internal));
    }
    const std::string text = store.get(key, Deadline(kLong));
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    check(
        "ncclCommInitRankConfig",
        fake_gpu::nccl().comm_init_rank_config(
            &comm_, size, id, rank, nullptr));
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
  std::shared_ptr<void> symmetric_memory(size_t bytes) override {
    if (reach_ == Reach::kNone) {
      return nullptr;
    }
    const auto mine = std::make_shared<Symmetric>();
    mine->blocks = {SharedBlocks::make(bytes)};
    symmetric_ = mine;
    return {mine, mine->blocks[0].get()};
  }
  Peers peers(const std::shared_ptr<void>& /* memory */) override {
    if (reach_ == Reach::kFirstFails || reach_ == Reach::kNever) {
      while (rank_ != 0 || reach_ == Reach::kNever) {
        watch_();
        std::this_thread::sleep_for(milliseconds(1));
      }
      return {};
    }
    const auto mine = symmetric_.lock();
    mine->blocks = SharedBlocks::meet(
        store_, key_ + "blocks", rank_, size_, mine->blocks[0]);
    Peers peers;
    for (const auto& block : mine->blocks) {
      peers.arenas.push_back(block.get());
    }
    if (reach_ == Reach::kNotTheFirst && rank_ == 1) {
      peers.arenas[0] = nullptr;
    }
    if (reach_ == Reach::kMulticast) {
      peers.multicast = peers.arenas[static_cast<size_t>(rank_)];
    }
    return peers;
  }
  void abort() override {
    if (!aborted_.exchange(true)) {
      fake_gpu::nccl().comm_abort(comm_);
    }
  }

 private:
  void check(const char* what, cuda::NcclResult result) const {
    if (aborted_ || result != cuda::kNcclSuccess) {
      fail(
          aborted_ ? ErrorKind::kAborted : ErrorKind::kSystem,
          "fused: {}: {}",
          what,
          fake_gpu::nccl().get_error_string(result));
    }
  }

  // This rank's block, and from peers() on all ranks', which stay mapped.
  struct Symmetric {
    std::vector<SharedBlocks::Block> blocks;
  };

  const int rank_;
  const int size_;
  Store& store_;
  const std::string key_;
  const Reach reach_;
  std::weak_ptr<Symmetric> symmetric_;
  std::atomic<bool> aborted_{false};
  cuda::NcclComm comm_ = nullptr;
};

} // namespace fusedpg::test
