#include "c10d/process_group_fused.hpp"

#include <unistd.h>

#include <set>
#include <thread>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/abortable.hpp"
#include "c10d/errors.hpp"
#include "c10d/fresh_thread_state.hpp"
#include "c10d/gil.hpp"
#include "c10d/store_rendezvous.hpp"

namespace fusedpg {
namespace {

// For outstanding work on the GPU when a group is shut down.
constexpr std::chrono::milliseconds kShutdownPatience{10000};

// Groups to shut down when the interpreter exits.
struct Registry {
  std::mutex mutex;
  std::set<ProcessGroupFused*> groups;
};

Registry& registry() {
  static auto* r = new Registry();
  return *r;
}

} // namespace

ProcessGroupFused::ProcessGroupFused(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options)
    : Backend(rank, size),
      owner_(getpid()),
      store_(store),
      options_(std::move(options)),
      settings_(translate([&] { return resolve(options_->engine); })),
      timeout_(options_->timeout),
      kernels_(translate([&]() -> const kernels::Table& {
        return select_kernels(settings_);
      })),
      executor_(std::make_shared<Executor>()),
      net_skip_{settings_.block_skip, settings_.block_size, {}},
      cuda_skip_{settings_.block_skip, settings_.block_size, {}} {
  const Deadline deadline(options_->timeout);
  translate([&] {
    StoreRendezvous rendezvous(store_);
    Bootstrap bootstrap(rank, size, settings_);
    bootstrap.meet(rendezvous, deadline);
    // What others keep in the store must not be an earlier group's either.
    own_store_ = c10::make_intrusive<c10d::PrefixStore>(
        "fusedpg/" + bootstrap.id(), store_);
    local_world_size_ = bootstrap.local_world_size();
    ranks_share_hosts_ = bootstrap.ranks_share_hosts();
    if (bootstrap.single_host()) {
      engine_ = std::make_unique<Engine>(
          rank, bootstrap, settings_, stats_, deadline);
      engine_->set_describe(one_line);
    }
  });
  cuda_ = std::make_unique<CudaGroup>(
      own_store_,
      rank,
      size,
      settings_,
      spans_hosts(),
      [this](const std::string& what) {
        if (engine_ != nullptr) {
          engine_->domain().check_peers(
              what, [this](int p) { return p != getRank(); });
        }
      },
      options_->cpu_as_cuda);
  if (spans_hosts()) {
    log_once(
        "a group spans several hosts: its collectives use Gloo, but for fused "
        "optimizer steps and reductions that skip blocks of zeros");
    delegate();
  } else if (settings_.log_level > 0 && rank == 0) {
    log_line(
        c10::str(
            "group of ",
            size,
            " ranks in shared memory, ",
            engine_->threads(),
            " thread(s) a rank, ",
            kernels_.name,
            " kernels"));
  }
  init();
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.groups.insert(this);
}

ProcessGroupFused::~ProcessGroupFused() {
  {
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.groups.erase(this);
  }
  if (forked()) {
    // A forked child has none of the threads these would join.
    (void)cuda_.release();
    (void)delegate_.release();
    (void)transport_.release();
    (void)mailbox_.release();
    (void)engine_.release();
    (void)new std::shared_ptr<Executor>(executor_);
    return;
  }
  const ReleaseGil release;
  shutdown();
  cuda_.reset();
  mailbox_.reset();
  executor_.reset();
  engine_.reset();
  transport_.reset();
  delegate_.reset();
}

ProcessGroupFused::WorkPtr ProcessGroupFused::enqueue(
    const Call& call,
    const Tensors& inputs,
    const Tensors& outputs,
    std::function<void(uint64_t)> operation) {
  check_open(call.title);
  if (!call.async_op) {
    at::RecordFunction record(at::RecordScope::USER_SCOPE);
    if (record.isActive()) {
      record._setAsync(); // as a Work records itself
      const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
      record.before(
          call.title,
          c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
    }
    std::exception_ptr error;
    translate([&] {
      executor_->run([&](uint64_t ticket) {
        error = capture([&] { operation(ticket); });
      });
    });
    if (error) {
      std::rethrow_exception(error);
    }
    return nullptr;
  }
  auto work = c10::make_intrusive<WorkFused>(
      getRank(), call.type, call.title, inputs, outputs);
  const uint64_t ticket = translate([&] {
    return executor_->submit(
        [work, operation = std::move(operation)](uint64_t ticket) mutable {
          const FreshThreadState state;
          const auto error = capture([&] { operation(ticket); });
          // Whoever waits may end the process at once: tensors go first.
          operation = nullptr;
          work->complete(error);
        });
  });
  work->set_executor(executor_, ticket);
  return remember(work);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::run(
    const Call& call,
    const Tensors& inputs,
    const Tensors& outputs,
    Engine::Operation operation) {
  return enqueue(
      call,
      inputs,
      outputs,
      [this, timeout = call.timeout, operation = std::move(operation)](
          uint64_t ticket) { engine_->execute(operation, ticket, timeout); });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::run_delegated(
    const Call& call,
    const Tensors& inputs,
    const Tensors& outputs,
    std::function<WorkPtr(c10d::Backend&)> operation) {
  return enqueue(
      call,
      inputs,
      outputs,
      [this, operation = std::move(operation)](uint64_t) {
        if (const auto work = operation(delegate())) {
          work->wait();
        }
      });
}

namespace {
// Works issued between startCoalescing and endCoalescing on this thread.
struct Coalescing {
  const ProcessGroupFused* group = nullptr;
  std::vector<ProcessGroupFused::WorkPtr> works;
};
thread_local Coalescing coalescing;
} // namespace

bool ProcessGroupFused::is_coalescing() const {
  return coalescing.group == this;
}

void ProcessGroupFused::check_not_coalescing(const char* title) const {
  TORCH_CHECK_VALUE(
      !is_coalescing(),
      title,
      " of tensors on a GPU cannot be coalesced with other operations; call it "
      "before or after them");
}

ProcessGroupFused::WorkPtr ProcessGroupFused::remember(WorkPtr work) {
  if (is_coalescing() && work) {
    coalescing.works.push_back(work);
  }
  return work;
}

void ProcessGroupFused::startCoalescing() {
  // What an exception has left behind is over.
  coalescing.works.clear();
  coalescing.group = this;
  if (const auto nccl = cuda_->inner(); nccl && nccl->supportsCoalescing()) {
    nccl->startCoalescing();
  }
}

ProcessGroupFused::WorkPtr ProcessGroupFused::endCoalescing() {
  TORCH_CHECK(
      is_coalescing(),
      "fused: endCoalescing without startCoalescing on this group and thread");
  if (const auto nccl = cuda_->inner(); nccl && nccl->supportsCoalescing()) {
    if (const auto work = nccl->endCoalescing()) {
      remember(work);
    }
  }
  coalescing.group = nullptr;
  return c10::make_intrusive<WorkGroup>(
      getRank(), std::exchange(coalescing.works, {}));
}

ProcessGroupFused::WorkPtr ProcessGroupFused::ordinary(
    const at::Tensor& tensor,
    const CudaGroup::Ordinary& call) {
  check_open("fused: a collective of CUDA tensors");
  return remember(cuda_->ordinary(tensor, timeout_.load(), call));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFused::abortable_gloo(
    const char* prefix) {
  return c10::make_intrusive<AbortableBackend>(make_delegate(
      "cpu",
      c10::make_intrusive<c10d::PrefixStore>(prefix, own_store_),
      getRank(),
      getSize(),
      timeout_.load()));
}

c10d::Backend& ProcessGroupFused::delegate() {
  if (!delegate_) { // in the constructor
    delegate_ = abortable_gloo("fusedpg-delegate");
  }
  return *delegate_;
}

namespace {

// Gloo's rendezvous cannot be aborted, so ranks begin it when all are there.
void await_all(
    c10d::Store& store,
    int rank,
    int size,
    const Deadline& deadline,
    const std::function<void()>& check) {
  constexpr std::chrono::milliseconds kLook{5};
  const auto key = [](int p) { return str("transport/", p); };
  store.set(key(rank), "1");
  for (int p = 0; p < size; ++p) {
    while (!store.check({key(p)})) {
      check();
      if (deadline.expired()) {
        fail(
            ErrorKind::kTimeout,
            "fused: timeout after ",
            deadline.timeout().count(),
            " ms on rank ",
            rank,
            " waiting for rank ",
            p,
            ", which did not reach the first operation that connects the "
            "hosts");
      }
      std::this_thread::sleep_for(kLook);
    }
  }
  check();
}

} // namespace

NetContext ProcessGroupFused::net_context(
    uint64_t ticket,
    std::chrono::milliseconds timeout,
    OpCode op) {
  const auto check_aborted = [this] {
    if (delegate_->getError() != c10d::ErrorType::SUCCESS) {
      fail(
          ErrorKind::kAborted,
          "fused: the group was aborted on rank ",
          getRank(),
          " and must be destroyed");
    }
  };
  check_aborted();
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  if (!transport_) {
    await_all(
        *own_store_, getRank(), getSize(), Deadline(timeout), check_aborted);
    transport_ =
        std::make_unique<BackendTransport>(abortable_gloo("fusedpg-transport"));
  }
  return {
      *transport_,
      kernels_,
      net_pool_,
      Deadline(timeout),
      ticket,
      op,
      ranks_share_hosts_};
}

bool ProcessGroupFused::forked() const {
  return getpid() != owner_;
}

void ProcessGroupFused::check_open(const char* op) const {
  if (forked()) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            op,
            ": this group belongs to the process that forked this one; create "
            "a group in each process"));
  }
  if (closed_.load(std::memory_order_acquire)) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            op, ": this group was shut down or destroyed on rank ", rank_));
  }
}

