// How calls come to the delegate and to the engine, and how those are made and end.

#include "c10d/routes/cuda.hpp"

#include <future>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/lock_within.hpp"
#include "c10d/delegate.hpp"
#include "c10d/delegate_carrier.hpp"
#include "c10d/errors.hpp"
#include "c10d/gil.hpp"
#include "c10d/store_rendezvous.hpp"
#include "c10d/work_cuda.hpp"
#include "cuda/block_list.hpp"

namespace fusedpg {
namespace {

using cuda::CudaEngine;

// The calls that the delegate holds back on this thread, from the first one
// between startCoalescing and endCoalescing: NCCL's groups belong to threads.
struct Region {
  const CudaRoute* group = nullptr;
  c10::intrusive_ptr<c10d::Backend> delegate;
  std::optional<CudaOrder::Place> place;
  std::shared_ptr<void> token; // the group knows by it that this lives
};
thread_local Region region;

// The engine's own calls of NCCL would be held back, too.
void check_not_held_back() {
  TORCH_CHECK_VALUE(
      !region.delegate,
      "fused: a fused operation on a GPU was called between operations that "
      "this thread coalesces, in this or another group; call it before or "
      "after them");
}

// For outstanding work when a group is shut down.
constexpr std::chrono::milliseconds kShutdownPatience{10000};
// For the delegate's own end. NCCL waits for its kernels, and for graphs that
// hold them as long as those live.
constexpr std::chrono::milliseconds kDelegateEnd{10000};

// Calls what may hang inside NCCL on a thread that nobody waits for any longer
// than that. The engine is kept until then: graphs may use its memory for as long
// as NCCL's communicator lives.
void end_within(
    std::chrono::milliseconds patience,
    const c10::intrusive_ptr<c10d::Backend>& delegate,
    void (c10d::Backend::*end)(),
    std::shared_ptr<CudaEngine> engine) {
  std::packaged_task<void()> task(
      [delegate, end, engine = std::move(engine)]() mutable {
        ((*delegate).*end)();
        engine.reset(); // by its group, as a rule: this thread may end late
      });
  std::future<void> ended = task.get_future();
  std::thread(std::move(task)).detach();
  if (ended.wait_for(patience) == std::future_status::ready) {
    try {
      ended.get();
    } catch (const std::exception& error) {
      log_once(formatted(
          "the end of a group's ordinary collectives of CUDA tensors raised: "
          "{}",
          one_line(error)));
    }
  } else {
    log_once(
        "an ordinary collective of CUDA tensors does not come to an end with "
        "its group, or a graph holds it; left to a thread");
  }
}

} // namespace

const cuda::CudaApi& CudaRoute::cuda_api() const {
  return cuda::load_cuda_api(group_.settings.cuda_lib);
}

// Memory that all GPUs of the group see, cut into tensors.
class CudaRoute::Arena {
 public:
  explicit Arena(std::shared_ptr<CudaEngine> engine)
      : engine_(std::move(engine)),
        blocks_(engine_->arena_bytes()) {}

  std::optional<at::Tensor> allocate(
      const std::shared_ptr<Arena>& self,
      at::IntArrayRef sizes,
      const at::TensorOptions& options) {
    const size_t bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
        options.dtype().itemsize();
    const auto offset = blocks_.allocate(bytes);
    if (!offset) {
      return std::nullopt;
    }
    return at::from_blob(
        static_cast<char*>(engine_->arena()) + *offset,
        sizes,
        [self, offset = *offset](void*) { self->blocks_.release(offset); },
        options);
  }

