#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/deadline.hpp"
#include "base/op_code.hpp"

namespace fusedpg {

// How the data of a call travelled. Append, never reorder.
enum class DataPath : uint8_t {
  kOneShot, // staged at once, in shared memory
  kStaged, // in chunks, through shared memory
  kDirect, // read or written where they lie, in the arenas
  kSkipping, // only blocks that hold something
  kDelegated, // by torch's NCCL
  kCoordinates, // of a torch.sparse_coo tensor
  kMessages, // in messages between machines
  kAggregated, // to aggregators and back
};
constexpr size_t kDataPaths = 8;
const char* path_name(DataPath path);

// The cost of one operation's calls for this rank.
struct OpStats {
  // Between this rank and its peers, through whatever memory or wire:
  // contributions one way, results the other way, and what says which blocks
  // travel.
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_sent = 0; // 0 inside a machine
  // Counted by calls that looked for zero blocks: the blocks of the tensors,
  // those of them that this rank contributed, and those that any rank did.
  uint64_t blocks = 0;
  uint64_t blocks_present = 0;
  uint64_t blocks_union = 0;
  std::array<uint64_t, kDataPaths> calls{}; // by path
};

// All numbers but the calls.
constexpr std::array kOpNumbers{
    &OpStats::bytes_sent,
    &OpStats::bytes_received,
    &OpStats::messages_sent,
    &OpStats::blocks,
    &OpStats::blocks_present,
    &OpStats::blocks_union};

// Counters of one group. Thread-safe.
class Stats {
 public:
  void add(OpCode op, DataPath path, const OpStats& call) {
    Counters& c = ops_[static_cast<size_t>(op)];
    for (size_t i = 0; i < kOpNumbers.size(); ++i) {
      c.numbers[i].add(call.*kOpNumbers[i]);
    }
    c.calls[static_cast<size_t>(path)].add(1);
  }
  OpStats of(OpCode op) const;
  void clear();

 private:
  struct Counter {
    std::atomic<uint64_t> value{0};
    void add(uint64_t n) {
      if (n != 0) {
        value.fetch_add(n, std::memory_order_relaxed);
      }
    }
  };
  struct Counters {
    std::array<Counter, kOpNumbers.size()> numbers;
    std::array<Counter, kDataPaths> calls;
  };
  std::array<Counters, kOpCodes> ops_;
};

// For how long collectives of one group have waited for each of its ranks.
// Thread-safe.
class Waits {
 public:
  explicit Waits(int size) : waited_(static_cast<size_t>(size)) {}

  void add(int rank, std::chrono::nanoseconds time) {
    waited_[static_cast<size_t>(rank)].fetch_add(
        time.count(), std::memory_order_relaxed);
  }
  std::chrono::nanoseconds of(int rank) const {
    return std::chrono::nanoseconds(
        waited_[static_cast<size_t>(rank)].load(std::memory_order_relaxed));
  }
  int size() const {
    return static_cast<int>(waited_.size());
  }
  void clear() {
    for (auto& one : waited_) {
      one = 0;
    }
  }

  // Adds the time that it lives. Null: nobody counts.
  class Timer {
   public:
    Timer(Waits* waits, int rank) : waits_(waits), rank_(rank) {
      if (waits_ != nullptr) {
        begin_ = Clock::now();
      }
    }
    Timer(const Timer&) = delete;
    ~Timer() {
      if (waits_ != nullptr) {
        waits_->add(rank_, Clock::now() - begin_);
      }
    }

   private:
    Waits* const waits_;
    const int rank_;
    Clock::time_point begin_{};
  };

 private:
  std::vector<std::atomic<int64_t>> waited_; // ns
};

} // namespace fusedpg
