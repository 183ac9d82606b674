#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "calls.hpp"
#include "fifo.hpp"
#include "nccl_device.h"
#include "segment.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

// Announcement::op of what is no operation on a stream.
constexpr int32_t kWindowOp = -1;
constexpr int32_t kDevCommOp = -2;

struct Collective {
  Op op;
  const void* src;
  void* dst;
  size_t count; // as NCCL's functions take it
  cuda::NcclDataType type;
  NcclRedOp red_op; // of a broadcast: the root
};

// A rank's memory that all ranks see.
struct Window {
  Window();
  Window(const Window&) = delete;
  ~Window();

  std::shared_ptr<SharedMemory> own;
  std::vector<std::unique_ptr<Mapping>> mappings; // of other processes
  std::vector<char*> bases; // by rank
  size_t bytes = 0;

  // NCCL unmaps it, whatever kernels do. Here it stays, and they are noted.
  void unmap();
  std::atomic<bool> unmapped{false};
  std::atomic<int> kernels{0}; // that run in it
};

// One rank of a communicator.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(const NcclUniqueId& id, int rank, int size, bool blocking);
  ~Comm();

  // NCCL's functions, which begin with ready().
  cuda::NcclResult init();
  cuda::NcclResult launch(const Collective& collective, void* stream);
  cuda::NcclResult launch_ring(
      const Collective& collective,
      const cuda::RingUpdate* update,
      int how,
      void* stream);
  cuda::NcclResult register_window(
      void* memory,
      size_t bytes,
      cuda::NcclWindow* window,
      int flags);
  cuda::NcclResult deregister_window(cuda::NcclWindow window);
  cuda::NcclResult create_dev_comm(bool multimem, ncclDevComm* made);
  cuda::NcclResult finalize();
  void destroy(); // waits for outstanding work
  void abort();

  // Success, or what a call on a communicator in this state returns.
  cuda::NcclResult ready();
  cuda::NcclResult async_error();
  bool initialized() const {
    return initialized_;
  }

  std::shared_ptr<Window> window(cuda::NcclWindow window);
  // A channel that no other caller has; collective.
  int claim_direct_channel();
  // Enqueues work that takes part in an operation of all ranks. It runs after
  // what was enqueued before, whichever stream that is on.
  int enqueue(void* stream, std::function<void()> work, int device);
  // Meets all ranks: `publish` runs when the slot may be written, `consume`
  // when all ranks have published. Ranks that do not agree hang, as with NCCL.
  // False when aborted, or if given, when `stopped` is true instead.
  bool exchange(
      int channel,
      const Announcement& announcement,
      const std::function<void()>& publish,
      const std::function<void()>& consume,
      std::function<bool()> stopped = {});
  // The beginning and the end of an operation of a sequence; begin() is false
  // when it must not run. Kernels of the direct path are not NCCL's: an abort
  // neither stops them nor waits for them.
  bool begin(
      Executed& executed,
      uint64_t bytes,
      uint64_t& sequence,
      bool direct = false);
  void end(bool direct = false);

  const Announcement& announced(int channel, int rank) const {
    return segment_->header().ranks[rank].lanes[channel].announcement;
  }
  uint64_t identity() const;
  bool coin(); // whether to return kNcclInProgress this time
  void wait_aborted();
  bool is_legacy(cuda::NcclWindow window);
  cuda::NcclResult destroy_dev_comm();

  const int rank;
  const int size;
  std::atomic<int> asking{0}; // threads in ncclCommGetAsyncError

 private:
  bool gone() const {
    return aborted_;
  }
  cuda::NcclResult meet();
  cuda::NcclResult make_window(
      void* memory,
      size_t bytes,
      cuda::NcclWindow* window,
      int flags);
  cuda::NcclResult wait_outstanding();
  // Runs `job` now, or in the background while ready() says kNcclInProgress.
  cuda::NcclResult perform(
      bool background,
      std::function<cuda::NcclResult()> job);
  void execute(const Collective& collective);
  // dst = the fold of element `first` and on of all ranks' slots.
  void reduce(
      const Collective& collective,
      char* dst,
      size_t first,
      size_t count) const;

  const NcclUniqueId id_;
  const bool blocking_;
  const int device_;
  std::shared_ptr<Segment> segment_;
  std::atomic<bool> initialized_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<int> state_{cuda::kNcclSuccess};

  std::mutex mutex_;
  std::condition_variable changed_;
  int outstanding_ = 0; // enqueued and not executed
  int persistent_ = 0; // of these, held by graphs
  int running_ = 0; // executing
  std::mt19937 random_;
  std::mutex ordering_; // of order_
  Record order_;
  std::map<void*, std::shared_ptr<Window>> windows_;
  std::set<void*> legacy_; // of a communicator without symmetric support
  int dev_comms_ = 0;
  int direct_channels_ = 0;

  std::mutex executing_; // collectives of one communicator do not overlap
  uint64_t next_sequence_ = 0;
  std::mutex host_; // nor do registrations
  uint64_t next_host_sequence_ = 0;
  std::unique_ptr<Fifo> jobs_;
};

// The communicators of this process, by handle.
class Comms {
 public:
  void* add(std::shared_ptr<Comm> comm);
  std::shared_ptr<Comm> find(void* handle);
  std::shared_ptr<Comm> remove(void* handle);
  bool forget(void* handle); // whether it was there
  size_t size();

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Comm>> comms_;
  uint64_t made_ = 0;
};

inline Comms& comms() {
  return global<Comms>();
}

// In all communicators; for Stats.
struct Alive {
  std::atomic<uint64_t> windows{0};
  std::atomic<uint64_t> direct_contexts{0};
};
inline Alive& alive() {
  return global<Alive>();
}

// What NCCL before 2.29.7 leaves mapped when a communicator is destroyed.
class Leaked {
 public:
  void add(std::shared_ptr<Window> window) {
    const std::lock_guard<std::mutex> lock(mutex_);
    windows_.push_back(std::move(window));
  }
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    windows_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Window>> windows_;
};
inline Leaked& leaked() {
  return global<Leaked>();
}

// FUSEDPG_FAKE_NCCL_VERSION, FUSEDPG_FAKE_NO_SYMMETRIC.
int nccl_version();
bool symmetric_support();

// Where multicast addresses of all windows begin: nothing can be there.
inline char* const kMulticast =
    reinterpret_cast<char*>(uintptr_t{0xfeed} << 48);

// Handles of NCCL that no pointer equals.
void* nccl_handle();

size_t type_size(cuda::NcclDataType type); // 0: unknown

} // namespace fusedpg::fake
