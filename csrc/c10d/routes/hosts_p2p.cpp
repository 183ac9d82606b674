// Messages between the ranks of a group that spans machines, and the barrier that
// names who is missing.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/routes/hosts.hpp"
#include "c10d/routes/messages.hpp"
#include "c10d/store_rendezvous.hpp"
#include "collectives/monitored_barrier.hpp"

namespace fusedpg {

std::shared_ptr<NetMailbox> HostsRoute::mailbox() {
  translate([this] { check_messages(); }, group_.dialect);
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  group_.check_open("fused:send/recv"); // not after shutdown() has stopped it
  if (!mailbox_) {
    const auto gone = [this](int p) {
      return domain_ && hosts_.host(p) == hosts_.host(rank_) &&
          domain_->in_doubt(hosts_.local(p));
    };
    mailbox_ = std::make_shared<NetMailbox>(
        rank_,
        size_,
        [this] { return open_transport(group_); },
        [this](std::function<void()> check) {
          constexpr std::chrono::hours kNever{24 * 365};
          return std::make_unique<BoundedRendezvous>(
              c10::make_intrusive<c10d::PrefixStore>(
                  "fusedpg-mail", group_.store),
              Deadline(kNever), // messages have deadlines of their own
              std::move(check));
        },
        [this] { check_messages(); },
        gone,
        [this](const Error& error) { return message_failed(error); });
  }
  return mailbox_;
}

WorkPtr HostsRoute::send_message(Tensors& tensors, int dst, int tag) {
  return post_send(mailbox(), group_, tensors, dst, tag);
}

WorkPtr HostsRoute::receive_message(Tensors& tensors, int src, int tag) {
  static_assert(kAnySource == NetMailbox::kAnySource);
  return post_receive(mailbox(), group_, tensors, src, tag);
}

void HostsRoute::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  const auto messages = mailbox();
  translate(
      [&] {
        // Unlike elsewhere, a timeout of zero is one.
        const auto timeout =
            opts.timeout.count() >= 0 ? opts.timeout : group_.timeout.load();
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

void HostsRoute::wake_mailbox() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (mailbox_) {
    mailbox_->wake();
  }
}

// Throws where no message can be waited for any more.
void HostsRoute::check_messages() {
  failures_.check();
  if (failure() == ErrorKind::kAborted) {
    fail(
        ErrorKind::kAborted,
        "fused: the group was aborted on rank {} and must be destroyed",
        rank_);
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
  end_waits();
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
