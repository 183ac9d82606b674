// Messages between the ranks of a group that spans machines: by UCX where that
// is asked for, so that no rank has to find out what others can; else Gloo's.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/routes/hosts.hpp"
#include "c10d/routes/messages.hpp"
#include "c10d/store_rendezvous.hpp"

namespace fusedpg {

NetMailbox* HostsRoute::mailbox() {
  if (group_.settings.transport != TransportChoice::kUcx) {
    return nullptr;
  }
  translate([this] {
    if (const auto kind = failure()) {
      fail(
          *kind,
          "fused: this group has failed or was aborted and must be destroyed{}",
          domain_ && domain_->failed()
              ? "; the failure was: " + domain_->failure_reason()
              : std::string());
    }
  });
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
    const auto check = [this] {
      if (failure() == ErrorKind::kAborted) {
        fail(
            ErrorKind::kAborted,
            "fused: the group was aborted on rank {}",
            rank_);
      }
      if (domain_ && domain_->failed()) {
        fail(domain_->failure_kind(), "{}", domain_->failure_reason());
      }
    };
    const auto gone = [this](int p) {
      return domain_ && hosts_.host(p) == hosts_.host(rank_) &&
          domain_->in_doubt(hosts_.local(p));
    };
    mailbox_ = std::make_unique<NetMailbox>(
        rank_,
        size_,
        connect,
        std::make_unique<StoreRendezvous>(
            c10::make_intrusive<c10d::PrefixStore>(
                "fusedpg-mail", group_.store)),
        check,
        gone,
        [this](const Error& error) { fail_with(error); });
  }
  return mailbox_.get();
}

WorkPtr HostsRoute::send_message(Tensors& tensors, int dst, int tag) {
  if (NetMailbox* ours = mailbox()) {
    return post_send(*ours, rank_, tensors, dst, tag, group_.timeout);
  }
  return delegate_->send(tensors, dst, tag);
}

WorkPtr HostsRoute::receive_message(Tensors& tensors, int src, int tag) {
  static_assert(kAnySource == NetMailbox::kAnySource);
  if (NetMailbox* ours = mailbox()) {
    return post_receive(*ours, rank_, tensors, src, tag, group_.timeout);
  }
  return src == kAnySource ? delegate_->recvAnysource(tensors, tag)
                           : delegate_->recv(tensors, src, tag);
}

// A message that fails ends the group, as inside a machine.
void HostsRoute::fail_with(const Error& error) {
  if (domain_) {
    domain_->mark_failed(error);
  }
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!message_failed_) {
    message_failed_ = error;
  }
}

} // namespace fusedpg
