// The end of the CUDA engine, be it well or by a failure. Nothing here waits
// without a deadline: the GPU may never come to an end.

#include <algorithm>
#include <thread>

#include "base/error.hpp"
#include "base/lock_within.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kEnd{5000}; // for a caller

} // namespace

void CudaEngine::fail_engine(ErrorKind kind, const std::string& message) {
  std::deque<OperationPtr> outstanding;
  {
    std::lock_guard<std::mutex> lock(running_mutex_);
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
    if (carrier_) {
      carrier_->abort();
    }
  }
  const auto error = std::make_exception_ptr(Error(kind, message));
  for (const OperationPtr& operation : outstanding) {
    operation->complete(error);
  }
  // Of one failure all ranks hear from the rank that had it.
  if (size_ > 1 && kind != ErrorKind::kAborted &&
      kind != ErrorKind::kPeerFailed) {
    tell_failure(store_, rank_, message);
  }
}

void CudaEngine::fail_timeout(const Operation& operation) {
  fail_engine(
      ErrorKind::kTimeout,
      formatted(
          "fused: {} (sequence {}) on rank {} of {} did not finish within {} "
          "ms. Where ranks are: {}",
          operation.summary,
          operation.sequence,
          rank_,
          size_,
          operation.deadline_.timeout().count(),
          tell_ranks(operation.sequence, operation.facts(), operation.summary)
              .all));
}

void CudaEngine::fail_mismatch(
    uint64_t sequence,
    const OpDescriptor& facts,
    const std::string& summary) {
  const Said said = tell_ranks(sequence, facts, summary);
  fail_engine(
      ErrorKind::kMismatch,
      formatted(
          "fused: ranks disagree about operation {} of the group{}; {}. "
          "Every rank must call the same operations in the same order "
          "with the same sizes, types and hyperparameters",
          sequence,
          said.difference,
          said.all));
}

void CudaEngine::abort(const std::string& reason) {
  fail_engine(ErrorKind::kAborted, reason);
}

void CudaEngine::shutdown(const Deadline& deadline) {
  OperationPtr last;
  {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (!lock_within(lock, deadline)) {
      // Its caller waits for other ranks.
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
  if (failed()) {
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
}

bool CudaEngine::wait_quiet(const Deadline& deadline) const {
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  bool quiet = true;
  for (const OwnedStream* stream : {&wire_stream_, &compute_}) {
    uint64_t capture = 0;
    if (cuda_.stream_capture(stream->get(), &capture) == kSuccess &&
        capture != 0) {
      quiet = false;
      break;
    }
    Event made = nullptr;
    const int created = cuda_.event_create(&made);
    const OwnedEvent event(cuda_, made);
    if (created != kSuccess ||
        cuda_.event_record(made, stream->get()) != kSuccess) {
      continue; // nothing runs on a GPU that has failed
    }
    while (quiet && cuda_.event_query(made) == kNotReady) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      quiet = !deadline.expired();
    }
  }
  cuda_.set_device(before);
  return quiet;
}

void CudaEngine::close(milliseconds patience) {
  {
    std::lock_guard<std::mutex> lock(running_mutex_);
    if (std::exchange(closed_, true)) {
      return;
    }
  }
  fail_engine(
      ErrorKind::kAborted,
      formatted("fused: the group was destroyed on rank {}", rank_));
  quiet_ = wait_quiet(Deadline(patience));
  if (!quiet_) {
    return;
  }
  // Now, since tensors in the arena keep the engine.
  std::deque<OperationPtr> held;
  {
    std::lock_guard<std::mutex> lock(running_mutex_);
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

void CudaEngine::leak(std::shared_ptr<const void> what) {
  static auto* mutex = new std::mutex;
  static auto* lost = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  lost->push_back(std::move(what));
}

CudaEngine::~CudaEngine() {
  close();
  bury();
}

void CudaEngine::bury() {
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  const auto remains = std::make_shared<UsedByKernels>(
      std::move(*static_cast<UsedByKernels*>(this)));
  // The ring's call that was left behind launches on these streams.
  if (!quiet_ || (left_behind_ && ring_)) {
    leak(remains);
  } else {
    // Graphs may hold kernels for longer. Where ranks share them, whoever ends the
    // carrier keeps the engine until its communicator has seen them go; of graphs
    // of one rank nobody says when they go.
    for (const auto& program : remains->programs_) {
      if (size_ == 1) {
        leak(program);
      }
    }
    carrier_.reset(); // before what its collectives use
  }
  cuda_.set_device(before);
}

} // namespace fusedpg::cuda
