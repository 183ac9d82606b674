// The CUDA engine: its start, and how operations come to it.

#include "cuda/engine.hpp"

#include <algorithm>
#include <thread>

#include "base/error.hpp"
#include "cuda/run.hpp"
#include "cuda/selector.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

bool choose_ring(const NcclApi& nccl, const RingConfig& config) {
  if (config.choice == NcclChoice::kPatched && !config.has_ring) {
    fail(
        ErrorKind::kSystem,
        "fused: nccl=\"patched\" (FUSEDPG_NCCL), but {}{}; see "
        "patches/nccl/README.md",
        nccl.path,
        !nccl.has_ring() && nccl.ring_abi
            ? " was patched by another version of fusedpg"
            : !nccl.has_ring()
            ? " is not patched"
            : " is not the NCCL that torch has loaded, whose communicators it "
              "cannot use: start the process with it in LD_PRELOAD");
  }
  return select_ring(config);
}

const char* const kSettingsKey = "cuda/settings/";
const char* const kMadeKey = "cuda/made/";
const char* const kFirst = "its first fused operation";
// For the event of an agreement, which comes soon, and for one that does not.
constexpr int kQuickLooks = 100;
constexpr std::chrono::microseconds kAgreementPause{20};
// A longer wait makes a rank look for other ranks' failures, which costs a
// message to the store ...
constexpr milliseconds kSuspicious{1000};
// ... each time.
constexpr milliseconds kBetweenLooks{100};

} // namespace

CudaEngine::CudaEngine(
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
    std::unique_ptr<Carrier> carrier,
    Allocate allocate)
    : cuda_(cuda),
      nccl_(nccl),
      rank_(rank),
      size_(size),
      device_(device),
      settings_(settings),
      spans_hosts_(spans_hosts),
      ring_(
          size > 1 &&
          choose_ring(
              nccl,
              {size,
               nccl.has_ring() && nccl.is_torchs,
               settings.nccl,
               spans_hosts})),
      store_(std::move(store)),
      check_peers_(std::move(check_peers)),
      allocate_(
          allocate ? std::move(allocate)
                   : [&cuda](
                         size_t bytes,
                         Stream) { return allocate_device(cuda, bytes); }),
      carrier_(std::move(carrier)) {
  check_outside_groups("the first fused operation of a group");
  const DeviceScope scope(cuda_, device_);
  compute_ = make_stream(cuda_);
  wire_stream_ = make_stream(cuda_);
  memory_stream_ = make_stream(cuda_);
  for (OwnedEvent* event :
       {&events_.begin,
        &events_.proposed,
        &events_.agreed,
        &events_.summed,
        &events_.gathered_sums}) {
    *event = make_event(cuda_);
  }
  for (OwnedEvent(*pair)[2] :
       {&events_.packed,
        &events_.reduced,
        &events_.updated,
        &events_.gathered}) {
    (*pair)[0] = make_event(cuda_);
    (*pair)[1] = make_event(cuda_);
  }
  flags_memory_ = allocate_host(cuda_, sizeof(Flags));
  flags_ = new (flags_memory_.get()) Flags;
  try {
    allocate_arena();
    // A rank that has failed so far has called nothing that others wait in.
    if (size_ > 1) {
      compare_settings(deadline);
    }
    connect(deadline);
    const std::string wrong = ring_ ? check_ring(deadline) : "";
    meet(reach_peers(deadline), wrong, deadline);
  } catch (const std::exception& error) { // also what the store throws
    left_behind_ = dynamic_cast<const CallLeftBehind*>(&error) != nullptr;
    fail_engine(ErrorKind::kAborted, error.what());
    close();
    bury();
    throw;
  }
}

