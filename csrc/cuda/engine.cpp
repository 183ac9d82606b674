// The CUDA engine: its start, and how operations come to it.

#include "cuda/engine.hpp"

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
      spans_hosts_(spans_hosts),
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
    comm_ = std::make_unique<Communicator>(
        cuda_, nccl_, device_, id, rank_, size_, deadline);
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
    if (ring_) {
      check_ring(deadline);
    }
    make_arena(deadline);
  } catch (const Error&) {
    comm_->abort(); // it may still be at work on the arena
    bury(true);
    throw;
  }
  watchdog_ = std::thread([this] { watch(); });
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

std::vector<std::string> CudaEngine::tell_all(
    const char* key,
    const std::string& mine,
    const Deadline& deadline,
    const char* waiting) {
  store_->set(formatted("{}{}", key, rank_), mine);
  std::vector<std::string> all;
  for (int p = 0; p < size_; ++p) {
    try {
      all.push_back(store_->get(formatted("{}{}", key, p), deadline));
    } catch (const std::exception&) {
      if (!deadline.expired()) {
        throw;
      }
      fail(
          ErrorKind::kTimeout,
          "fused: rank {} has not come to {} on a GPU within {} ms",
          p,
          waiting,
          deadline.timeout().count());
    }
  }
  return all;
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
  } catch (const Error& error) {
    // What was enqueued ends there, but a graph gets no more of it.
    if (operation->end_ && !operation->captured_) {
      cuda_.event_record(operation->end_.get(), compute_.get());
    }
    operation->enqueued_.store(true, std::memory_order_release);
    // Other ranks wait for what was not enqueued.
    fail_engine(
        error.kind(),
        formatted(
            "{} [{}, sequence {}, rank {}]",
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
    captured_slots_.push_back(operation->slot_);
    operation->complete(nullptr);
    return operation;
  }
  last_ = operation;
  check_failed();
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

} // namespace fusedpg::cuda