 private:
  const std::shared_ptr<CudaEngine> engine_; // tensors outlive the group
  cuda::BlockList blocks_;
};

CudaRoute::CudaRoute(
    Group& group,
    std::string name,
    bool spans_hosts,
    CudaEngine::CheckPeers check_peers,
    MakeDelegate make_delegate,
    bool pretend)
    : Forwarding(group),
      name_(std::move(name)),
      spans_hosts_(spans_hosts),
      check_peers_(std::move(check_peers)),
      make_delegate_(std::move(make_delegate)),
      pretend_(pretend) {}

CudaRoute::~CudaRoute() {
  // A Work may keep the engine for longer than the group lives.
  if (engine_) {
    engine_->close();
    if (engine_->has_unseen_graphs()) {
      CudaEngine::leak(engine_); // they may be launched at any time
    }
  }
}

CudaRoute::BackendPtr CudaRoute::delegate_locked() {
  if (auto made = made_delegate()) {
    return made;
  }
  // A client of its own: it holds it while it waits for rank 0's NCCL, and by
  // the other one ranks tell their failures meanwhile.
  auto made = make_delegate_(
      c10::make_intrusive<c10d::PrefixStore>(
          "fusedpg-cuda", own_client(group_.store)));
  std::lock_guard<std::mutex> lock(made_mutex_);
  return delegate_ = made;
}

void CudaRoute::check_left_behind() {
  std::lock_guard<std::mutex> lock(made_mutex_);
  if (!left_behind_.empty()) {
    fail(
        ErrorKind::kSystem,
        "fused: an earlier start of the CUDA engine has left a call inside "
        "NCCL, which may use the group's communicator at any time; destroy "
        "the group and make another one ({})",
        left_behind_);
  }
}

void CudaRoute::check_not_ending() const {
  if (ending_) {
    fail(
        ErrorKind::kAborted,
        "fused: the group was aborted or destroyed on rank {}",
        rank_);
  }
}

// What the delegate holds back is its own, not the thread's.
void CudaRoute::check_coalescer() const {
  TORCH_CHECK_VALUE(
      holds_back() || held_back_.expired(),
      "fused: an operation on a GPU was called while another thread coalesces "
      "operations of the same group; call it before or after them");
}

std::shared_ptr<CudaEngine> CudaRoute::engine_for(const at::Tensor& tensor) {
  const CudaStreams streams(tensor.device(), pretend_);
  if (const auto made = engine()) {
    TORCH_CHECK_VALUE(
        made->device() == streams.index(),
        formatted(
            "fused: the group works on GPU {} on rank {}, but got a tensor on "
            "GPU {}; use one GPU a rank",
            made->device(),
            rank_,
            streams.index()));
    return made;
  }
  check_not_held_back();
  check_coalescer();
  if (!pretend_) {
    TORCH_CHECK_VALUE(
        !streams.capturing(),
        "fused: the first fused operation of a group makes its communicator "
        "and buffers, which a graph cannot hold; call one before the capture");
  }
  // Keys of its own for each attempt. torch's rendezvous of symmetric memory
  // holds the group's client while it waits.
  const auto client = group_.settings.cuda_arena_bytes == 0
      ? group_.store
      : own_client(group_.store);
  const auto store =
      std::make_shared<StoreRendezvous>(c10::make_intrusive<c10d::PrefixStore>(
          formatted("fusedpg-engine/{}", attempts_), client));
  const auto made = translate([&] {
    try {
      check_not_ending();
      check_left_behind();
      const cuda::CudaApi& cuda = cuda_api();
      const cuda::NcclApi& nccl = cuda::load_nccl_api(group_.settings.nccl_lib);
      return std::make_shared<CudaEngine>(
          cuda,
          nccl,
          rank_,
          size_,
          streams.index(),
          group_.settings,
          spans_hosts_,
          store,
          [this](const std::string& what) {
            if (!engine()) { // nothing but this ends a start
              check_not_ending();
            }
            check_peers_(what);
          },
          Deadline(group_.timeout.load()),
          size_ == 1 ? nullptr
                     : std::make_unique<DelegateCarrier>(
                           delegate_locked(), streams, cuda, name_),
          allocator(streams));
    } catch (const std::exception& error) {
      if (dynamic_cast<const cuda::CallLeftBehind*>(&error) != nullptr) {
        std::lock_guard<std::mutex> lock(made_mutex_);
        left_behind_ = one_line(error);
      }
      const auto* known = dynamic_cast<const Error*>(&error);
      if (known == nullptr || known->kind() != ErrorKind::kInvalid) {
        ++attempts_;
        CudaEngine::tell_failure(store, rank_, one_line(error));
      }
      throw;
    }
  });
  if (group_.settings.log_level > 0 && rank_ == 0) {
    const int version = made->nccl().version;
    log_line(formatted(
        "CUDA engine on NCCL {}.{}.{} ({}), {}{}{}",
        version / 10000,
        version / 100 % 100,
        version % 100,
        made->nccl().path,
        made->has_ring()              ? "patched ring"
            : made->nccl().has_ring() ? "stock path (a patched ring is there, "
                                        "but not asked for, or torch "
                                        "has loaded another NCCL)"
                                      : "stock path",
        made->arena() != nullptr ? ", direct path over " : "",
        made->arena() != nullptr
            ? formatted("{} MiB of symmetric memory", made->arena_bytes() >> 20)
            : std::string()));
  }
  if (made->arena() != nullptr) {
    arena_ = std::make_shared<Arena>(made);
  }
  std::lock_guard<std::mutex> lock(made_mutex_);
  return engine_ = made;
}

// torch's: it gives back what it has cached before there is no memory left.
cuda::Allocate CudaRoute::allocator(const CudaStreams& streams) const {
  if (pretend_) {
    return nullptr;
  }
  return [streams, &cuda = cuda_api()](size_t bytes, cuda::Stream stream) {
    const cuda::RelaxedCapture relaxed(cuda);
    const CudaStreams::Scope scope(streams, streams.external(stream));
    try {
      const auto memory = std::make_shared<at::Tensor>(at::empty(
          {static_cast<int64_t>(bytes)},
          at::TensorOptions().dtype(at::kByte).device(streams.device())));
      return cuda::DeviceMemory(memory, memory->data_ptr());
    } catch (const c10::OutOfMemoryError& error) {
      cuda::fail_allocation(bytes, one_line(error).c_str());
    }
  };
}

WorkPtr CudaRoute::delegate(const at::Tensor& tensor, Delegated call) {
  group_.check_open("fused: a collective of CUDA tensors");
  std::lock_guard<std::mutex> lock(mutex_);
  check_coalescer();
  translate([&] {
    check_not_ending();
    check_left_behind();
  });
  const auto delegate = delegate_locked();
  const auto engine = this->engine();
  const CudaStreams streams(tensor.device(), pretend_);
  // Calls that are held back are waited for as a whole.
  const auto remembered = [this](const WorkPtr& work) {
    return holds_back() ? work : group_.remember(work);
  };
  const bool coalescing =
      group_.is_coalescing() && delegate->supportsCoalescing();
  if (coalescing && region.group != this) {
    delegate->startCoalescing();
    region = {this, delegate, std::nullopt, std::make_shared<bool>()};
    held_back_ = region.token;
  }
  if (pretend_) {
    if (engine) {
      translate([&] { engine->drain(group_.timeout.load()); });
    }
    return remembered(call(*delegate));
  }
  std::optional<CudaOrder::Place> alone;
  auto& place = coalescing ? region.place : alone;
  translate([&] { order_.before_ordinary(streams, engine.get(), place); });
  WorkPtr work;
  {
    const CudaStreams::Scope scope(streams, place->stream);
    work = call(*delegate);
  }
  if (!coalescing) {
    translate([&] { order_.after_ordinary(engine.get(), *place, work); });
  }
  return remembered(work);
}

WorkPtr CudaRoute::endCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!holds_back()) {
    return nullptr;
  }
  const Region ended = std::exchange(region, {});
  if (!ended.place) {
    return ended.delegate->endCoalescing();
  }
  const CudaOrder::Place& place = *ended.place;
  WorkPtr work;
  {
    const CudaStreams::Scope scope(place.streams, place.stream);
    work = ended.delegate->endCoalescing();
  }
  translate([&] { order_.after_ordinary(engine().get(), place, work); });
  return work;
}

