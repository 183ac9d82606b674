#include "c10d/routes/shm.hpp"

#include "c10d/errors.hpp"
#include "collectives/monitored_barrier.hpp"
#include "collectives/way.hpp"

namespace fusedpg {
ShmRoute::ShmRoute(Group& group, Bootstrap& bootstrap, const Deadline& deadline)
    : CpuRoute(group),
      engine_(group.rank, bootstrap, group.settings, group.stats, deadline) {
  engine_.set_describe(one_line);
  engine_.domain().set_waits(&group.waits);
}

// A thread that waits for a message may hold the mailbox for longer than the
// domain lives.
ShmRoute::~ShmRoute() {
  if (mailbox_) {
    mailbox_->stop();
  }
}

void ShmRoute::execute(
    const Operation& operation,
    uint64_t ticket,
    std::chrono::milliseconds timeout) {
  engine_.execute(
      [&](Context& ctx) {
        ShmWay way(ctx);
        operation(way);
      },
      ticket,
      timeout);
}

void ShmRoute::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  translate(
      [&] {
        engine_.check_failed();
        // Unlike elsewhere, a timeout of zero is one.
        const auto timeout = opts.timeout == c10d::kUnsetTimeout
            ? group_.timeout.load()
            : bounded(opts.timeout);
        try {
          monitored_barrier(engine_.domain(), timeout, wait_all_ranks);
        } catch (const Error& error) {
          if (error.kind() == ErrorKind::kAborted) {
            engine_.domain().mark_failed(error);
          }
          throw;
        }
      },
      group_.dialect);
}

// --- messages ----------------------------------------------------------------

std::shared_ptr<Messages> ShmRoute::messages() {
  translate([&] { engine_.check_failed(); }, group_.dialect);
  group_.check_open("fused:send/recv"); // before a lock, in a forked child
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  group_.check_open("fused:send/recv"); // not after shutdown() has stopped it
  if (!mailbox_) {
    translate([&] { engine_.domain().prepare(); }, group_.dialect);
    mailbox_ = std::make_shared<Mailbox>(engine_.domain(), group_.kernels);
  }
  return mailbox_;
}

// --- shared memory -----------------------------------------------------------

at::Tensor ShmRoute::empty_shared(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  const size_t bytes = checked_bytes(sizes, options);
  const CallInfo call =
      group_.info(c10d::OpType::UNKNOWN, "fused:share_memory", false);
  void* data = nullptr;
  group_.enqueue(call, {}, {}, [&](uint64_t ticket) {
    engine_.execute(
        [&](Context& ctx) { data = share_memory(ctx, bytes); },
        ticket,
        call.timeout);
  });
  return at::from_blob(
      data, sizes, [keep = engine_.domain().mapping(0)](void*) {}, options);
}

// --- state and end -----------------------------------------------------------

void ShmRoute::describe(GroupInfo& info) {
  info.engine = "shm";
  info.threads = engine_.threads();
  describe_arena(info);
}

std::optional<ErrorKind> ShmRoute::failure() {
  Domain& domain = engine_.domain();
  return domain.failed() ? std::optional(domain.failure_kind()) : std::nullopt;
}

void ShmRoute::check_peers(const std::string& what) {
  engine_.domain().check_peers(what, [this](int p) { return p != rank_; });
}

void ShmRoute::abort() {
  engine_.abort(group_.executor());
}

void ShmRoute::interrupt(const std::string& how) {
  engine_.domain().request_abort(how);
}

void ShmRoute::shutdown() {
  {
    std::lock_guard<std::mutex> lock(mailbox_mutex_);
    if (mailbox_) {
      mailbox_->stop();
    }
  }
  engine_.domain().leave(group_.exit);
}

} // namespace fusedpg
