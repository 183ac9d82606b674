// The sending half of the mailbox.

#include <algorithm>

#include "messages/mailbox.hpp"

namespace fusedpg {
namespace {

constexpr size_t kPartBytes = size_t(1) << 20;
// Bytes in flight to one peer: one part is copied here while another is there.
constexpr size_t kWindow = 2 * kPartBytes;

size_t slots_for(size_t bytes) {
  return (bytes + kMailSlotBytes - 1) / kMailSlotBytes;
}

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
  domain_.ring_mail(peer);
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
  Peer& to = peers_[peer];
  bool any = false;
  for (Send& send : matching_.sends[peer]) {
    if (!room(peer)) {
      return any; // later sends must not overtake
    }
    if (!send.offered) {
      push_offer(peer, send);
      any = true;
    }
    while (send.taken && send.offset < send.post.bytes && to.staged < kWindow &&
           room(peer) && push_part(peer, send)) {
      any = true;
    }
  }
  return any;
}

void Mailbox::push_offer(int peer, Send& send) {
  const MessagePost& post = send.post;
  Message offer{send.id, kOffer, post.tag, post.bytes, 0, 0, 0};
  if (const auto at = domain_.arena()->locate(post.data, post.bytes)) {
    offer.location = *at;
    offer.bytes = post.bytes;
  } else if (post.bytes != 0 && post.bytes <= kMailSmall) {
    if (void* slots = take_slots(post.bytes)) {
      kernels_.copy(slots, post.data, post.bytes, false);
      offer.location = offset_of(slots);
      offer.bytes = post.bytes;
      add_part(peer, send, slots, post.bytes);
    }
  }
  send.offered = true;
  send.whole = offer.bytes == post.bytes;
  write(peer, offer);
}

bool Mailbox::push_part(int peer, Send& send) {
  const MessagePost& post = send.post;
  const size_t bytes = std::min(post.bytes - send.offset, kPartBytes);
  Message part{send.id, kPart, post.tag, post.bytes, send.offset, bytes, 0};
  void* block = allocate(part.bytes);
  if (block == nullptr) {
    return false;
  }
  kernels_.copy(block, post.data + send.offset, part.bytes, false);
  part.location = offset_of(block);
  send.offset += part.bytes;
  add_part(peer, send, block, part.bytes);
  return write(peer, part);
}

uint64_t Mailbox::offset_of(const void* block) const {
  return static_cast<uint64_t>(
      static_cast<const char*>(block) - domain_.arena()->base());
}

// Null: there are not as many in a row.
void* Mailbox::take_slots(size_t bytes) {
  const size_t wanted = slots_for(bytes);
  size_t free = 0;
  for (size_t i = 0; i < kMailSlots; ++i) {
    free = slots_used_[i] ? 0 : free + 1;
    if (free == wanted) {
      const size_t first = i + 1 - wanted;
      mark_slots(first, wanted, true);
      return domain_.mail_slot(first);
    }
  }
  return nullptr;
}

void Mailbox::mark_slots(size_t first, size_t count, bool used) {
  for (size_t i = first; i < first + count; ++i) {
    slots_used_[i] = used;
  }
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

void Mailbox::on_reply(int peer, const Message& reply) {
  const auto found = matching_.find_send(peer, reply.id);
  if (!found) {
    return;
  }
  const SendAt send = *found;
  if (reply.kind == kTake) {
    send->taken = true;
    return;
  }
  if (reply.kind == kNack) {
    finish_send(
        peer,
        send,
        std::make_exception_ptr(
            send_mismatch(send->post, me_, peer, reply.total)));
    return;
  }
  if (!send->parts.empty()) { // else its data lie in the arena
    release_part(peer, *send);
  }
  send->acknowledged += reply.bytes;
  if (send->acknowledged == send->post.bytes) {
    finish_send(peer, send, nullptr);
  }
}

void Mailbox::add_part(int peer, Send& send, void* block, size_t bytes) {
  send.parts.emplace_back(block, bytes);
  peers_[peer].staged += bytes;
}

void Mailbox::release_part(int peer, Send& send) {
  const auto [block, bytes] = send.parts.front();
  send.parts.pop_front();
  peers_[peer].staged -= bytes;
  const auto* at = static_cast<char*>(block);
  if (at == domain_.mail_reserve()) {
    reserve_used_ = false;
  } else if (at >= domain_.mail_slot(0) && at < domain_.mail_slot(kMailSlots)) {
    const size_t first = (at - domain_.mail_slot(0)) / kMailSlotBytes;
    mark_slots(first, slots_for(bytes), false);
  } else {
    domain_.arena()->deallocate(block);
  }
}

void Mailbox::release_parts(int peer, Send& send) {
  while (!send.parts.empty()) {
    release_part(peer, send);
  }
}

void Mailbox::finish_send(int peer, SendAt send, std::exception_ptr error) {
  release_parts(peer, *send);
  Done done = std::move(send->post.done);
  matching_.sends[peer].erase(send);
  finished_.push_back({std::move(done), std::move(error), peer});
}

} // namespace fusedpg