void ProcessGroupFused::check_root(const char* op, int64_t root) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < getSize(),
      "fused: ",
      op,
      ": root ",
      root,
      " is not a rank of this group of ",
      getSize());
}

void ProcessGroupFused::check_count(
    const char* op,
    const char* what,
    size_t found,
    size_t expected) const {
  TORCH_CHECK_VALUE(
      found == expected,
      "fused: ",
      op,
      ": expected ",
      expected,
      " ",
      what,
      ", found ",
      found);
}

Mailbox& ProcessGroupFused::mailbox() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  check_open("fused:send/recv");
  if (!mailbox_) {
    mailbox_ = std::make_unique<Mailbox>(engine_->domain(), kernels_);
  }
  return *mailbox_;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFused::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto it = std::find(ranks.begin(), ranks.end(), getRank());
  if (it == ranks.end()) {
    return nullptr;
  }
  // torch may pass another backend's options: only the common part counts.
  auto options = c10::make_intrusive<Options>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  return c10::make_intrusive<ProcessGroupFused>(
      store,
      static_cast<int>(it - ranks.begin()),
      static_cast<int>(ranks.size()),
      options);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFused::shrink(
    const std::vector<int64_t>& ranks_to_exclude,
    int /* shrink_flags */,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  std::vector<int> ranks;
  for (int p = 0; p < getSize(); ++p) {
    if (std::count(ranks_to_exclude.begin(), ranks_to_exclude.end(), p) == 0) {
      ranks.push_back(p);
    }
  }
  const std::string prefix = c10::str("fusedpg-shrink-", ++children_);
  return split(
      c10::make_intrusive<c10d::PrefixStore>(prefix, store_), ranks, opts);
}