void CudaRoute::abandon_coalescing() noexcept {
  try {
    // NCCL cannot forget what it was told, and would hold back all that comes
    // later on this thread.
    endCoalescing();
    const Region other = std::exchange(region, {});
    if (!other.delegate) {
      return;
    }
    if (!other.place) {
      other.delegate->endCoalescing();
      return;
    }
    // Its group may have gone, with its order: this stream waits instead.
    WorkPtr work;
    {
      const CudaStreams::Scope scope(other.place->streams, other.place->stream);
      work = other.delegate->endCoalescing();
    }
    CudaOrder().after_ordinary(nullptr, *other.place, work);
    if (work) {
      work->wait();
    }
  } catch (...) {
  }
}

bool CudaRoute::holds_back() const {
  return region.group == this;
}

WorkPtr CudaRoute::submit(
    const at::Tensor& tensor,
    const char* title,
    bool async_op,
    std::vector<at::Tensor> outputs,
    std::shared_ptr<void> tensors,
    const Enqueue& body,
    std::function<void()> after_wait) {
  const CudaStreams streams(tensor.device(), pretend_);
  c10::intrusive_ptr<WorkCuda> work;
  {
    // Behind the delegated collectives so far.
    std::lock_guard<std::mutex> lock(mutex_);
    check_not_held_back();
    check_coalescer();
    const auto engine = engine_for(tensor);
    if (!engine->failed()) { // which says more
      translate([&] { check_not_ending(); });
    }
    Operations operations = translate([&] {
      const cuda::Stream current =
          pretend_ ? streams.current() : order_.before_fused(streams, *engine);
      Operations enqueued = body(
          *engine,
          CudaEngine::Submission{
              current, group_.timeout.load(), std::move(tensors)});
      order_.after_fused();
      return enqueued;
    });
    work = c10::make_intrusive<WorkCuda>(
        rank_,
        title,
        engine,
        streams,
        std::move(operations),
        std::move(outputs),
        std::move(after_wait));
  }
  if (async_op) {
    return work;
  }
  work->wait();
  return nullptr;
}

