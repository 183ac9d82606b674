// Life of the CUDA engine: its start, its watchdog, its end.

#include "cuda/engine.hpp"

#include <cstring>

#include "base/error.hpp"
#include "cuda/selector.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{2}; // between looks at outstanding operations
// An operation that takes longer makes the watchdog look for other ranks'
// failures, which costs a message to the store.
constexpr milliseconds kSuspicious{1000};
constexpr milliseconds kAskRanks{2000};
// Longer than an answer of a store that works takes.
constexpr milliseconds kStorePatience{1000};

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

constexpr char kSaidEnd = '\n';
const char* const kSettingsKey = "cuda/settings/";
const char* const kIdKey = "cuda/id";
const char* const kFailedKey = "cuda/failed";

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
    const Deadline& deadline)
    : cuda_(cuda),
      nccl_(nccl),
      rank_(rank),
      size_(size),
      device_(device),
      settings_(settings),
      ring_(
          size > 1 &&
          choose_ring(
              nccl,
              {size, nccl.has_ring(), settings.nccl, spans_hosts})),
      store_(std::move(store)),
      check_peers_(std::move(check_peers)) {
  const DeviceScope scope(cuda_, device_);
  if (size_ > 1) {
    compare_settings(deadline);
    NcclUniqueId id;
    if (rank_ == 0) {
      id = Communicator::make_id(nccl_);
      store_->set(kIdKey, std::string(id.internal, sizeof id.internal));
    } else {
      const std::string text = store_->get(kIdKey, deadline);
      if (text.size() != sizeof id.internal) {
        fail(ErrorKind::kSystem, "fused: the store holds no NCCL id");
      }
      std::memcpy(id.internal, text.data(), text.size());
    }
    comm_ = std::make_unique<Communicator>(nccl_, id, rank_, size_, deadline);
  }
  compute_ = make_stream(cuda_);
  wire_stream_ = make_stream(cuda_);
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
    make_arena(deadline);
  } catch (const Error&) {
    comm_->abort(); // it may still be at work on the arena
    release_arena();
    throw;
  }
  watchdog_ = std::thread([this] { watch(); });
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
  cuda_.stream_synchronize(wire_stream_.get());
  cuda_.stream_synchronize(compute_.get());
  cuda_.set_device(before);
  // Now, since tensors in the arena keep the engine.
  std::deque<OperationPtr> held;
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    held.swap(abandoned_);
  }
  for (const OperationPtr& operation : held) {
    operation->release_tensors();
  }
}

CudaEngine::~CudaEngine() {
  close();
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  release_arena();
  cuda_.set_device(before);
}

// What would otherwise show as a hang.
void CudaEngine::compare_settings(const Deadline& deadline) {
  const std::string mine = formatted(
      "cuda_chunk_bytes={}, cuda_arena_bytes={}, block_skip={}, block_size={}, "
      "FUSEDPG_CUDA_MULTIMEM={}, NCCL {}{}, direct path built with NCCL {}",
      settings_.cuda_chunk_bytes,
      settings_.cuda_arena_bytes,
      block_skip_name(settings_.block_skip),
      settings_.block_size,
      settings_.cuda_multimem,
      nccl_.version,
      ring_ ? " (patched ring)" : "",
      cuda_.direct_nccl_version);
  store_->set(formatted("{}{}", kSettingsKey, rank_), mine);
  for (int p = 0; p < size_; ++p) {
    std::string theirs;
    try {
      theirs = store_->get(formatted("{}{}", kSettingsKey, p), deadline);
    } catch (const std::exception&) {
      if (!deadline.expired()) {
        throw;
      }
      fail(
          ErrorKind::kTimeout,
          "fused: rank {} has not come to its first fused operation on a GPU "
          "within {} ms",
          p,
          deadline.timeout().count());
    }
    if (theirs != mine) {
      fail(
          ErrorKind::kMismatch,
          "fused: ranks have different settings; rank {}: {}; rank {}: {}",
          rank_,
          mine,
          p,
          theirs);
    }
  }
}

