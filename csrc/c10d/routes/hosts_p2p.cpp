// Messages between the ranks of a group that spans machines: ours by UCX, if that
// was asked for; else Gloo's.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/routes/hosts.hpp"
#include "c10d/routes/messages.hpp"
#include "c10d/store_rendezvous.hpp"

namespace fusedpg {

NetMailbox* HostsRoute::mailbox() {
  if (group_.settings.transport != TransportChoice::kUcx) {
    return nullptr;
  }
  translate([this] { check_messages(); }, group_.dialect);
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  group_.check_open("fused:send/recv"); // not after shutdown() has stopped it
  if (!mailbox_) {
    const auto connect = [this] {
      return std::make_unique<UcxTransport>(
          ucx::load(group_.settings.ucx_lib),
          ucx_config(group_.settings),
          rank_,
          size_);
    };
    const auto gone = [this](int p) {
      return domain_ && hosts_.host(p) == hosts_.host(rank_) &&
          domain_->in_doubt(hosts_.local(p));
    };
    mailbox_ = std::make_unique<NetMailbox>(
        rank_,
        size_,
        connect,
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
  return mailbox_.get();
}

WorkPtr HostsRoute::send_message(Tensors& tensors, int dst, int tag) {
  if (NetMailbox* ours = mailbox()) {
    return post_send(*ours, group_, tensors, dst, tag);
  }
  return delegate_->send(tensors, dst, tag);
}

WorkPtr HostsRoute::receive_message(Tensors& tensors, int src, int tag) {
  static_assert(kAnySource == NetMailbox::kAnySource);
  if (NetMailbox* ours = mailbox()) {
    return post_receive(*ours, group_, tensors, src, tag);
  }
  return src == kAnySource ? delegate_->recvAnysource(tensors, tag)
                           : delegate_->recv(tensors, src, tag);
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
  if (failures_.kind()) {
    return error;
  }
  Error whole = error;
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
