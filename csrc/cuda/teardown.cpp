// The end of the CUDA engine, be it well or by a failure. Nothing here waits
// without a deadline: NCCL and the GPU may never come to an end.

#include <thread>

#include "base/error.hpp"
#include "base/lock_within.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

// For kernels of the direct path, which end by themselves once they are told to
// stop, unless they have yet to begin: then they use no window.
constexpr milliseconds kDirectEnd{1000};
// For the GPU to come to an end, and for NCCL.
constexpr milliseconds kQuiet{10000};
constexpr milliseconds kEnd{5000};
// NCCL ends no communicator before its graphs, which may live for ever.
constexpr milliseconds kEndWithGraphs{200};

} // namespace

// What kernels and graphs may use after the engine has gone.
struct Remains {
  Remains(
      const CudaApi& cuda,
      const NcclApi& nccl,
      std::shared_ptr<std::atomic<bool>> released)
      : cuda(cuda),
        nccl(nccl),
        released(std::move(released)) {}
  Remains(const Remains&) = delete;
  ~Remains() {
    if (direct != nullptr && !*released) {
      cuda.direct_destroy(direct, nullptr);
    }
    if (arena != nullptr) {
      nccl.mem_free(arena);
    }
  }

  const CudaApi& cuda;
  const NcclApi& nccl;
  const std::shared_ptr<std::atomic<bool>> released;
  void* direct = nullptr;
  void* arena = nullptr;
  OwnedStream memory_stream; // outlives the memory
  CudaEngine::Wire wire;
  std::vector<DeviceMemory> retired;
  std::map<std::vector<size_t>, std::unique_ptr<CudaEngine::DeviceLayout>>
      layouts;
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<std::shared_ptr<Slot>> captured_slots;
  std::shared_ptr<Slot> spare;
  std::set<std::shared_ptr<const LoadedProgram>> programs;
  std::deque<CudaEngine::OperationPtr> abandoned;
  HostMemory flags;
  CudaEngine::Events events;
  OwnedStream compute;
  OwnedStream wire_stream;
};

void CudaEngine::fail_engine(ErrorKind kind, const std::string& message) {
  std::deque<OperationPtr> outstanding;
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    if (failed_) {
      return;
    }
    failure_kind_ = kind;
    failure_ = message;
    failed_.store(true, std::memory_order_release);
    outstanding.swap(in_flight_);
    abandoned_ = outstanding;
  }
  // The kernels stop waiting for their peers, before anybody hears of it. After
  // a good end there are only those of graphs, which go on.
  if (!finished_) {
    __atomic_store_n(&flags_->stop, 1, __ATOMIC_RELEASE);
    if (comm_) {
      comm_->abort(release_window(outstanding));
    }
  }
  const auto error = std::make_exception_ptr(Error(kind, message));
  for (const OperationPtr& operation : outstanding) {
    operation->complete(error);
  }
  publish(kind, message);
}

void CudaEngine::abort(const std::string& reason) {
  fail_engine(ErrorKind::kAborted, reason);
}