// What would otherwise show as a hang.
void CudaEngine::compare_settings(const Deadline& deadline) {
  const std::string mine = formatted(
      "cuda_chunk_bytes={}, cuda_arena_bytes={}{}, half_sums={}, NCCL {}{}",
      settings_.cuda_chunk_bytes,
      settings_.cuda_arena_bytes,
      arena_ ? " (symmetric memory)" : "",
      settings_.wide_half_sums ? "fp32" : "wire",
      nccl_.version,
      ring_                 ? " (patched ring)"
          : nccl_.is_torchs ? ""
                            : " (not torch's)");
  const std::vector<std::string> all =
      tell_all(kSettingsKey, mine, deadline, "its first fused operation");
  for (int p = 0; p < size_; ++p) {
    if (all[p] != mine) {
      fail(
          ErrorKind::kMismatch,
          "fused: ranks have different settings; rank {}: {}; rank {}: {}",
          rank_,
          mine,
          p,
          all[p]);
    }
  }
}

// The last step of the start: no rank returns before all ranks have an engine.
void CudaEngine::meet(
    bool direct,
    const std::string& wrong,
    const Deadline& deadline) {
  if (size_ == 1) {
    return;
  }
  const std::vector<std::string> all =
      tell_all(kMadeKey, (direct ? "1" : "0") + wrong, deadline, kFirst);
  std::optional<int> without;
  for (int p = size_ - 1; p >= 0; --p) {
    if (all[p].size() > 1) {
      fail_ring(all[p].substr(1));
    }
    if (all[p] == "0") {
      without = p;
    }
  }
  if (settings_.cuda_arena_bytes != 0 && without) {
    give_up_arena(*without);
  }
}

size_t CudaEngine::chunk_bytes(size_t bytes) const {
  return settings_.cuda_chunk_bytes != 0
      ? settings_.cuda_chunk_bytes
      : select_chunk_bytes({bytes, size_, spans_hosts_});
}

uint64_t CudaEngine::capture_of(Stream stream) const {
  const DeviceScope scope(cuda_, device_);
  return cuda::capture_of(cuda_, stream);
}

// Kernels of ours would run before what they wait for.
void CudaEngine::check_outside_groups(const std::string& what) const {
  if (size_ > 1 && nccl_.in_group()) {
    fail(
        ErrorKind::kInvalid,
        "fused: {} was called between ncclGroupStart() and ncclGroupEnd() on "
        "this thread, where NCCL holds back what ranks exchange; call it "
        "before or after the group",
        what);
  }
}

void CudaEngine::check_failed() {
  if (failed()) {
    std::lock_guard<std::mutex> lock(running_mutex_);
    throw Error(failure_kind_, failure_);
  }
}

ErrorKind CudaEngine::failure_kind() {
  std::lock_guard<std::mutex> lock(running_mutex_);
  return failure_kind_;
}