uint64_t CudaEngine::capture_of(Stream stream) const {
  const DeviceScope scope(cuda_, device_);
  return cuda::capture_of(cuda_, stream);
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
  operation->facts = facts;
  operation->sequence = ++sequence_;
  operation->summary = describe(facts) + details;
  operation->deadline_ = Deadline(submission.timeout);
  operation->tensors_ = submission.tensors;
  try {
    operation->end_ = make_event(cuda_);
    operation->captured_ = capture != 0;
    ever_captured_ = ever_captured_ || operation->captured_;
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
  } catch (const Error& error) {
    // Other ranks wait for what was not enqueued.
    fail_engine(
        error.kind(),
        formatted(
            "{} [{}, sequence {}, rank {}]",
            error.what(),
            operation->summary,
            operation->sequence,
            rank_));
    {
      std::lock_guard<std::mutex> watch_lock(watch_mutex_);
      abandoned_.push_back(operation);
    }
    check_failed(); // which is not this error, if that is its consequence
  }
  if (operation->captured_) {
    last_captured_ = operation;
    captured_slots_.push_back(operation->slot_);
    operation->complete(nullptr);
    return operation;
  }
  last_ = operation;
  {
    std::lock_guard<std::mutex> watch_lock(watch_mutex_);
    (failed_ ? abandoned_ : in_flight_).push_back(operation);
  }
  check_failed();
  watch_changed_.notify_all();
  return operation;
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
  // The kernels stop waiting for their peers, before anybody hears of it.
  __atomic_store_n(&flags_->stop, 1, __ATOMIC_RELEASE);
  if (comm_) {
    comm_->abort();
  }
  const auto error = std::make_exception_ptr(Error(kind, message));
  for (const OperationPtr& operation : outstanding) {
    operation->complete(error);
  }
  // Of one failure all ranks hear from the rank that had it.
  if (size_ > 1 && kind != ErrorKind::kAborted &&
      kind != ErrorKind::kPeerFailed) {
    // The store may have gone with its host.
    ask([key = kFailedKey,
         text = formatted("rank {}: {}", rank_, message)](Rendezvous& store) {
      store.set(key, text);
      return std::string();
    }).wait_for(kStorePatience);
  }
}

void CudaEngine::abort(const std::string& reason) {
  fail_engine(ErrorKind::kAborted, reason);
}

std::future<std::string> CudaEngine::ask(Question question) const {
  std::packaged_task<std::string()> task(
      [store = store_, question = std::move(question)] {
        return question(*store);
      });
  std::future<std::string> answer = task.get_future();
  std::thread(std::move(task)).detach();
  return answer;
}

std::optional<std::string> CudaEngine::ask_within(
    milliseconds patience,
    Question question) {
  const auto answered = [this](milliseconds within) {
    return asked_.wait_for(within) == std::future_status::ready;
  };
  if (asked_.valid() && !answered(milliseconds(0))) {
    return std::nullopt;
  }
  asked_ = ask(std::move(question));
  return answered(patience) ? std::optional(asked_.get()) : std::nullopt;
}

// A rank's facts, and what it calls them.
CudaEngine::Said CudaEngine::tell_ranks(
    uint64_t sequence,
    const OpDescriptor& mine,
    const std::string& summary) {
  std::string text(sizeof mine, '\0');
  std::memcpy(text.data(), &mine, sizeof mine);
  text += summary;
  const auto tell = [=, size = size_, me = rank_](Rendezvous& store) {
    const auto key = [&](int p) {
      return formatted("cuda/said/{}/{}", sequence, p);
    };
    store.set(key(me), text);
    const Deadline deadline(kAskRanks);
    std::string all;
    std::string first;
    for (int p = 0; p < size; ++p) {
      std::string said = "does not answer";
      try {
        const std::string theirs = store.get(key(p), deadline);
        OpDescriptor there;
        if (theirs.size() >= sizeof there) {
          std::memcpy(&there, theirs.data(), sizeof there);
          said = theirs.substr(sizeof there);
          const bool known =
              mine.op != OpCode::kNone && there.op != OpCode::kNone;
          const std::string what = known ? difference(mine, there) : "";
          if (first.empty() && !what.empty()) {
            first = formatted(
                ", rank {} (here) and rank {} (there) in {}", me, p, what);
          }
        }
      } catch (const std::exception&) {
      }
      all += formatted("{}rank {}: {}", p == 0 ? "" : "; ", p, said);
    }
    return first + kSaidEnd + all;
  };
  const auto answer = ask_within(kAskRanks + kStorePatience, tell);
  if (!answer) {
    return {"unknown, the store does not answer", ""};
  }
  const size_t end = answer->find(kSaidEnd);
  return {answer->substr(end + 1), answer->substr(0, end)};
}

