#include "collectives/shm_engine.hpp"

#include <algorithm>

#include "base/topology.hpp"
#include "collectives/monitored_barrier.hpp"
#include "messages/mailbox.hpp"

namespace fusedpg {
namespace {

// A share of the cores this process may use: the launcher knows how many ranks
// there are on this host, of which the group may hold only some.
int default_threads(int ranks, const Settings& settings) {
  return std::max(
      1, available_cpus() / std::max(ranks, settings.local_world_size));
}

} // namespace

ShmEngine::ShmEngine(
    GroupBase& group,
    Bootstrap& bootstrap,
    const Deadline& deadline)
    : Engine(group),
      domain_(group.rank, bootstrap, group.settings, deadline),
      pool_(
          group.settings.threads > 0
              ? group.settings.threads
              : default_threads(domain_.size(), group.settings)),
      skip_{group.settings.block_skip, group.settings.block_size, {}} {
  domain_.set_waits(&group.waits);
}

ShmEngine::~ShmEngine() {
  stop_messages();
  mailbox_.reset(); // before the domain
}

void ShmEngine::check_failed() {
  if (domain_.failed()) {
    domain_.detach(); // another thread may still be at it; see mark_failed()
    domain_.fail_as_before();
  }
}

Way& ShmEngine::open_way(uint64_t ticket, std::chrono::milliseconds timeout) {
  check_failed();
  context_.emplace(
      Context{
          {group_.kernels,
           pool_,
           Deadline(timeout),
           ticket,
           group_.settings.nan_check,
           skip_,
           group_.stats},
          domain_});
  return way_.emplace(*context_);
}

void ShmEngine::close_way() {
  way_.reset();
}

void ShmEngine::begin(Way& /* way */) {
  domain_.prepare();
}

// Point to point may have failed meanwhile and given back the peers' memory,
// which was being read or written.
void ShmEngine::end(Way& /* way */) {
  check_failed();
}

void ShmEngine::fail_group(
    const Error& error,
    const char* /* title */,
    uint64_t /* ticket */) {
  domain_.mark_failed(error);
}

void ShmEngine::monitored_barrier(
    std::chrono::milliseconds timeout,
    bool wait_all_ranks,
    FunctionRef<void()> /* check_open */) {
  check_failed();
  try {
    fusedpg::monitored_barrier(domain_, timeout, wait_all_ranks);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kAborted) {
      domain_.mark_failed(error);
    }
    throw;
  }
}

std::shared_ptr<Messages> ShmEngine::open_messages() {
  domain_.prepare();
  return std::make_shared<Mailbox>(domain_, group_.kernels);
}

void ShmEngine::describe(GroupInfo& info) {
  Engine::describe(info);
  info.engine = "shm";
  info.threads = pool_.threads();
}

std::optional<ErrorKind> ShmEngine::failure() {
  return domain_.failed() ? std::optional(domain_.failure_kind())
                          : std::nullopt;
}

void ShmEngine::check_peers(const std::string& what) {
  domain_.check_peers(what, [this](int p) { return p != group_.rank; });
}

void ShmEngine::abort() {
  domain_.request_abort();
  group_.executor().run_unnumbered([this] {
    domain_.mark_failed(Error(
        ErrorKind::kAborted,
        formatted("fused: the group was aborted on rank {}", group_.rank)));
  });
}

void ShmEngine::interrupt(const std::string& how) {
  domain_.request_abort(how);
}

void ShmEngine::shutdown() {
  stop_messages();
  domain_.leave(group_.exit);
}

} // namespace fusedpg
