#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "calls.hpp"
#include "segment.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

struct Collective {
  Op op;
  const void* src;
  void* dst;
  size_t count; // as NCCL's functions take it
  cuda::NcclDataType type;
  NcclRedOp red_op; // of a broadcast: the root
};

// One rank of a communicator.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(const NcclUniqueId& id, int rank, int size);
  ~Comm();

  // NCCL's functions.
  cuda::NcclResult meet();
  cuda::NcclResult launch(const Collective& collective, void* stream);
  cuda::NcclResult launch_ring(
      const Collective& collective,
      const cuda::RingUpdate* update,
      int how,
      void* stream);
  void destroy(); // waits for outstanding work
  void abort();

  // Enqueues work that takes part in an operation of all ranks. It runs after
  // what was enqueued before, whichever stream that is on.
  cuda::NcclResult enqueue(void* stream, std::function<void()> work);
  // Meets all ranks: `publish` runs when the slot may be written, `consume`
  // when all ranks have published. Ranks that do not agree hang, as with NCCL.
  // False when aborted.
  bool exchange(
      const Announcement& announcement,
      const std::function<void()>& publish,
      const std::function<void()>& consume);
  // The beginning and the end of an operation; begin() is false when it must not
  // run.
  bool begin(Executed& executed);
  void end();

  uint64_t identity() const;
  void wait_aborted();

  const int rank;
  const int size;

 private:
  bool gone() const {
    return aborted_;
  }
  void execute(const Collective& collective);
  // dst = the fold of element `first` and on of all ranks' slots.
  void reduce(
      const Collective& collective,
      char* dst,
      size_t first,
      size_t count) const;

  const NcclUniqueId id_;
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
  std::shared_ptr<Comm> remove(void* handle);
  size_t size();

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Comm>> comms_;
  uint64_t made_ = 0;
};

inline Comms& comms() {
  return global<Comms>();
}

// FUSEDPG_FAKE_NCCL_VERSION.
int nccl_version();

// Handles of NCCL that no pointer equals.
void* nccl_handle();

size_t type_size(cuda::NcclDataType type); // 0: unknown

} // namespace fusedpg::fake