CudaRoute::BackendPtr CudaRoute::delegate() {
  const ReleaseGil release; // who holds the lock may need it
  std::lock_guard<std::mutex> lock(mutex_);
  translate([&] { check_left_behind(); });
  return delegate_locked();
}

CudaRoute::BackendPtr CudaRoute::made_delegate() {
  std::lock_guard<std::mutex> lock(made_mutex_);
  return delegate_;
}

void CudaRoute::setTimeout(std::chrono::milliseconds timeout) {
  if (const auto made = made_delegate()) {
    made->setTimeout(timeout);
  }
}

std::shared_ptr<CudaEngine> CudaRoute::engine() {
  std::lock_guard<std::mutex> lock(made_mutex_);
  return engine_;
}

std::optional<at::Tensor> CudaRoute::allocate(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  if (group_.settings.cuda_arena_bytes == 0) {
    return std::nullopt;
  }
  std::shared_ptr<Arena> arena;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    engine_for(at::empty({0}, options));
    arena = arena_;
  }
  if (!arena) {
    return std::nullopt;
  }
  auto tensor = arena->allocate(arena, sizes, options);
  if (!tensor) {
    log_once(
        "the arena on the GPU has no room (FUSEDPG_CUDA_ARENA_BYTES); falling "
        "back to ordinary memory, which all ranks have to do alike");
  }
  return tensor;
}

void CudaRoute::end_delegate(void (c10d::Backend::*end)()) {
  BackendPtr made;
  bool left_behind = false;
  {
    std::lock_guard<std::mutex> lock(made_mutex_);
    made = delegate_;
    left_behind = !left_behind_.empty();
  }
  if (made && left_behind) {
    // The call left behind would use a communicator that was freed.
    CudaEngine::leak(std::make_shared<BackendPtr>(made));
  } else if (made) {
    end_within(kDelegateEnd, made, end, engine());
  }
}

void CudaRoute::abort() {
  ending_ = true;
  // Not under the lock, which a call that hangs may hold.
  if (const auto engine = this->engine()) {
    engine->abort(formatted("fused: the group was aborted on rank {}", rank_));
  }
  end_delegate(&c10d::Backend::abort);
}

void CudaRoute::shutdown() {
  ending_ = true;
  const Deadline deadline(kShutdownPatience);
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (!lock_within(lock, deadline)) {
    // A call of another thread hangs inside NCCL: only an abort ends it.
    abort();
    return;
  }
  const auto engine = this->engine();
  if (engine) {
    engine->shutdown(deadline);
  }
  // A shutdown of NCCL would wait for a peer that never comes.
  bool ended = false;
  try {
    ended = !(engine && engine->failed()) && order_.ended(deadline);
  } catch (const std::exception&) { // of a GPU that has failed
  }
  end_delegate(ended ? &c10d::Backend::shutdown : &c10d::Backend::abort);
  order_ = {};
}

} // namespace fusedpg
