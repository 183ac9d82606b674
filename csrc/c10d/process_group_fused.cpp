#include "c10d/process_group_fused.hpp"

#include <cstddef>
#include <cstring>
#include <numeric>
#include <set>

#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/fork.hpp"
#include "c10d/completer.hpp"
#include "c10d/delegate.hpp"
#include "c10d/errors.hpp"
#include "c10d/gil.hpp"
#include "c10d/store_rendezvous.hpp"
#include "collectives/hosts_engine.hpp"
#include "collectives/shm_engine.hpp"

namespace fusedpg {
namespace {

// Groups to shut down when the interpreter exits.
struct Registry {
  std::mutex mutex;
  std::set<ProcessGroupFused*> groups;
};

PerProcess<Registry> registry;

// The default group's ranks leave its store together: for so long they wait for the
// one that keeps it.
constexpr std::chrono::seconds kLeaveTogether{5};

ProcessGroupFused::Announcer& announcer() {
  static auto* registered = new ProcessGroupFused::Announcer();
  return *registered;
}

} // namespace

void ProcessGroupFused::set_announcer(Announcer registered) {
  announcer() = std::move(registered);
}

ProcessGroupFused::ProcessGroupFused(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options,
    Known known)
    : Forwarding(rank, size),
      store_(store),
      options_(std::move(options)),
      group_(
          std::make_unique<Group>(
              rank,
              size,
              translate([&] { return resolve(options_->engine); }),
              options_->timeout,
              options_->serves_gloo() ? Dialect::kGloo : Dialect::kFused)),
      known_(std::move(known)) {
  options_->timeout = bounded(options_->timeout);
  const Deadline deadline(options_->timeout);
  const auto meet = [&](bool again) {
    StoreRendezvous rendezvous(store_);
    Bootstrap bootstrap(rank, size, group_->settings);
    // The keys of the group must not be an earlier group's either. Operations
    // between hosts need the store while another thread may wait for a key.
    const auto own_store = [&](const auto& client) {
      group_->store = c10::make_intrusive<c10d::PrefixStore>(
          "fusedpg/" + bootstrap.id(), client);
    };
    if (again) {
      bootstrap.meet_again(known_.links, options_->group_name, known_.ranks);
    } else {
      bootstrap.meet(rendezvous, deadline);
      known_.ranks.resize(size);
      std::iota(known_.ranks.begin(), known_.ranks.end(), 0);
    }
    local_ranks_ = bootstrap.host_ranks();
    std::unique_ptr<Engine> engine;
    if (bootstrap.single_host()) {
      engine = std::make_unique<ShmEngine>(*group_, bootstrap, deadline);
      own_store(store_);
    } else {
      group_->client = CommonClient::get(store_);
      own_store(group_->client->client);
      engine = std::make_unique<HostsEngine>(
          *group_,
          bootstrap,
          std::make_shared<StoreRendezvous>(group_->store),
          deadline);
    }
    cpu_ = c10::make_intrusive<CpuRoute>(*group_, std::move(engine));
    known_.links = bootstrap.links();
    for (int p = 0; p < size && !again; ++p) {
      store_ends_with_peer_ = store_ends_with_peer_ ||
          (p != rank && bootstrap.peers()[p].keeps_store);
    }
  };
  const auto meet_somewhere = [&] {
    if (size > 1 && known_.links) {
      if (known_.links->know(known_.ranks, group_->settings.host_id)) {
        try {
          return meet(true);
        } catch (const MeetByStore&) {
          // as all the others do now
        }
      } else {
        known_.links->decline(options_->group_name, known_.ranks, deadline);
      }
    }
    meet(false);
  };
  interruptible(nullptr, [&] { translate(meet_somewhere, group_->dialect); });
  group_->interrupter->set(
      [this](const std::string& how) { cpu_->interrupt(how); });
  if (options_->gloo_for_cuda) {
    gloo_for_cuda_ = new_delegate(
        "cpu",
        c10::make_intrusive<c10d::PrefixStore>(
            "gloo-for-cuda",
            cpu_->spans_hosts() ? own_client(group_->store) : group_->store));
  }
  cuda_ = c10::make_intrusive<CudaRoute>(
      *group_,
      options_->group_name,
      cpu_->spans_hosts(),
      [this](const std::string& what) { cpu_->check_peers(what); },
      [this](const auto& its_store) {
        return new_delegate(options_->cpu_as_cuda ? "cpu" : "cuda", its_store);
      },
      options_->cpu_as_cuda);
  init();
  {
    Registry& r = registry.get();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.groups.insert(this);
  }
  if (rank == 0 && announcer()) {
    announcer()(*this, group_->settings.log_level > 0);
  }
}

ProcessGroupFused::~ProcessGroupFused() {
  {
    Registry& r = registry.get();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.groups.erase(this);
  }
  group_->interrupter->set(nullptr);
  name_recorded();
  if (group_->forked() || group_->executor().runs_here()) {
    // A forked child has none of the threads these would join, and a signal
    // handler is below an operation that needs them all.
    (void)gloo_for_cuda_.release();
    (void)cuda_.release();
    (void)cpu_.release();
    (void)group_.release();
    return;
  }
  const ReleaseGil release;
  try {
    end();
  } catch (const std::exception& error) {
    log_line("the end of a group raised: " + one_line(error));
  }
  cuda_.reset();
  cpu_.reset();
  if (store_ends_with_peer_ && group_->exit.empty() &&
      getGroupDesc() == "default_pg" && !has_another_store()) {
    // The next default group of these processes may have a store at the same
    // address, for which this one would be mistaken.
    await_store_end(store_, kLeaveTogether);
  }
}

// True if a live group of this process has met in another store.
bool ProcessGroupFused::has_another_store() const {
  Registry& r = registry.get();
  std::lock_guard<std::mutex> lock(r.mutex);
  return std::any_of(
      r.groups.begin(), r.groups.end(), [this](const ProcessGroupFused* group) {
        return !same_store(group->store_, store_);
      });
}

c10d::Backend& ProcessGroupFused::target(const at::Tensor* tensor) {
  if (gloo_for_cuda_ && tensor != nullptr && tensor->is_cuda()) {
    return *gloo_for_cuda_;
  }
  return route(tensor != nullptr ? tensor->device() : at::kCPU);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFused::new_delegate(
    const char* device,
    const c10::intrusive_ptr<c10d::Store>& store) const {
  auto made = make_delegate(device, store, rank_, size_, options_);
  made->setGroupUid(getGroupUid());
  made->setGroupDesc(getGroupDesc());
  made->setBoundDeviceId(getBoundDeviceId());
  return made;
}

void ProcessGroupFused::Calling::failed() {
  try {
    throw;
  } catch (const std::exception& error) {
    if (unknown_ && shared_errors() == before_) {
      group_.refuse(one_line(error));
    }
    // An operation that throws ends what this thread coalesces: nobody calls
    // endCoalescing then (torch's context manager does not).
    if (group_.group_->is_coalescing()) {
      group_.cuda_->abandon_coalescing();
      group_.group_->end_coalescing();
    }
    scope_.raise(); // what a signal handler has raised comes first
    const auto* invalid = dynamic_cast<const c10::ValueError*>(&error);
    if (invalid != nullptr && group_.options_->serves_gloo()) {
      // Gloo raises RuntimeError where we raise ValueError.
      C10_THROW_ERROR(Error, invalid->what_without_backtrace());
    }
    throw;
  }
}

void ProcessGroupFused::refuse(const std::string& reason) {
  ++shared_errors();
  if (group_->forked() || group_->closed() || getSize() == 1 ||
      options_->cpu_as_cuda) {
    return;
  }
  try {
    cpu_->refuse(reason);
  } catch (const std::exception&) {
    // It was shut down meanwhile.
  }
}

// --- collectives -------------------------------------------------------------

WorkPtr ProcessGroupFused::barrier(const c10d::BarrierOptions& opts) {
  return call(false, [&] {
    return opts.device && opts.device->is_cuda() ? cuda_->barrier(opts)
                                                 : cpu_->barrier(opts);
  });
}

void ProcessGroupFused::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  group_->check_open("fused:monitored_barrier");
  interruptible(group_->interrupter.get(), [&] {
    cpu_->monitoredBarrier(opts, wait_all_ranks);
  });
}

bool ProcessGroupFused::supportsCoalescing() const {
  const bool gpus = at::hasCUDA() || options_->cpu_as_cuda ||
      !group_->settings.cuda_lib.empty(); // as for a fake GPU
  return !options_->serves_gloo() && gpus;
}

void ProcessGroupFused::startCoalescing() {
  group_->start_coalescing();
  cuda_->startCoalescing();
}

WorkPtr ProcessGroupFused::endCoalescing() {
  TORCH_CHECK(
      group_->is_coalescing(),
      "fused: endCoalescing without startCoalescing on this group and thread; "
      "an operation that raises between them ends what is coalesced");
  return call(false, [&] {
    group_->remember(cuda_->endCoalescing());
    return group_->end_coalescing();
  });
}

WorkPtr ProcessGroupFused::fused_step_(StepArguments arguments, bool async_op) {
  const bool some = !arguments.params.empty();
  Route& there = route(some ? arguments.params[0].device() : at::kCPU);
  return call(is_cpu(there), [&] {
    check_arguments(arguments, rank_, size_);
    for (const at::Tensor& p : arguments.params) {
      if (!p.is_inference()) {
        // Autograd must notice that a saved parameter has changed.
        p.unsafeGetTensorImpl()->bump_version();
      }
    }
    return there.fused_step_(std::move(arguments), async_op);
  });
}

WorkPtr ProcessGroupFused::reduce_shards_(
    ShardsArguments arguments,
    bool async_op) {
  const bool some = !arguments.grads.empty();
  Route& there = route(some ? arguments.grads[0].device() : at::kCPU);
  return call(is_cpu(there), [&] {
    check_arguments(arguments);
    return there.reduce_shards_(std::move(arguments), async_op);
  });
}

WorkPtr ProcessGroupFused::fused_program_(
    ProgramArguments arguments,
    bool async_op) {
  Route& there = route(arguments.source.device());
  return call(is_cpu(there), [&] {
    for (const at::Tensor& t : arguments.outputs) {
      if (!t.is_inference()) {
        t.unsafeGetTensorImpl()->bump_version();
      }
    }
    return there.fused_program_(std::move(arguments), async_op);
  });
}

WorkPtr ProcessGroupFused::sparse_all_reduce(
    const at::Tensor& tensor,
    const SkipArguments& arguments,
    bool async_op) {
  Route& there = route(tensor.device());
  return call(is_cpu(there), [&] {
    return there.sparse_all_reduce(tensor, arguments, async_op);
  });
}

void ProcessGroupFused::all_reduce_(
    const at::Tensor& tensor,
    std::string_view op) {
  c10d::Backend& there = target(&tensor);
  const WorkPtr work = call(is_cpu(there), [&] {
    c10d::AllreduceOptions options;
    options.reduceOp = reduction_named(op);
    options.asyncOp = false;
    if (!tensor.is_inference()) {
      // Autograd must notice that a saved tensor has changed.
      tensor.unsafeGetTensorImpl()->bump_version();
    }
    // dist.all_reduce sends real numbers, too, so the two calls fit each other.
    const bool real_parts = tensor.is_complex() && !tensor.is_conj() &&
        (options.reduceOp == c10d::ReduceOp::SUM ||
         options.reduceOp == c10d::ReduceOp::AVG);
    Tensors tensors{real_parts ? at::view_as_real(tensor) : tensor};
    return there.allreduce(tensors, options);
  });
  if (work) {
    work->wait();
  }
}

const Stats& ProcessGroupFused::stats() {
  return group_->stats;
}

const Waits& ProcessGroupFused::waits() {
  return group_->waits;
}

void ProcessGroupFused::reset_stats() {
  group_->stats.clear();
  group_->waits.clear();
}

// --- memory ------------------------------------------------------------------

std::shared_ptr<c10::Allocator> ProcessGroupFused::getMemAllocator() {
  // It is asked for no device: a group that is bound to a GPU means that.
  const auto device = getBoundDeviceId();
  return device && device->is_cuda() ? cuda_->getMemAllocator()
                                     : cpu_->getMemAllocator();
}

// DDP asks with index -1 for the CPU.
bool ProcessGroupFused::supportsTensorAlloc(c10::DeviceIndex device) {
  const bool on_gpu = device >= 0 || options_->cpu_as_cuda;
  return (on_gpu && cuda_->supportsTensorAlloc(device)) ||
      cpu_->supportsTensorAlloc(device);
}

at::Tensor ProcessGroupFused::allocateTensor(
    long size,
    at::TensorOptions options) {
  // Its caller, DDP, takes complex buckets as real ones, but views them so only
  // where it allocates them itself.
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  if (c10::isComplexType(type)) {
    size *= 2;
    options = options.dtype(c10::toRealValueType(type));
  }
  return route(options.device()).allocateTensor(size, options);
}

at::Tensor ProcessGroupFused::empty(
    at::IntArrayRef sizes,
    at::ScalarType type,
    at::Device device,
    bool lives_long) {
  TORCH_CHECK_VALUE(
      device.is_cpu() || device.is_cuda(),
      formatted(
          "fused: empty: device must be the CPU or a GPU, got {}", device));
  const auto options = at::TensorOptions().dtype(type).device(device);
  checked_bytes(sizes, options);
  return route(device).empty(sizes, options, lives_long);
}

at::Tensor ProcessGroupFused::empty_shared(
    at::IntArrayRef sizes,
    at::ScalarType type) {
  return interruptible(group_->interrupter.get(), [&] {
    return cpu_->empty_shared(sizes, at::TensorOptions().dtype(type));
  });
}

bool ProcessGroupFused::in_arena(const at::Tensor& t) {
  return route(t.device()).in_arena(t);
}

// --- groups and their end ----------------------------------------------------

c10::intrusive_ptr<c10d::Backend> ProcessGroupFused::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto it = std::find(ranks.begin(), ranks.end(), getRank());
  if (it == ranks.end()) {
    return nullptr;
  }
  // torch may pass another backend's options: the common part counts.
  auto options = c10::make_intrusive<Options>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
    if (opts->backend == "nccl") {
      options->nccl_options = opts;
    }
  }
  return c10::make_intrusive<ProcessGroupFused>(
      store,
      static_cast<int>(it - ranks.begin()),
      static_cast<int>(ranks.size()),
      options,
      known(ranks));
}