milliseconds CudaEngine::look() {
  OperationPtr first;
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    if (in_flight_.empty()) {
      return milliseconds(0);
    }
    first = in_flight_.front();
  }
  const std::string where = formatted(
      "{} (sequence {}) on rank {} of {}",
      first->summary,
      first->sequence,
      rank_,
      size_);
  // Before the flag, which an operation sets before it ends.
  const int state = cuda_.event_query(first->end_.get());
  const uint64_t disagreed =
      __atomic_load_n(&flags_->mismatch, __ATOMIC_ACQUIRE);
  // Not if the first one is only about to be completed.
  const bool later = state == kSuccess && disagreed > first->sequence;
  if (disagreed != 0 && !later) {
    // Of what a graph holds, the facts are not known any more.
    OpDescriptor facts;
    std::string summary = first->summary;
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      for (const OperationPtr& one : in_flight_) {
        if (one->sequence == disagreed) {
          facts = one->facts;
          summary = one->summary;
        }
      }
    }
    const Said said = tell_ranks(disagreed, facts, summary);
    fail_engine(
        ErrorKind::kMismatch,
        formatted(
            "fused: ranks disagree about operation {} of the group{}; {}. "
            "Every rank must call the same operations in the same order "
            "with the same sizes, types and hyperparameters",
            disagreed,
            said.difference,
            said.all));
    return kLook;
  }
  const std::string news = comm_ ? comm_->async_error() : "";
  if (!news.empty()) {
    fail_engine(
        ErrorKind::kPeerDead,
        formatted("fused: {}: NCCL reports: {}", where, news));
    return kLook;
  }
  if (state == kSuccess) {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      if (in_flight_.empty() || in_flight_.front() != first) {
        return kLook; // failed meanwhile
      }
      in_flight_.pop_front();
    }
    first->complete(nullptr);
    return kLook / kLook.count();
  }
  if (state != kNotReady) {
    fail_engine(
        ErrorKind::kSystem,
        formatted(
            "fused: {}: CUDA error: {}", where, cuda_.error_string(state)));
    return kLook;
  }
  const milliseconds timeout = first->deadline_.timeout();
  if (first->deadline_.expired()) {
    fail_engine(
        ErrorKind::kTimeout,
        formatted(
            "fused: {} did not finish within {} ms. Where ranks are: {}",
            where,
            timeout.count(),
            tell_ranks(first->sequence, first->facts, first->summary).all));
    return kLook;
  }
  const auto waited = Clock::now() - first->begun_;
  if (waited > kSuspicious && check_peers_) {
    try {
      check_peers_(where);
    } catch (const Error& error) {
      fail_engine(error.kind(), error.what());
      return kLook;
    }
  }
  if (size_ > 1 && waited > kSuspicious) {
    const auto failed = ask_within(kLook * 50, [](Rendezvous& store) {
      return store.has(kFailedKey) ? store.get(kFailedKey, Deadline(kAskRanks))
                                   : std::string();
    });
    if (failed && !failed->empty()) {
      fail_engine(
          ErrorKind::kPeerFailed,
          formatted("fused: {}: another rank has failed: {}", where, *failed));
    }
  }
  return waited > kSuspicious ? kLook * 50 : kLook;
}

void CudaEngine::watch() {
  cuda_.set_device(device_);
  std::unique_lock<std::mutex> lock(watch_mutex_);
  while (!stopping_) {
    if (in_flight_.empty()) {
      watch_changed_.wait(
          lock, [this] { return stopping_ || !in_flight_.empty(); });
      continue;
    }
    lock.unlock();
    milliseconds pause = kLook;
    try {
      pause = look();
    } catch (const std::exception& error) {
      fail_engine(
          ErrorKind::kSystem, formatted("fused: watchdog: {}", error.what()));
    }
    lock.lock();
    if (!stopping_ && pause.count() > 1) {
      watch_changed_.wait_for(lock, pause, [this] { return stopping_; });
    }
  }
}

void CudaEngine::shutdown(const Deadline& deadline) {
  OperationPtr last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last = last_;
  }
  if (last) {
    last->wait_for(
        std::chrono::duration_cast<milliseconds>(deadline.remaining()));
  }
  if (failed() || !comm_) {
    return;
  }
  try {
    comm_->finish(deadline);
  } catch (const Error&) {
    comm_->abort(); // a peer has gone first
  }
}

} // namespace fusedpg::cuda
