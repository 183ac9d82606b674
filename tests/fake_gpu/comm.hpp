#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "calls.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

constexpr int kMaxRanks = 72;

class Segment;

// One rank of a communicator.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(const CommId& id, int rank, int size);
  ~Comm();

  // Waits for all ranks.
  cuda::NcclResult meet();
  cuda::NcclResult launch(const Collective& collective, void* stream);
  // Of the patched NCCL; `how` is as there.
  cuda::NcclResult launch_ring(
      const Collective& collective,
      const cuda::RingUpdate* update,
      int how,
      void* stream);
  void destroy(); // waits for outstanding work
  void abort();
  void wait_aborted();

  const int rank;
  const int size;

 private:
  bool fits(const Collective& collective) const;
  // Enqueues work that takes part in an operation of all ranks. It runs after
  // what was enqueued before, whichever stream that is on.
  cuda::NcclResult enqueue(void* stream, std::function<void()> work);
  // Meets all ranks. Ranks that do not agree hang, as with NCCL.
  void execute(const Collective& collective);
  bool meet_in(const Collective& collective, uint64_t sequence);
  // dst = the fold of all ranks' elements from `first` on.
  void reduce(const Collective& collective, char* dst, size_t first) const;

  const CommId id_;
  const int device_;
  std::shared_ptr<Segment> segment_;
  std::atomic<bool> aborted_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  int outstanding_ = 0; // enqueued and not executed
  int persistent_ = 0; // of these, held by graphs
  int running_ = 0; // executing
  std::mutex ordering_; // of order_
  Record order_;

  std::mutex executing_; // collectives of one communicator do not overlap
  uint64_t next_sequence_ = 0;
};

// The communicators of this process, by handle.
class Comms {
 public:
  void* add(std::shared_ptr<Comm> comm);
  std::shared_ptr<Comm> find(void* handle);
  void remove(void* handle);
  size_t size();

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Comm>> comms_;
  uint64_t made_ = 0;
};

inline PerProcess<Comms> all_comms;
inline Comms& comms() {
  return all_comms.get();
}

CommId make_comm_id();

// FUSEDPG_FAKE_NCCL_VERSION.
int nccl_version();

} // namespace fusedpg::fake
