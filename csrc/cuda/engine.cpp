// The CUDA engine: its start, and how operations come to it.

#include "cuda/engine.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "cuda/selector.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

bool choose_ring(const NcclApi& nccl, const RingConfig& config) {
  if (config.choice == NcclChoice::kPatched && !nccl.has_ring()) {
    fail(
        ErrorKind::kSystem,
        "fused: nccl=\"patched\" (FUSEDPG_NCCL), but {}{}; see "
        "patches/nccl/README.md, and FUSEDPG_NCCL_LIB to name another",
        nccl.path,
        nccl.ring_abi ? " was patched by another version of fusedpg"
                      : " is not patched");
  }
  return select_ring(config);
}

const char* const kSettingsKey = "cuda/settings/";
const char* const kIdKey = "cuda/id";
const char* const kMadeKey = "cuda/made/";
const char* const kFirst = "its first fused operation";
// Between looks at the store.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};

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
              {size, nccl.has_ring(), settings.nccl, spans_hosts})),
      store_(std::move(store)),
      check_peers_(std::move(check_peers)),
      allocate_(allocate ? std::move(allocate) : [&cuda](size_t bytes, Stream) {
        return allocate_device(cuda, bytes);
      }) {
  check_outside_groups("the first fused operation of a group");
  const DeviceScope scope(cuda_, device_);
  if (size_ > 1) {
    compare_settings(deadline);
    NcclUniqueId id;
    if (rank_ == 0) {
      id = Communicator::make_id(nccl_);
      store_->set(kIdKey, std::string(id.internal, sizeof id.internal));
    } else {
      const std::string text = hear(kIdKey, 0, deadline, kFirst);
      if (text.size() != sizeof id.internal) {
        fail(ErrorKind::kSystem, "fused: the store holds no NCCL id");
      }
      std::memcpy(id.internal, text.data(), text.size());
    }
    comm_ = std::make_unique<Communicator>(
        cuda_, nccl_, device_, id, rank_, size_, deadline, [this] {
          look_at_peers("the start of the CUDA engine");
        });
  }
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
    spare_ = size_ > 1 ? make_slot(kAgreeBytes) : nullptr;
    const std::string wrong = ring_ ? check_ring(deadline) : "";
    meet(make_arena(deadline), wrong, deadline);
  } catch (...) { // also what the store throws
    if (comm_) {
      comm_->abort(); // it may still be at work on the arena
    }
    bury(true);
    throw;
  }
  watchdog_ = std::thread([this] { watch(); });
}

// What would otherwise show as a hang.
void CudaEngine::compare_settings(const Deadline& deadline) {
  const std::string mine = formatted(
      "cuda_chunk_bytes={}, cuda_arena_bytes={}, half_sums={}, "
      "FUSEDPG_CUDA_MULTIMEM={}, NCCL {}{}, direct path built "
      "with NCCL {}",
      settings_.cuda_chunk_bytes,
      settings_.cuda_arena_bytes,
      settings_.wide_half_sums ? "fp32" : "wire",
      settings_.cuda_multimem,
      nccl_.version,
      ring_ ? " (patched ring)" : "",
      cuda_.direct_nccl_version);
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
  if (arena_ != nullptr && without) {
    give_up_arena(*without);
  }
}

std::vector<std::string> CudaEngine::tell_all(
    const char* key,
    const std::string& mine,
    const Deadline& deadline,
    const char* waiting) {
  store_->set(formatted("{}{}", key, rank_), mine);
  std::vector<std::string> all;
  for (int p = 0; p < size_; ++p) {
    all.push_back(hear(formatted("{}{}", key, p), p, deadline, waiting));
  }
  return all;
}

std::string CudaEngine::hear(
    const std::string& key,
    int rank,
    const Deadline& deadline,
    const char* waiting) {
  for (milliseconds pause = kFirstPause;;
       pause = std::min(2 * pause, kLongestPause)) {
    const auto text = ask_within(kLongestPause, [key](Rendezvous& store) {
      return store.has(key) ? '+' + store.get(key, Deadline(kLongestPause))
                            : std::string();
    });
    if (text && !text->empty()) {
      return text->substr(1);
    }
    look_at_peers(waiting);
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: rank {} has not come to {} on a GPU within {} ms",
          rank,
          waiting,
          deadline.timeout().count());
    }
    std::this_thread::sleep_for(pause);
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
    std::lock_guard<std::mutex> lock(watch_mutex_);
    throw Error(failure_kind_, failure_);
  }
}

ErrorKind CudaEngine::failure_kind() {
  std::lock_guard<std::mutex> lock(watch_mutex_);
  return failure_kind_;
}

CudaEngine::OperationPtr CudaEngine::submit(
    const OpDescriptor& facts,
    const std::string& details,
    const Submission& submission,
    const std::function<void(Operation&)>& body) {
  std::lock_guard<std::mutex> lock(mutex_);
  check_failed();
  check_outside_groups(describe(facts));
  const DeviceScope scope(cuda_, device_);
  const uint64_t capture = capture_of(submission.current);
  const uint64_t under_way = capture_of(compute_.get());
  if (under_way != 0 && under_way != capture) {
    fail(
        ErrorKind::kInvalid,
        "fused: {} was called outside of the graph that is being captured with "
        "fused operations of this group; end the capture first",
        describe(facts));
  }
  auto operation = std::make_shared<Operation>();
  operation->set_facts(facts);
  operation->sequence = ++sequence_;
  operation->summary = describe(facts) + details;
  operation->deadline_ = Deadline(submission.timeout);
  operation->tensors_ = submission.tensors;
  try {
    operation->captured_ = capture != 0;
    if (operation->captured_) {
      ever_captured_ = true;
    }
    {
      std::lock_guard<std::mutex> watch_lock(watch_mutex_);
      if (!failed_) {
        in_flight_.push_back(operation);
      }
    }
    check_failed();
    watch_changed_.notify_all();
    operation->end_ = make_event(cuda_);
    check(
        cuda_,
        "cudaEventRecord",
        cuda_.event_record(events_.begin.get(), submission.current));
    check(
        cuda_,
        "cudaStreamWaitEvent",
        cuda_.stream_wait_event(compute_.get(), events_.begin.get()));
    body(*operation);
    check(
        cuda_,
        "cudaEventRecord",
        cuda_.event_record(operation->end_.get(), compute_.get()));
  } catch (const Refusal& refusal) {
    give_up(operation, submission.current, refusal);
    throw;
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
      std::lock_guard<std::mutex> watch_lock(watch_mutex_);
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

// An operation that no rank has begun.
void CudaEngine::give_up(
    const OperationPtr& operation,
    Stream current,
    const Refusal& refusal) {
  cuda_.event_record(operation->end_.get(), compute_.get());
  if (operation->captured_) {
    // A capture can end only when what it has forked has come back.
    cuda_.stream_wait_event(current, operation->end_.get());
  }
  operation->enqueued_.store(true, std::memory_order_release);
  {
    const std::lock_guard<std::mutex> watch_lock(watch_mutex_);
    std::erase(in_flight_, operation);
  }
  operation->complete(std::make_exception_ptr(refusal));
  operation->release_tensors();
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
  const DeviceScope scope(cuda_, device_);
  std::lock_guard<std::mutex> lock(mutex_);
  return (!last_ || last_->is_completed()) && !capturing(compute_.get());
}

} // namespace fusedpg::cuda