void ProcessGroupFused::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
}

uint64_t ProcessGroupFused::getSequenceNumberForGroup() {
  return executor_->tickets();
}

c10d::ErrorType ProcessGroupFused::getError() {
  ErrorKind kind;
  if (const auto cuda = cuda_->engine(); cuda && cuda->failed()) {
    kind = cuda->failure_kind();
  } else if (engine_ != nullptr && engine_->domain().failed()) {
    kind = engine_->domain().failure_kind();
  } else if (spans_hosts()) {
    return delegate().getError();
  } else {
    return c10d::ErrorType::SUCCESS;
  }
  switch (kind) {
    case ErrorKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerDead:
    case ErrorKind::kPeerFailed:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

// What connects the hosts holds the mutex, and looks for the delegate's abort.
void ProcessGroupFused::abort_delegate() {
  if (!spans_hosts()) {
    return;
  }
  delegate_->abort();
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  if (transport_) {
    transport_->abort();
  }
}

void ProcessGroupFused::abort() {
  if (forked()) {
    return;
  }
  const ReleaseGil release;
  cuda_->abort();
  abort_delegate();
  if (engine_ != nullptr) {
    engine_->abort(*executor_);
  }
}

void ProcessGroupFused::shutdown() {
  if (forked() || closed_.exchange(true)) {
    return;
  }
  const ReleaseGil release;
  cuda_->shutdown(kShutdownPatience);
  executor_->stop();
  {
    std::lock_guard<std::mutex> lock(mailbox_mutex_);
    if (mailbox_) {
      mailbox_->stop();
    }
  }
  if (engine_ != nullptr) {
    engine_->domain().leave();
  }
  std::lock_guard<std::mutex> lock(delegate_mutex_);
  if (delegate_) {
    delegate_->shutdown();
  }
}

void ProcessGroupFused::shutdown_at_exit() {
  if (forked()) {
    return;
  }
  const ReleaseGil release;
  if (!executor_->drain(std::chrono::milliseconds(1000))) {
    abort_delegate();
    if (engine_ != nullptr) {
      engine_->domain().request_abort();
    }
  }
  shutdown();
}

ProcessGroupFused::Info ProcessGroupFused::info() {
  Info i;
  i.engine = spans_hosts() ? "gloo" : "shm";
  i.local_world_size = local_world_size_;
  i.threads = spans_hosts() ? 1 : engine_->threads();
  i.isa = kernels_.name;
  i.arena_reserved =
      spans_hosts() ? 0 : engine_->domain().arena()->heap_bytes();
  i.arena_used = spans_hosts() ? 0 : engine_->domain().arena()->used_bytes();
  i.sequence_number = executor_->tickets();
  i.failed = spans_hosts() ? delegate().getError() != c10d::ErrorType::SUCCESS
                           : engine_->domain().failed();
  i.cuda_arena = settings_.cuda_arena_bytes;
  if (const auto cuda = cuda_->engine()) {
    i.failed = i.failed || cuda->failed();
    i.nccl_version = cuda->nccl().version;
    i.cuda_path = cuda->path_of_last_step();
  }
  return i;
}

ProcessGroupFused* find_group(const std::string& name) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (ProcessGroupFused* group : r.groups) {
    if (group->getBackendOptions()->group_name == name) {
      return group;
    }
  }
  return nullptr;
}

void shutdown_all_groups() {
  Registry& r = registry();
  std::vector<ProcessGroupFused*> groups;
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    groups.assign(r.groups.begin(), r.groups.end());
  }
  for (ProcessGroupFused* group : groups) {
    group->shutdown_at_exit();
  }
}

} // namespace fusedpg
