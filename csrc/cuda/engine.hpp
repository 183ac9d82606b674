#pragma once

#include <deque>
#include <future>
#include <map>
#include <optional>
#include <set>

#include "base/call.hpp"
#include "base/options.hpp"
#include "base/program_call.hpp"
#include "base/rendezvous.hpp"
#include "cuda/carrier.hpp"
#include "cuda/layout.hpp"
#include "cuda/operation.hpp"

namespace fusedpg::cuda {

class LoadedProgram;
struct Task;

// Memory that an engine's kernels may use. It outlives the engine if the GPU has not
// come to an end.
struct UsedByKernels {
  // Memory that both streams' work alternates between.
  struct Wire {
    DeviceMemory grads[2];
    DeviceMemory params[2];
    size_t grad_bytes = 0;
    size_t param_bytes = 0;
  };
  struct Events {
    OwnedEvent begin, proposed, agreed, summed, gathered_sums;
    OwnedEvent packed[2], reduced[2], updated[2], gathered[2];
  };
  // A layout with its arrays in device memory, for all calls of the same
  // counts.
  struct DeviceLayout {
    Layout layout;
    DeviceMemory memory; // null until an operation needs it
    const ShardPiece* pieces = nullptr;
    const Tile* tiles = nullptr;
    const uint32_t* tile_list = nullptr;
    const uint32_t* tile_begin = nullptr;
    const uint32_t* piece_list = nullptr;
    const uint32_t* piece_begin = nullptr;
  };

  OwnedStream
      memory_stream_; // never captured: of allocations, which it outlives
  Wire wire_;
  std::vector<DeviceMemory> retired_; // that captured graphs may still use
  std::map<std::vector<size_t>, std::unique_ptr<DeviceLayout>> layouts_;
  std::vector<std::shared_ptr<Slot>> slots_;
  std::vector<std::shared_ptr<Slot>> captured_slots_; // graphs use them
  // Whose kernels run, or are in graphs: a module must not go before them.
  std::set<std::shared_ptr<const LoadedProgram>> programs_;
  // Failed operations, whose kernels may still use their tensors.
  std::deque<std::shared_ptr<Operation>> abandoned_;
  HostMemory flags_memory_;
  DeviceMemory arena_; // of the carrier, symmetric; null: none
  Events events_;
  OwnedStream compute_;
  OwnedStream wire_stream_;
};

// The CUDA engine of one rank of a group: fused operations, whose data a Carrier
// moves.
//
// Operations are enqueued on two streams: `compute` runs our kernels, `wire` the
// carrier's. An operation begins behind the stream it was called on, and ends at
// an event that Operation holds. Operations of a group run in the order of their
// calls. None is awaited but the first one of its kind: sizes must fit before the
// carrier may move anything, so that waits until all ranks have called the same.
// For later ones the device compares headers. If their sizes differ, ranks hang in
// the carrier until those that look have asked each other what they are doing.
//
// Calls, and whoever waits for an operation or asks about it, look for operations
// that have ended, deadlines and disagreements between ranks. After a failure
// every outstanding and later operation throws. Collectives that wait for a dead
// rank are the carrier's: torch's watchdog ends the process.
//
// Thread-safe.
class CudaEngine : private UsedByKernels {
 public:
  // Throws if another rank of the machine is known to be dead or gone; `what`
  // is what this one waits for. May be null.
  using CheckPeers = std::function<void(const std::string& what)>;

  // Collective. `store` and `check_peers` are used until close(). Where one
  // rank throws and calls tell_failure(), all ranks throw; for another attempt
  // the store must be empty. There is none after a CallLeftBehind, which may use
  // the carrier's communicator for ever.
  CudaEngine(
      const CudaApi& cuda,
      const NcclApi& nccl,
      int rank,
      int size,
      int device,
      const Settings& settings,
      bool spans_hosts,
      std::shared_ptr<Rendezvous> store,
      CheckPeers check_peers,
      const Deadline& deadline,
      std::unique_ptr<Carrier> carrier, // null for one rank
      Allocate allocate = nullptr); // for device memory; null: from CUDA
  ~CudaEngine();
  CudaEngine(const CudaEngine&) = delete;

  // Tells the other ranks that this rank's engine has failed, or could not be
  // made. Waits for the store for a second at most.
  static void tell_failure(
      const std::shared_ptr<Rendezvous>& store,
      int rank,
      const std::string& message);

  using OperationPtr = std::shared_ptr<Operation>;
  struct Submission {
    Stream current = nullptr; // whose work so far the operation needs
    std::chrono::milliseconds timeout{0};
    std::shared_ptr<void> tensors; // kept until the operation has ended
  };
  OperationPtr fused_step(const StepCall& call, const Submission& submission);
  OperationPtr reduce_shards(
      const ShardsCall& call,
      const Submission& submission);
  // What a rank without a kernel (null) finds, all ranks find in call.missing.
  // Throws Error(kInvalid) if the kernel is not this GPU's, or not the call's.
  OperationPtr fused_program(
      const ProgramCall& call,
      const std::shared_ptr<const LoadedProgram>& kernel,
      const Submission& submission);

