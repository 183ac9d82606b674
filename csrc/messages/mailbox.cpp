#include "messages/mailbox.hpp"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/while_waiting.hpp"
#include "host/futex.hpp"

namespace fusedpg {

Mailbox::Mailbox(Domain& domain, const kernels::Table& kernels)
    : domain_(domain),
      kernels_(kernels),
      me_(domain.rank()),
      matching_(domain.size()),
      peers_(domain.size()),
      thread_([this] { loop(); }) {}

Mailbox::~Mailbox() {
  stop();
}

void Mailbox::stop() {
  if (!thread_.joinable()) {
    return; // the domain may be gone
  }
  stop_.store(true, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  domain_.control(me_).mail_waiter_bell.ring();
  wake_thread();
  thread_.join();
}

void Mailbox::post(MessagePost&& post) {
  const bool small = post.bytes <= kMailSmall;
  posts_.push(std::move(post), me_);
  if (small) {
    poll();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!posts_.empty()) {
    Bell& waiter = domain_.control(me_).mail_waiter_bell;
    if (waiter.sleepers.load(std::memory_order_relaxed) != 0) {
      waiter.ring();
    } else {
      wake_thread();
    }
  }
}

// --- who moves messages ------------------------------------------------------

void Mailbox::loop() {
  pthread_setname_np(pthread_self(), "fusedpg-mail");
  Lock lock(mutex_);
  auto last_move = Clock::now();
  while (!stop_.load(std::memory_order_acquire)) {
    enter();
    const bool moved = turn();
    if (!finished_.empty()) {
      settle(lock);
      ring_waiter();
      lock.lock();
    }
    if (moved) {
      last_move = Clock::now();
    }
    if (helped_.load(std::memory_order_acquire) ||
        !(moved || (pending() && Clock::now() - last_move < domain_.spin()))) {
      sleep(lock);
    } else if (!moved) {
      cpu_relax();
    }
  }
  end(lock);
}

void Mailbox::end(Lock& lock) {
  enter();
  const Deadline patience(kMailStopPatience);
  // Also a peer that waits to hear that its message has arrived.
  while ((turn() || unsent_replies()) && !patience.expired()) {
    settle(lock);
    ring_waiter();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
  posts_.close(Error(ErrorKind::kAborted, "the group was shut down"), taken_);
  know_taken();
  fail_all(stopped_messages(me_));
  ended_ = true;
  settle(lock);
}

void Mailbox::move_until(
    const std::function<bool()>& done,
    const Deadline& deadline) {
  origin_.check_operation();
  bool more = true;
  while (more && !done() && !helped_.exchange(true)) {
    more = move_for_a_while(done, deadline);
    helped_.store(false, std::memory_order_release);
    while_waiting(); // what that does may want the mailbox
  }
}

// Whether there may be more to wait for.
bool Mailbox::move_for_a_while(
    const std::function<bool()>& done,
    const Deadline& deadline) {
  const Deadline pause(has_wait_hook() ? WaitHook::kInterval : deadline.left());
  bool over = false;
  {
    Lock lock(mutex_);
    auto last_move = Clock::now();
    const auto ends = [&] {
      return ended_ || stop_.load(std::memory_order_acquire) || done() ||
          deadline.expired();
    };
    while (!(over = ends()) && !pause.expired()) {
      enter();
      if (turn()) {
        last_move = Clock::now();
      }
      if (!finished_.empty()) {
        settle(lock); // the domain may end meanwhile
        lock.lock();
      } else if (Clock::now() - last_move <= domain_.spin()) {
        cpu_relax();
      } else {
        wait_for_bell(done, deadline);
      }
    }
    if (!ended_ && leave()) {
      wake_thread();
    }
  }
  return !over;
}

bool Mailbox::poll() {
  if (origin_.forked()) {
    return false;
  }
  Lock lock(mutex_, std::try_to_lock);
  if (!lock || ended_) {
    return false;
  }
  enter();
  turn();
  if (leave() || (idle_ && pending())) {
    wake_thread();
  }
  if (!finished_.empty()) {
    settle(lock);
    ring_waiter();
  }
  return true;
}

void Mailbox::move_promptly() {
  prompt_.store(true, std::memory_order_release);
  if (!origin_.forked() && !poll()) {
    posts_.if_open([this] { wake_thread(); });
  }
}

// Does all that can be done now. Returns whether that was anything. An error
// ends the group.
bool Mailbox::turn() {
  try {
    const bool posted = take_posts();
    const bool moved = progress();
    // By the clock: messages of some ranks must not hide that others are gone
    // or late.
    if (Clock::now() - checked_ >= kMailLook) {
      checked_ = Clock::now();
      check();
    }
    return posted || moved;
  } catch (const Error& error) {
    give_up(error);
  } catch (const std::exception& other) {
    give_up(Error(ErrorKind::kSystem, other.what()));
  }
  return false;
}

// Unlocks and calls what waits to hear of messages that have ended.
void Mailbox::settle(Lock& lock) {
  const auto finished = std::exchange(finished_, {});
  lock.unlock();
  for (const Ended& one : finished) {
    one.done(one.error, one.peer);
  }
}

// After settle() on a thread that is not in move_until(): the one that is may have
// waited for what has ended.
void Mailbox::ring_waiter() {
  posts_.if_open([this] {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    domain_.control(me_).mail_waiter_bell.ring();
  });
}

// This thread moves messages from here on: nobody needs to ring the mailbox's.
void Mailbox::enter() {
  if (announced_) {
    announced_ = false;
    domain_.control(me_).mail_bell.sleepers.fetch_sub(
        1, std::memory_order_release);
  }
}

// Has peers ring the mailbox's thread if that is to do more. True where it must
// look at once.
bool Mailbox::leave() {
  if (!announced_ && concerned()) {
    announced_ = true;
    domain_.control(me_).mail_bell.sleepers.fetch_add(
        1, std::memory_order_seq_cst);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return news(announced_);
}

// Sleeps until a peer or a post rings, with the lock.
void Mailbox::wait_for_bell(
    const std::function<bool()>& done,
    const Deadline& deadline) {
  Bell& bell = domain_.control(me_).mail_waiter_bell;
  const uint32_t word = bell.word.load(std::memory_order_acquire);
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done() && !news(true)) {
    futex_wait(
        bell.word,
        word,
        std::min<std::chrono::nanoseconds>(deadline.remaining(), kMailLook));
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Mailbox::sleep(Lock& lock) {
  RankControl& control = domain_.control(me_);
  uint32_t word = control.mail_bell.word.load(std::memory_order_acquire);
  bool awake = leave();
  idle_ = !pending() && Clock::now() - last_post_ > kMailIdle;
  const auto patience = idle_ ? kMailIdle : kMailLook;
  lock.unlock();
  // A thread that sleeps in move_until() hears all news.
  do {
    if (!awake) {
      futex_wait(control.mail_bell.word, word, patience);
    }
    awake = stop_.load(std::memory_order_acquire);
    word = control.mail_bell.word.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } while (!awake &&
           control.mail_waiter_bell.sleepers.load(std::memory_order_acquire) !=
               0);
  lock.lock();
  idle_ = false;
}

void Mailbox::wake_thread() {
  Bell& bell = domain_.control(me_).mail_bell;
  bell.word.fetch_add(1, std::memory_order_release);
  bell.wake();
}

// Fails everything pending, and the group unless it ends anyway.
void Mailbox::give_up(const Error& error) {
  if (!stop_.load(std::memory_order_acquire)) {
    domain_.mark_failed(error);
  }
  posts_.take(taken_);
  know_taken();
  fail_all(error);
}

bool Mailbox::take_posts() {
  if (posts_.empty()) {
    return false;
  }
  posts_.take(taken_);
  for (auto next = know_taken(); next != matching_.receives.end();) {
    const ReceiveAt receive = next++; // accept() may end it
    if (matching_.meet(*receive)) {
      accept(receive);
    }
  }
  return true;
}

Mailbox::ReceiveAt Mailbox::know_taken() {
  if (!taken_.empty()) {
    last_post_ = Clock::now();
  }
  return matching_.add(taken_);
}

bool Mailbox::progress() {
  bool any = false;
  // In turn, or one peer would have the reserve for as long as there are
  // messages for it.
  turn_ = (turn_ + 1) % domain_.size();
  for (int i = 0; i < domain_.size(); ++i) {
    const int p = (turn_ + i) % domain_.size();
    if (p != me_) {
      any |= poll_inbox(p);
      any |= flush_replies(p); // first: they free the other side's memory
      any |= push_sends(p);
    }
  }
  return any;
}

bool Mailbox::poll_inbox(int peer) {
  Inbox& inbox = domain_.inbox(me_, peer);
  const uint64_t written = inbox.written.load(std::memory_order_acquire);
  uint64_t read = inbox.read.load(std::memory_order_relaxed);
  const bool any = read != written;
  while (read != written) {
    const Message message = inbox.slots[read % kInboxSlots];
    inbox.read.store(++read, std::memory_order_release);
    if (message.kind == kOffer) {
      if (const auto receive = matching_.arrive(peer, message)) {
        accept(*receive);
      }
    } else if (message.kind == kPart) {
      on_part(peer, message);
    } else {
      on_reply(peer, message);
    }
  }
  if (any) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    domain_.ring_mail(peer); // it may wait for room
  }
  return any;
}

// --- receiving ---------------------------------------------------------------

// A receive has been found for a message.
void Mailbox::accept(ReceiveAt receive) {
  const Message& offer = receive->message;
  const MessagePost& post = receive->post;
  auto& replies = peers_[receive->from].replies;
  if (offer.total != post.bytes) {
    replies.push_back({offer.id, kNack, offer.tag, post.bytes, 0, 0, 0});
    finish_receive(
        receive,
        std::make_exception_ptr(
            receive_mismatch(post, me_, receive->from, offer.total)));
  } else if (offer.bytes == offer.total) {
    copy(receive, offer);
  } else {
    replies.push_back({offer.id, kTake, offer.tag, offer.total, 0, 0, 0});
  }
}

void Mailbox::on_part(int peer, const Message& part) {
  if (const auto receive = matching_.find_receive(peer, part.id)) {
    copy(*receive, part);
  }
}

void Mailbox::copy(ReceiveAt receive, const Message& part) {
  const int peer = receive->from;
  kernels_.copy(
      receive->post.data + part.offset,
      domain_.address(peer, part.location),
      part.bytes,
      false);
  check_source(receive->post, peer);
  receive->received += part.bytes;
  peers_[peer].replies.push_back(
      {part.id, kAck, part.tag, part.total, part.offset, part.bytes, 0});
  if (receive->received == part.total) {
    finish_receive(receive, nullptr);
  }
}

void Mailbox::finish_receive(ReceiveAt receive, std::exception_ptr error) {
  const int peer = receive->from;
  Done done = std::move(receive->post.done);
  matching_.receives.erase(receive);
  flush_replies(peer);
  finished_.push_back({std::move(done), std::move(error), peer});
}

// A rank that failed or left has taken its memory away, so bytes that were
// copied since may be anything. A rank that was killed has not. If this rank
// has failed, it has given the peer's memory back, with the same effect.
void Mailbox::check_source(const MessagePost& post, int peer) {
  std::atomic_thread_fence(std::memory_order_acquire); // after the copy
  if (domain_.failed()) {
    fail(domain_.failure_kind(), "{}", domain_.failure_reason());
  }
  if (domain_.control(peer).state.load(std::memory_order_acquire) !=
      static_cast<uint32_t>(RankState::kOk)) {
    domain_.check_peers(post.name(), [&](int q) { return q == peer; });
  }
}

// --- waiting and failing -----------------------------------------------------

bool Mailbox::pending() const {
  return matching_.pending() || unsent_replies();
}

// True if the thread has to act once a peer rings. A send needs nothing but its
// end if the receiver can read all its bytes.
bool Mailbox::concerned() const {
  if (prompt_.load(std::memory_order_acquire)) {
    return pending();
  }
  const auto needs_this = [](const Send& s) { return !s.offered || !s.whole; };
  return !matching_.receives.empty() || unsent_replies() ||
      std::any_of(
          matching_.sends.begin(), matching_.sends.end(), [&](const auto& to) {
            return std::any_of(to.begin(), to.end(), needs_this);
          });
}

bool Mailbox::unsent_replies() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
    return !p.replies.empty();
  });
}

// Whether there is something to do now; of peers' messages if so asked.
bool Mailbox::news(bool of_peers) {
  if (!posts_.empty() || stop_.load(std::memory_order_acquire)) {
    return true;
  }
  for (int p = 0; of_peers && p < domain_.size(); ++p) {
    if (unread(p)) {
      return true;
    }
  }
  return false;
}

bool Mailbox::unread(int peer) {
  const Inbox& inbox = domain_.inbox(me_, peer);
  return inbox.written.load(std::memory_order_acquire) !=
      inbox.read.load(std::memory_order_relaxed);
}

void Mailbox::check() {
  if (!pending()) {
    return;
  }
  if (domain_.failed()) {
    fail(domain_.failure_kind(), "{}", domain_.failure_reason());
  }
  std::vector<bool> gone(peers_.size());
  for (int p = 0; p < domain_.size(); ++p) {
    gone[p] = p != me_ && domain_.in_doubt(p) && !unread(p);
  }
  for (const Receive& r : matching_.receives) {
    check(r.post, r.matched() ? r.from : r.post.peer, gone);
  }
  for (int p = 0; p < domain_.size(); ++p) {
    for (const Send& s : matching_.sends[p]) {
      check(s.post, p, gone);
    }
  }
}

// Throws when nobody is left who could be at the other end, or time is over. `peer`
// is at the other end, or kAnySource: then there is hope while one of them lives.
void Mailbox::check(
    const MessagePost& post,
    int peer,
    const std::vector<bool>& gone) {
  bool hope = false;
  int last = -1;
  for (int p = 0; p < domain_.size(); ++p) {
    if (p != me_ && (peer == kAnySource || peer == p)) {
      hope = hope || !gone[p];
      last = p;
    }
  }
  if (domain_.abort_requested() || !hope) {
    domain_.check_peers(post.name(), [&](int q) { return q == last; });
  }
  if (post.deadline.expired()) {
    throw late_message(post, me_);
  }
}

void Mailbox::fail_all(const Error& error) {
  for (int p = 0; p < domain_.size(); ++p) {
    for (Send& send : matching_.sends[p]) {
      release_parts(p, send);
    }
    peers_[p].replies.clear();
  }
  matching_.clear([&](MessagePost& post) {
    finished_.push_back(
        {std::move(post.done), error_of(error, post, me_), post.peer});
  });
}

} // namespace fusedpg