ProcessGroupFused::Known ProcessGroupFused::known(
    const std::vector<int>& ranks) const {
  Known some{known_.links, {}};
  for (const int p : ranks) {
    if (p < 0 || p >= getSize()) {
      return {};
    }
    some.ranks.push_back(known_.ranks[p]);
  }
  return some;
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
  const std::string prefix = formatted("fusedpg-shrink-{}", ++children_);
  return split(
      c10::make_intrusive<c10d::PrefixStore>(prefix, store_), ranks, opts);
}

void ProcessGroupFused::setTimeout(std::chrono::milliseconds timeout) {
  timeout = bounded(timeout);
  group_->timeout = timeout;
  options_->timeout = timeout;
  cpu_->setTimeout(timeout);
  cuda_->setTimeout(timeout);
  if (gloo_for_cuda_) {
    gloo_for_cuda_->setTimeout(timeout);
  }
}

uint64_t ProcessGroupFused::getSequenceNumberForGroup() {
  return group_->executor().tickets();
}

std::optional<ErrorKind> ProcessGroupFused::failure() {
  const auto gpu = cuda_->failure();
  return gpu ? gpu : cpu_->failure();
}

c10d::ErrorType ProcessGroupFused::getError() {
  const auto kind = failure();
  if (!kind) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (*kind) {
    case ErrorKind::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::kPeerDead:
    case ErrorKind::kPeerFailed:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupFused::abort() {
  if (group_->forked()) {
    return;
  }
  const ReleaseGil release;
  std::exception_ptr error;
  try {
    cuda_->abort();
  } catch (...) {
    error = std::current_exception();
  }
  if (group_->executor().runs_here()) { // a signal handler
    cpu_->interrupt("aborted");
  } else {
    cpu_->abort();
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void ProcessGroupFused::shutdown() {
  const ReleaseGil release;
  interruptible(group_->interrupter.get(), [&] { end(); });
}

void ProcessGroupFused::end() {
  if (group_->forked()) {
    return;
  }
  if (group_->executor().runs_here()) {
    // A signal handler, in an operation that cannot end before it.
    cpu_->interrupt("destroyed by a signal handler");
    return;
  }
  if (!group_->close()) {
    return;
  }
  std::exception_ptr error; // of GPUs: the CPU's part ends all the same
  try {
    cuda_->shutdown();
  } catch (...) {
    error = std::current_exception();
  }
  // Peers that have not come to a refused operation by now hear that this rank
  // has left.
  constexpr std::chrono::milliseconds kPatience{1000};
  if (group_->refusals != 0 && !group_->executor().drain(kPatience)) {
    cpu_->interrupt("destroyed");
  }
  group_->executor().stop();
  cpu_->shutdown();
  if (error) {
    std::rethrow_exception(error);
  }
}

void ProcessGroupFused::shutdown_at_exit(const std::string& exit) {
  if (group_->forked()) {
    return;
  }
  const ReleaseGil release;
  group_->exit = exit;
  if (!group_->executor().drain(std::chrono::milliseconds(1000))) {
    cpu_->interrupt("aborted");
  }
  end();
}

bool ProcessGroupFused::layout_is_gloos(c10d::Backend& gloo, int threads) {
  // For the places of the members; nothing is constructed here.
  alignas(ProcessGroupFused) std::byte group[sizeof(ProcessGroupFused)];
  alignas(Options) std::byte options[sizeof(Options)];
  const auto* g = reinterpret_cast<const ProcessGroupFused*>(group);
  const auto* o = reinterpret_cast<const Options*>(options);
  const auto options_at =
      reinterpret_cast<const std::byte*>(&g->options_) - group;
  const auto threads_at =
      reinterpret_cast<const std::byte*>(&o->threads) - options;
  const c10d::Backend::Options* found = nullptr;
  std::memcpy(
      &found, reinterpret_cast<std::byte*>(&gloo) + options_at, sizeof(found));
  if (found != gloo.getBackendOptions().get()) {
    return false;
  }
  int count = 0;
  std::memcpy(
      &count,
      reinterpret_cast<const std::byte*>(found) + threads_at,
      sizeof(count));
  return count == threads;
}

void ProcessGroupFused::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) {
    delegate()->eagerConnectSingleDevice(device);
  }
}

void ProcessGroupFused::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto its = hook;
  delegate()->registerOnCompletionHook(std::move(its));
  onCompletionHook_ = std::move(hook); // by which torch knows
}

void ProcessGroupFused::waitForPendingWorks() {
  delegate()->waitForPendingWorks();
}

void ProcessGroupFused::enableCollectivesTiming() {
  delegate()->enableCollectivesTiming();
}

bool ProcessGroupFused::supportsTimeEstimation() const {
  const auto made = cuda_->made_delegate();
  return made && made->supportsTimeEstimation();
}

GroupInfo ProcessGroupFused::info() {
  if (group_->forked()) { // whose locks may be held for ever
    group_->check_open("fused:group_info");
  }
  GroupInfo i;
  i.local_ranks = local_ranks_;
  i.isa = group_->kernels.name;
  i.sequence_number = group_->executor().tickets();
  cpu_->describe(i);
  cuda_->describe(i);
  i.failed = failure().has_value();
  return i;
}

ProcessGroupFused* find_group(const std::string& name) {
  Registry& r = registry.get();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (ProcessGroupFused* group : r.groups) {
    if (group->getBackendOptions()->group_name == name) {
      return group;
    }
  }
  return nullptr;
}

void ProcessGroupFused::name_recorded() {
  const auto& given = options_->global_ranks_in_group;
  std::vector<uint64_t> ranks(given.begin(), given.end());
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  FlightRecorder::get().set_name(
      *group_->recorded, {getGroupUid(), getGroupDesc(), std::move(ranks)});
}

void name_recorded_groups() {
  Registry& r = registry.get();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (ProcessGroupFused* group : r.groups) {
    group->name_recorded();
  }
}

void end_at_exit(const std::string& exit) {
  park_threads_that_python_ends();
  Registry& r = registry.get();
  std::vector<ProcessGroupFused*> groups;
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    groups.assign(r.groups.begin(), r.groups.end());
  }
  for (ProcessGroupFused* group : groups) {
    group->shutdown_at_exit(exit);
  }
  finish_completions(std::chrono::milliseconds(1000));
}

} // namespace fusedpg