  // See cuda::capture_of().
  uint64_t capture_of(Stream stream) const;
  bool capturing(Stream stream) const {
    return capture_of(stream) != 0;
  }
  bool in_arena(const void* p, size_t bytes) const;
  // Makes a stream wait for an operation; throws if the engine has failed.
  void wait(Operation& operation, Stream stream);
  // Makes a stream wait for everything enqueued so far.
  void join(Stream stream);
  // Blocks until everything enqueued so far has ended; throws if that failed.
  void drain(std::chrono::milliseconds timeout);
  // Whether everything enqueued so far has ended, as far as is known.
  bool idle();
  // Completes operations that have ended; the engine fails if one has failed or
  // its time is up, if ranks disagree, or if the store fails when it is asked
  // about a long wait. Throws nothing: destructors call it.
  void look();

  bool failed() const {
    return failed_.load(std::memory_order_acquire);
  }
  ErrorKind failure_kind();
  void abort(const std::string& reason);
  // Waits for outstanding work, at most until the deadline. Graphs of its
  // operations may be launched for as long as the engine lives.
  void shutdown(const Deadline& deadline);
  static constexpr std::chrono::milliseconds kQuiet{10000};
  // Operations still outstanding fail. Waits until the GPU is done with them;
  // if it is not by then, what they use is never freed.
  void close(std::chrono::milliseconds patience = kQuiet);

  // The arena that the GPUs of all ranks see, or null.
  void* arena() const {
    return arena_.get();
  }
  size_t arena_bytes() const {
    return arena_bytes_;
  }
  const CudaApi& cuda() const {
    return cuda_;
  }
  const NcclApi& nccl() const {
    return nccl_;
  }
  int device() const {
    return device_;
  }
  // Whether steps go over the ring of a patched NCCL where they can.
  bool has_ring() const {
    return ring_;
  }
  // Whether graphs may hold kernels of the direct path: the carrier's
  // communicator, which waits for the others to go, knows nothing of those.
  bool has_unseen_graphs() const {
    return peers_.has_value() && ever_captured_;
  }
  // "stock", "ring" or "direct"
  const char* path_of_last_step() const {
    return last_path_.load();
  }

  // Keeps for ever what kernels, or calls of NCCL, may use: one that writes to
  // memory of somebody else is worse than a leak.
  static void leak(std::shared_ptr<const void> what);

 private:
  friend class Run;

  // --- engine.cpp
  OperationPtr submit(const Task& task, const Submission& submission);
  // Blocks until `event`, behind which all ranks are known to agree about the
  // operation or not. Throws if they don't, or if the engine has failed.
  void await_agreement(const Operation& operation, Event event);
  // What a thread does now and then while it waits for other ranks in a call:
  // throws if that is in vain, or if the operation's time is up.
  void watch(const Operation& operation);
  // Whether it takes so long that other ranks may be the cause; then again after
  // a while.
  bool suspicious(const Operation& operation);
  void meet(bool direct, const std::string& wrong, const Deadline& deadline);
  void compare_settings(const Deadline& deadline);
  void check_failed();
  void check_outside_groups(const std::string& what) const;
  // look(), which throws nothing that the store does.
  void look_at_operations();

  uint64_t disagreed() const {
    return __atomic_load_n(&flags_->mismatch, __ATOMIC_ACQUIRE);
  }

  uint64_t late() const {
    return __atomic_load_n(&flags_->late, __ATOMIC_ACQUIRE);
  }

  // --- teardown.cpp
  void fail_engine(ErrorKind kind, const std::string& message);
  void fail_timeout(const Operation& operation);
  void fail_mismatch(
      uint64_t sequence,
      const OpDescriptor& facts,
      const std::string& summary);
  bool wait_quiet(const Deadline& deadline) const;
  void bury();

