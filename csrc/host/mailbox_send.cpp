// The sending half of the mailbox.

#include <algorithm>

#include "host/mailbox.hpp"

namespace fusedpg {
namespace {

constexpr size_t kPartBytes = size_t(1) << 20;
constexpr size_t kWindow = 2;

} // namespace

bool Mailbox::room(int peer) {
  const Inbox& inbox = domain_.inbox(peer, me_);
  return inbox.written.load(std::memory_order_relaxed) -
      inbox.read.load(std::memory_order_acquire) <
      kInboxSlots;
}

bool Mailbox::write(int peer, const Message& message) {
  if (!room(peer)) {
    return false;
  }
  Inbox& inbox = domain_.inbox(peer, me_);
  const uint64_t written = inbox.written.load(std::memory_order_relaxed);
  inbox.slots[written % kInboxSlots] = message;
  inbox.written.store(written + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  domain_.control(peer).mail_bell.ring();
  return true;
}

bool Mailbox::flush_replies(int peer) {
  auto& replies = peers_[peer].replies;
  bool any = false;
  while (!replies.empty() && write(peer, replies.front())) {
    replies.pop_front();
    any = true;
  }
  return any;
}

bool Mailbox::push_sends(int peer) {
  if (!peers_[peer].replies.empty()) {
    return false; // replies free the other side's memory: they go first
  }
  bool any = false;
  for (Send& send : peers_[peer].sends) {
    while (send.parts.size() < kWindow &&
           (!send.started || send.offset < send.post.bytes)) {
      if (!room(peer)) {
        return any; // later sends must not overtake
      }
      if (!push_part(peer, send)) {
        return any;
      }
      any = true;
    }
  }
  return any;
}

bool Mailbox::push_part(int peer, Send& send) {
  const Post& post = send.post;
  const auto in_place = domain_.arena()->locate(post.data, post.bytes);
  const size_t rest = post.bytes - send.offset;
  const size_t bytes = in_place ? rest : std::min(rest, kPartBytes);
  Message part{send.id, kPart, post.tag, post.bytes, send.offset, bytes, 0};
  void* block = nullptr;
  if (in_place) {
    part.location = *in_place + send.offset;
  } else if (bytes != 0) {
    block = allocate(part.bytes);
    if (block == nullptr) {
      return false;
    }
    kernels_.copy(block, post.data + send.offset, part.bytes, false);
    part.location = static_cast<uint64_t>(
        static_cast<char*>(block) - domain_.arena()->base());
  }
  send.started = true;
  send.offset += part.bytes;
  send.parts.emplace_back(block, part.bytes);
  return write(peer, part);
}

// A block of the arena for at most `bytes`; `bytes` becomes what fits. When the
// arena is full one part at a time goes through the reserve; null: not now.
void* Mailbox::allocate(uint64_t& bytes) {
  try {
    return domain_.arena()->allocate(bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kOutOfMemory) {
      throw;
    }
  }
  if (reserve_used_) {
    return nullptr;
  }
  reserve_used_ = true;
  bytes = std::min<uint64_t>(bytes, kMailReserve);
  return domain_.mail_reserve();
}

void Mailbox::release(void* block) {
  if (block == domain_.mail_reserve()) {
    reserve_used_ = false;
  } else if (block != nullptr) {
    domain_.arena()->deallocate(block);
  }
}

void Mailbox::on_reply(int peer, const Message& message) {
  auto& sends = peers_[peer].sends;
  const auto send =
      std::find_if(sends.begin(), sends.end(), [&](const Send& s) {
        return s.id == message.id;
      });
  if (send == sends.end()) {
    return;
  }
  if (message.kind == kNack) {
    finish_send(
        peer,
        send,
        std::make_exception_ptr(Error(
            ErrorKind::kMismatch,
            formatted(
                "fused: {} from rank {}: rank {} expects {} bytes, sent {}",
                name(send->post),
                me_,
                peer,
                message.total,
                send->post.bytes))));
    return;
  }
  const auto [block, bytes] = send->parts.front();
  send->parts.pop_front();
  release(block);
  send->acknowledged += bytes;
  if (send->acknowledged == send->post.bytes) {
    finish_send(peer, send, nullptr);
  }
}

void Mailbox::release_parts(Send& send) {
  for (const auto& [block, bytes] : send.parts) {
    release(block);
  }
  send.parts.clear();
}

void Mailbox::finish_send(
    int peer,
    std::list<Send>::iterator send,
    std::exception_ptr error) {
  release_parts(*send);
  Done done = std::move(send->post.done);
  peers_[peer].sends.erase(send);
  done(error, peer);
}

} // namespace fusedpg