// Runs on a thread that may outlive the engine. NCCL unmaps the window when it
// aborts, so kernels that are using it come first; and before 2.29.7 it leaves
// mapped for ever what was not deregistered, so we do that where nothing can be
// using it. Graphs may be using it.
Communicator::Before CudaEngine::release_window(
    std::deque<OperationPtr> running) const {
  if (window_ == nullptr) {
    return nullptr;
  }
  return [&cuda = cuda_,
          &nccl = nccl_,
          window = window_,
          direct = direct_,
          released = released_,
          graphs = ever_captured_.load(),
          running = std::move(running)](NcclComm comm) {
    const Deadline deadline(kDirectEnd);
    for (const OperationPtr& one : running) {
      while (!one->enqueued_.load(std::memory_order_acquire) ||
             (one->end_ && !one->captured_ &&
              cuda.event_query(one->end_.get()) == kNotReady)) {
        if (deadline.expired()) {
          return;
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
    }
    if (!graphs) {
      cuda.direct_destroy(direct, comm);
      nccl.comm_window_deregister(comm, window);
      *released = true;
    }
  };
}

void CudaEngine::shutdown(const Deadline& deadline) {
  OperationPtr last;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (!lock_within(lock, deadline)) {
      // Its caller hangs inside NCCL.
      fail_engine(
          ErrorKind::kAborted,
          formatted(
              "fused: the group was destroyed on rank {} while an operation "
              "was being called",
              rank_));
      return;
    }
    last = last_;
  }
  const bool ended = !last ||
      last->wait_for(
          std::chrono::duration_cast<milliseconds>(deadline.remaining()));
  if (failed() || !comm_) {
    return;
  }
  if (!ended) {
    fail_engine(
        ErrorKind::kAborted,
        formatted(
            "fused: the group was destroyed on rank {} while {} was under way",
            rank_,
            last->summary));
    return;
  }
  finished_ = true;
  comm_->finish(release_window({}));
  comm_->ended(ever_captured_ ? Deadline(kEndWithGraphs) : deadline);
}

bool CudaEngine::wait_quiet(const Deadline& deadline) {
  const std::pair<const OwnedStream&, const OwnedEvent&> streams[] = {
      {wire_stream_, events_.agreed}, {compute_, events_.proposed}};
  for (const auto& [stream, event] : streams) {
    uint64_t capture = 0;
    if (cuda_.stream_capture(stream.get(), &capture) == kSuccess &&
        capture != 0) {
      return false;
    }
    if (cuda_.event_record(event.get(), stream.get()) != kSuccess) {
      continue; // nothing runs on a GPU that has failed
    }
    while (cuda_.event_query(event.get()) == kNotReady) {
      if (deadline.expired()) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return true;
}

void CudaEngine::close() {
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    if (stopping_) {
      return;
    }
    stopping_ = true;
  }
  watch_changed_.notify_all();
  watchdog_.join();
  fail_engine(
      ErrorKind::kAborted,
      formatted("fused: the group was destroyed on rank {}", rank_));
  // Kernels of an aborted communicator end by themselves.
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  quiet_ = wait_quiet(Deadline(kQuiet));
  cuda_.set_device(before);
  if (comm_) {
    comm_->ended(Deadline(ever_captured_ ? kEndWithGraphs : kEnd));
  }
  if (!quiet_) {
    return;
  }
  // Now, since tensors in the arena keep the engine.
  std::deque<OperationPtr> held;
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    held.swap(abandoned_);
  }
  for (const OperationPtr& operation : held) {
    operation->release_tensors();
  }
  OperationPtr captured;
  std::set<std::shared_ptr<const LoadedProgram>> programs;
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (lock_within(lock, Deadline(kEnd))) {
    captured = last_captured_;
    if (!ever_captured_) {
      programs.swap(programs_); // Works may keep the engine for long
    }
    lock.unlock();
  }
  if (captured) {
    captured->release_tensors(); // the graph's owner keeps them
  }
}

CudaEngine::~CudaEngine() {
  close();
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  bury(quiet_);
  cuda_.set_device(before);
}

void CudaEngine::bury(bool quiet) {
  const auto remains = std::make_shared<Remains>(cuda_, nccl_, released_);
  remains->direct = direct_;
  remains->arena = arena_;
  remains->wire = std::move(wire_);
  remains->retired = std::move(retired_);
  remains->layouts = std::move(layouts_);
  remains->slots = std::move(slots_);
  remains->captured_slots = std::move(captured_slots_);
  remains->spare = std::move(spare_);
  remains->programs = std::move(programs_);
  remains->abandoned = std::move(abandoned_);
  remains->flags = std::move(flags_memory_);
  remains->events = std::move(events_);
  remains->memory_stream = std::move(memory_stream_);
  remains->compute = std::move(compute_);
  remains->wire_stream = std::move(wire_stream_);
  static auto* mutex = new std::mutex;
  static auto* lost = new std::vector<std::shared_ptr<const void>>;
  if (!quiet) {
    // A kernel that writes to memory of somebody else is worse than a leak.
    const std::lock_guard<std::mutex> lock(*mutex);
    lost->push_back(remains);
  } else if (!comm_ && !remains->programs.empty()) {
    // Graphs may hold their kernels, and nobody says when they have gone.
    const std::lock_guard<std::mutex> lock(*mutex);
    lost->insert(
        lost->end(), remains->programs.begin(), remains->programs.end());
  } else if (comm_) {
    comm_->keep(remains);
  }
}

} // namespace fusedpg::cuda