  // --- peers.cpp
  // What all ranks say under a key, by rank. `waiting`: for what. Throws also
  // if another rank fails.
  std::vector<std::string> tell_all(
      const char* key,
      const std::string& mine,
      const Deadline& deadline,
      const char* waiting);
  std::string hear(
      const std::string& key,
      int rank,
      const Deadline& deadline,
      const char* waiting);
  using Question = std::function<std::string(Rendezvous& store)>;
  // Of the store, by a thread of its own: its host may be stopped, and another
  // thread's wait may hold it. Nobody here may wait for that.
  static std::future<std::string> ask(
      const std::shared_ptr<Rendezvous>& store,
      Question question);
  // The answer, or nothing if there is none by then, or to the question before.
  std::optional<std::string> ask_within(
      std::chrono::milliseconds patience,
      Question question);
  // Throws if another rank is known to be dead, or has failed; `waiting`: what
  // this rank waits for. If that is an operation, also fails the engine if the
  // next rank has called something else: where sizes differ, both may wait for
  // ever. One question to the store.
  void look_at_peers(
      const std::string& waiting,
      const Operation* operation = nullptr);
  // Says what this rank is doing, and what the others say of the same
  // operation.
  struct Said {
    std::string all; // "rank 0: ...; rank 1: ..."
    std::string difference; // from the first rank that says another
  };
  Said tell_ranks(
      uint64_t sequence,
      const OpDescriptor& facts,
      const std::string& summary);
  using NcclCall = std::function<NcclResult(NcclComm)>;
  // Throws what NCCL says.
  void call_nccl(const char* what, const NcclCall& call) const;
  // The same on a thread of its own, for at most as long as the deadline and the
  // other ranks live; then it throws a CallLeftBehind.
  void call_nccl_within(
      const char* what,
      const Deadline& deadline,
      const NcclCall& call);

  // Of the chunks of an operation.
  size_t chunk_bytes(size_t bytes) const;

  // --- ring_check.cpp; at the start, collective
  std::string check_ring(const Deadline& deadline); // what is wrong, or empty
  [[noreturn]] void fail_ring(const std::string& wrong) const;
  struct RingProbe;
  struct RingCase;
  bool ring_works(
      const std::shared_ptr<RingProbe>& probe,
      const RingCase& c,
      const Deadline& deadline);

  // --- resources.cpp; at the start and the end
  void connect(const Deadline& deadline);
  void allocate_arena(); // for the direct path
  bool reach_peers(const Deadline& deadline); // false: not all of them
  void give_up_arena(int without);
  // Watches a call of the carrier, and calls `besides` now and then.
  void watch_start(
      const char* what,
      const Deadline& deadline,
      const Carrier::Watch& besides);
  // under the lock
  DeviceMemory allocate(size_t bytes);
  std::shared_ptr<Slot> make_slot(size_t bytes);
  std::shared_ptr<Slot> take_slot(size_t bytes);
  DeviceLayout& layout_of(
      const std::vector<size_t>& counts,
      size_t max_block,
      size_t whole_from,
      size_t header);
  void upload(DeviceLayout& layout);
  void reserve_wire(size_t grad_bytes, size_t param_bytes);

  const CudaApi& cuda_;
  const NcclApi& nccl_;
  const int rank_;
  const int size_;
  const int device_;
  const Settings settings_;
  const bool spans_hosts_;
  bool ring_;
  const std::shared_ptr<Rendezvous> store_;
  const CheckPeers check_peers_;
  const Allocate allocate_;

  std::unique_ptr<Carrier> carrier_; // null for one rank
  NcclComm comm_ = nullptr; // the carrier's, where NCCL itself is needed
  // What the host and running kernels tell each other.
  struct Flags {
    uint64_t mismatch = 0; // the operation that ranks disagree about
    uint64_t late = 0; // the first one whose kernel has not met the others
    uint64_t stop = 0; // kernels must not wait for other ranks any more
  };
  Flags* flags_ = nullptr;
  size_t arena_bytes_ = 0; // for tensors; DirectRoom follows
  std::optional<PeerAccess> peers_; // set: there is the direct path

  std::mutex mutex_; // of what enqueuing an operation uses
  uint64_t sequence_ = 0;
  std::atomic<bool> ever_captured_{false};
  // Of operations that all ranks are known to have called with these facts.
  std::set<uint64_t> known_;
  OperationPtr last_; // the latest operation that was not captured ...
  OperationPtr last_captured_; // ... and that was

  std::mutex running_mutex_; // of what follows, and of abandoned_
  std::deque<OperationPtr> in_flight_; // the last may be being enqueued
  Clock::time_point next_look_; // at the other ranks
  bool closed_ = false;
  std::atomic<bool> failed_{false};
  std::atomic<bool> finished_{false}; // well, by shutdown()
  bool quiet_ = false; // after close(): the GPU is done
  bool left_behind_ = false; // a call of the start, in the communicator
  ErrorKind failure_kind_ = ErrorKind::kSystem;
  std::string failure_;
  std::atomic<const char*> last_path_{"none"};

  std::mutex asking_;
  std::future<std::string> asked_;
  // The call that this rank last told the store, and the next rank's as of the
  // last look. Questions use it, one at a time.
  struct KnownCalls {
    std::string mine;
    std::string next;
  };
  const std::shared_ptr<KnownCalls> known_calls_ =
      std::make_shared<KnownCalls>();
};

} // namespace fusedpg::cuda
