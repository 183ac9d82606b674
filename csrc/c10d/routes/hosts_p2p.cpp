// Messages between the ranks of a group that spans machines, and the barrier that
// names who is missing.

#include "c10d/errors.hpp"
#include "c10d/routes/hosts.hpp"
#include "collectives/monitored_barrier.hpp"

namespace fusedpg {

std::shared_ptr<NetMailbox> HostsRoute::mailbox() {
  group_.check_open("fused:send/recv"); // before a lock, in a forked child
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  translate([this] { check_messages(); }, group_.dialect);
  group_.check_open("fused:send/recv"); // not after shutdown() has stopped it
  if (!mailbox_) {
    const auto gone = [this](int p) {
      return domain_ && hosts_.host(p) == hosts_.host(rank_) &&
          domain_->in_doubt(hosts_.local(p));
    };
    // std::function copies what it has.
    auto mail = std::make_shared<std::unique_ptr<TcpEndpoint>>(
        std::move(connection_.mail));
    mailbox_ = std::make_shared<NetMailbox>(
        rank_,
        size_,
        [this, mail] { return open_transport(group_, std::move(*mail)); },
        connection_.mail_addresses,
        [this] { check_messages(); },
        gone,
        [this](const Error& error) { return message_failed(error); });
  }
  return mailbox_;
}

void HostsRoute::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  const auto messages = mailbox();
  translate(
      [&] {
        // Unlike elsewhere, a timeout of zero is one.
        const auto timeout = opts.timeout == c10d::kUnsetTimeout
            ? group_.timeout.load()
            : bounded(opts.timeout);
        monitored_barrier(
            *messages,
            rank_,
            size_,
            monitored_barriers_++,
            timeout,
            wait_all_ranks);
      },
      group_.dialect);
}

void HostsRoute::end_messages() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (mailbox_) {
    mailbox_->wake(); // it looks whether the group has failed
  }
  connection_.mail.reset(); // peers may have connected to it, and wait
}

// Throws where no message can be waited for any more.
void HostsRoute::check_messages() {
  failures_.check();
  if (failure() == ErrorKind::kAborted) {
    fail_aborted();
  }
  if (domain_ && domain_->failed()) {
    fail(
        domain_->failure_kind(),
        "fused: this group has failed and must be destroyed; the failure was: "
        "{}",
        domain_->failure_reason());
  }
}

// On the mailbox's thread, which has closed its connections. Those of
// collectives are closed by the thread that uses them, as soon as it can.
Error HostsRoute::message_failed(const Error& error) {
  Error whole = error; // or what another thread has heard of its cause
  try {
    throw error;
  } catch (...) {
    try {
      failures_.handle("fused:send/recv", 0, [] {});
    } catch (const Error& told) {
      whole = told;
    }
  }
  end_waits("aborted");
  if (domain_) {
    domain_->mark_failed(whole);
  }
  try {
    group_.executor().submit([this](uint64_t /* ticket */) {
      std::lock_guard<std::mutex> lock(transport_mutex_);
      if (connection_.transport) {
        connection_.transport->end();
      }
    });
  } catch (const Error&) {
    // It was shut down.
  }
  return whole;
}

} // namespace fusedpg