CudaEngine::OperationPtr CudaEngine::submit(
    const Task& task,
    const Submission& submission) {
  std::lock_guard<std::mutex> lock(mutex_);
  look();
  check_failed();
  check_outside_groups(describe(task.facts));
  const DeviceScope scope(cuda_, device_);
  const uint64_t capture = capture_of(submission.current);
  const uint64_t under_way = capture_of(compute_.get());
  if (under_way != 0 && under_way != capture) {
    fail(
        ErrorKind::kInvalid,
        "fused: {} was called outside of the graph that is being captured with "
        "fused operations of this group; end the capture first",
        describe(task.facts));
  }
  auto operation = std::make_shared<Operation>(*this);
  operation->set_facts(task.facts);
  operation->sequence = sequence_ + 1;
  operation->summary = describe(task.facts) + task.details();
  operation->deadline_ = Deadline(submission.timeout);
  operation->tensors_ = submission.tensors;
  operation->captured_ = capture != 0;
  if (operation->captured_) {
    ever_captured_ = true;
  }
  Run run(*this, operation, task);
  run.acquire(); // what throws here has begun nothing
  if (carrier_) {
    carrier_->set_watch([this, &operation] { watch(*operation); });
  }
  ++sequence_;
  try {
    {
      std::lock_guard<std::mutex> running_lock(running_mutex_);
      if (!failed_) {
        in_flight_.push_back(operation);
      }
    }
    check_failed();
    operation->end_ = make_event(cuda_);
    check(
        cuda_,
        "cudaEventRecord",
        cuda_.event_record(events_.begin.get(), submission.current));
    check(
        cuda_,
        "cudaStreamWaitEvent",
        cuda_.stream_wait_event(compute_.get(), events_.begin.get()));
    run.enqueue();
    check(
        cuda_,
        "cudaEventRecord",
        cuda_.event_record(operation->end_.get(), compute_.get()));
  } catch (const std::exception& error) {
    // What was enqueued ends there, on both streams, but a graph gets no more
    // of it.
    if (operation->end_ && !operation->captured_) {
      const Event wired = events_.agreed.get();
      cuda_.event_record(wired, wire_stream_.get());
      cuda_.stream_wait_event(compute_.get(), wired);
      cuda_.event_record(operation->end_.get(), compute_.get());
    }
    operation->broken_ = true;
    operation->enqueued_.store(true, std::memory_order_release);
    // Other ranks wait for what was not enqueued.
    const auto* known = dynamic_cast<const Error*>(&error);
    fail_engine(
        known != nullptr ? known->kind() : ErrorKind::kSystem,
        formatted(
            "{}{} [{}, sequence {}, rank {}]",
            known != nullptr ? "" : "fused: ",
            error.what(),
            operation->summary,
            operation->sequence,
            rank_));
    check_failed(); // which is not this error, if that is its consequence
  }
  operation->enqueued_.store(true, std::memory_order_release);
  if (operation->captured_) {
    {
      std::lock_guard<std::mutex> running_lock(running_mutex_);
      std::erase(in_flight_, operation);
    }
    last_captured_ = operation;
    operation->complete(nullptr);
    return operation;
  }
  last_ = operation;
  check_failed();
  return operation;
}

CudaEngine::OperationPtr CudaEngine::fused_step(
    const StepCall& call,
    const Submission& submission) {
  return submit(Task(call, size_), submission);
}

CudaEngine::OperationPtr CudaEngine::reduce_shards(
    const ShardsCall& call,
    const Submission& submission) {
  return submit(Task(call, size_), submission);
}

void CudaEngine::await_agreement(const Operation& operation, Event event) {
  for (int looks = 0;; ++looks) {
    const int state = cuda_.event_query(event);
    if (state == kSuccess) {
      break;
    }
    if (state != kNotReady) {
      check(cuda_, "cudaEventQuery", state);
    }
    watch(operation);
    if (looks > kQuickLooks) {
      std::this_thread::sleep_for(kAgreementPause);
    }
  }
  if (disagreed() == operation.sequence) {
    fail_mismatch(operation.sequence, operation.facts(), operation.summary);
  }
  check_failed();
}

void CudaEngine::watch(const Operation& operation) {
  if (operation.deadline_.expired()) {
    fail_timeout(operation);
  } else {
    // The one that hangs may be in front of it. While it is captured, none may be
    // asked about.
    OperationPtr front;
    if (!operation.captured_) {
      const auto runs = [&](const OperationPtr& one) {
        return !one->enqueued_.load(std::memory_order_acquire) ||
            one->broken_ || cuda_.event_query(one->end_.get()) != kSuccess;
      };
      const std::lock_guard<std::mutex> lock(running_mutex_);
      const auto found =
          std::find_if(in_flight_.begin(), in_flight_.end(), runs);
      front = found != in_flight_.end() ? *found : nullptr;
    }
    const Operation& first = front ? *front : operation;
    if (suspicious(first)) {
      look_at_peers(first.summary, &first);
    }
  }
  check_failed();
}

bool CudaEngine::suspicious(const Operation& operation) {
  const auto now = Clock::now();
  const std::lock_guard<std::mutex> lock(running_mutex_);
  if (now < operation.begun_ + kSuspicious || now < next_look_) {
    return false;
  }
  next_look_ = now + kBetweenLooks;
  return true;
}

