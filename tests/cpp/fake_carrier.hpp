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

// Moves data by a communicator of the fake's, for threads and processes. Its
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
    fake::CommId id{};
    const auto* bytes = reinterpret_cast<const char*>(&id);
    if (rank == 0) {
      check("ncclGetUniqueId", hooks().make_id(&id));
      store.set(key, std::string(bytes, sizeof id));
    }
    const std::string text = store.get(key, Deadline(kLong));
    std::memcpy(&id, text.data(), sizeof id);
    check("ncclCommInitRankConfig", hooks().connect(&comm_, &id, rank, size));
  }
  ~FakeCarrier() override {
    end(/*aborts=*/false);
  }

  void reduce_scatter(
      const void* from,
      void* to,
      size_t count,
      DType type,
      RedOp op,
      cuda::Stream stream) override {
    launch({fake::kReduceScatter, from, to, count, type, op}, stream);
  }
  void all_gather(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override {
    launch({fake::kAllGather, from, to, bytes, DType::kUInt8}, stream);
  }
  void all_to_all(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override {
    launch({fake::kAllToAll, from, to, bytes, DType::kUInt8}, stream);
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
    end(/*aborts=*/true);
  }

 private:
  static const fake::Hooks& hooks() {
    return fake_gpu::hooks();
  }
  void end(bool aborts) {
    if (!aborted_.exchange(true)) {
      hooks().disconnect(comm_, aborts);
    }
  }
  void launch(const fake::Collective& collective, cuda::Stream stream) {
    check(
        fake::nccl_name(collective.op),
        hooks().collective(comm_, &collective, stream));
  }
  void check(const char* what, cuda::NcclResult result) const {
    if (aborted_ || result != cuda::kNcclSuccess) {
      fail(
          aborted_ ? ErrorKind::kAborted : ErrorKind::kSystem,
          "fused: {}: {}",
          what,
          hooks().nccl_error(result));
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