void CudaEngine::look() {
  try {
    look_at_operations();
  } catch (const Error& error) {
    fail_engine(error.kind(), error.what());
  } catch (const std::exception& error) { // also what the store throws
    fail_engine(ErrorKind::kSystem, formatted("fused: {}", error.what()));
  }
}

void CudaEngine::look_at_operations() {
  for (;;) {
    OperationPtr first;
    {
      std::lock_guard<std::mutex> lock(running_mutex_);
      if (in_flight_.empty()) {
        return;
      }
      first = in_flight_.front();
    }
    // Before the flags, which an operation sets before it ends.
    const bool ends = first->enqueued_.load(std::memory_order_acquire) &&
        !first->captured_ && !first->broken_;
    const int state = ends ? cuda_.event_query(first->end_.get()) : kNotReady;
    const uint64_t sequence = disagreed();
    const uint64_t late = this->late();
    // Not if the first one is only about to be completed.
    const bool later = state == kSuccess && sequence > first->sequence;
    if (sequence != 0 && !later) {
      // Of what a graph holds, the facts are not known any more.
      OpDescriptor facts;
      std::string summary = first->summary;
      {
        std::lock_guard<std::mutex> lock(running_mutex_);
        for (const OperationPtr& one : in_flight_) {
          if (one->sequence == sequence) {
            facts = one->facts();
            summary = one->summary;
          }
        }
      }
      fail_mismatch(sequence, facts, summary);
      return;
    }
    // The kernels of graphs have no deadline, so it is one of those in flight.
    if (late != 0 && !(state == kSuccess && late > first->sequence)) {
      fail_timeout(*first);
      return;
    }
    if (state != kSuccess && state != kNotReady) {
      fail_engine(
          ErrorKind::kSystem,
          formatted(
              "fused: {} (sequence {}) on rank {} of {}: CUDA error: {}",
              first->summary,
              first->sequence,
              rank_,
              size_,
              cuda_.error_string(state)));
      return;
    }
    if (state == kNotReady) {
      if (ends && first->deadline_.expired()) {
        fail_timeout(*first);
      } else if (ends && suspicious(*first)) {
        look_at_peers(first->summary, first.get());
      }
      return;
    }
    {
      std::lock_guard<std::mutex> lock(running_mutex_);
      if (in_flight_.empty() || in_flight_.front() != first) {
        return; // another thread has looked, or the engine has failed
      }
      in_flight_.pop_front();
    }
    first->complete(nullptr);
  }
}

void CudaEngine::wait(Operation& operation, Stream stream) {
  check_failed();
  const DeviceScope scope(cuda_, device_);
  check(
      cuda_,
      "cudaStreamWaitEvent",
      cuda_.stream_wait_event(stream, operation.end_.get()));
}

void CudaEngine::join(Stream stream) {
  check_failed(); // also where no operation was enqueued before that
  OperationPtr last;
  {
    const DeviceScope scope(cuda_, device_);
    std::lock_guard<std::mutex> lock(mutex_);
    // A graph can wait only for what is captured with it.
    const uint64_t capture = capture_of(stream);
    last = capture == 0                         ? last_
        : capture == capture_of(compute_.get()) ? last_captured_
                                                : nullptr;
  }
  if (last) {
    wait(*last, stream);
  }
}

void CudaEngine::drain(milliseconds timeout) {
  OperationPtr last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  if (last) {
    const bool ended = last->wait_for(timeout);
    check_failed();
    if (!ended) {
      fail(
          ErrorKind::kTimeout,
          "fused: {} has not ended within {} ms on rank {}",
          last->summary,
          timeout.count(),
          rank_);
    }
  }
}

bool CudaEngine::idle() {
  look();
  const DeviceScope scope(cuda_, device_);
  std::lock_guard<std::mutex> lock(mutex_);
  return (!last_ || last_->is_completed()) && !capturing(compute_.get());
}

} // namespace fusedpg::cuda
