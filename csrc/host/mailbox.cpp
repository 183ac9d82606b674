#include "host/mailbox.hpp"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/while_waiting.hpp"
#include "host/futex.hpp"

namespace fusedpg {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(20);
constexpr auto kIdlePatience = std::chrono::milliseconds(500);
constexpr auto kStopPatience = std::chrono::milliseconds(1000);

} // namespace

Mailbox::Mailbox(Domain& domain, const kernels::Table& kernels)
    : domain_(domain),
      kernels_(kernels),
      me_(domain.rank()),
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

void Mailbox::send(
    const void* data,
    size_t bytes,
    int destination,
    int tag,
    std::chrono::milliseconds timeout,
    Done done) {
  char* source = static_cast<char*>(const_cast<void*>(data));
  post(
      {true,
       source,
       bytes,
       destination,
       tag,
       Deadline(timeout),
       std::move(done)});
}

void Mailbox::receive(
    void* data,
    size_t bytes,
    int source,
    int tag,
    std::chrono::milliseconds timeout,
    Done done) {
  post(
      {false,
       static_cast<char*>(data),
       bytes,
       source,
       tag,
       Deadline(timeout),
       std::move(done)});
}

void Mailbox::post(Post post) {
  const bool small = post.bytes <= kMailSmall;
  {
    std::lock_guard<std::mutex> lock(posts_mutex_);
    if (closed_) {
      fail(
          ErrorKind::kAborted,
          "fused: {} on rank {}: the group was shut down",
          name(post),
          me_);
    }
    posts_.push_back(std::move(post));
    have_posts_.store(true, std::memory_order_release);
  }
  if (small) {
    poll();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (have_posts_.load(std::memory_order_acquire)) {
    Bell& waiter = domain_.control(me_).mail_waiter_bell;
    if (waiter.sleepers.load(std::memory_order_relaxed) != 0) {
      waiter.ring();
    } else {
      wake_thread();
    }
  }
}

std::string Mailbox::name(const Post& post) const {
  std::ostringstream out;
  out << (post.sends ? "send" : "recv") << '(' << post.bytes << " bytes, tag "
      << post.tag << (post.sends ? ", to " : ", from ");
  if (post.peer == kAnySource) {
    out << "any rank)";
  } else {
    out << "rank " << post.peer << ')';
  }
  return out.str();
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
  const Deadline patience(kStopPatience);
  // Also a peer that waits to hear that its message has arrived.
  while ((turn() || unsent_replies()) && !patience.expired()) {
    settle(lock);
    ring_waiter();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
  collect_posts(true);
  fail_all(
      std::make_exception_ptr(Error(
          ErrorKind::kAborted,
          formatted(
              "fused: the group was shut down on rank {} with point-to-point "
              "operations pending",
              me_))));
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
        nap(done, deadline);
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

void Mailbox::hurry() {
  prompt_.store(true, std::memory_order_release);
  if (!origin_.forked() && !poll()) {
    std::lock_guard<std::mutex> lock(posts_mutex_);
    if (!closed_) {
      wake_thread();
    }
  }
}

// Does what can be done now; whether that was anything. What goes wrong ends the
// group.
bool Mailbox::turn() {
  try {
    const bool posted = take_posts();
    const bool moved = progress();
    // By the clock: messages of some ranks must not hide that others are gone
    // or late.
    if (Clock::now() - checked_ >= kPatience) {
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
  for (const auto& done : finished) {
    done();
  }
}

// After settle() on a thread that is not in move_until(): the one that is may have
// waited for what has ended.
void Mailbox::ring_waiter() {
  std::lock_guard<std::mutex> lock(posts_mutex_);
  if (!closed_) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    domain_.control(me_).mail_waiter_bell.ring();
  }
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
void Mailbox::nap(const std::function<bool()>& done, const Deadline& deadline) {
  Bell& bell = domain_.control(me_).mail_waiter_bell;
  const uint32_t word = bell.word.load(std::memory_order_acquire);
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!done() && !news(true)) {
    futex_wait(
        bell.word,
        word,
        std::min<std::chrono::nanoseconds>(deadline.remaining(), kPatience));
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Mailbox::sleep(Lock& lock) {
  RankControl& control = domain_.control(me_);
  uint32_t word = control.mail_bell.word.load(std::memory_order_acquire);
  bool awake = leave();
  idle_ = !pending() && Clock::now() - last_post_ > kIdlePatience;
  const auto patience = idle_ ? kIdlePatience : kPatience;
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
  collect_posts(false);
  fail_all(std::make_exception_ptr(error));
}

bool Mailbox::take_posts() {
  if (!have_posts_.load(std::memory_order_acquire)) {
    return false;
  }
  // Matching may throw: by then every post must be known to fail_all().
  for (const auto& receive : collect_posts(false)) {
    match_receive(receive);
  }
  return true;
}

std::vector<std::list<Mailbox::Receive>::iterator> Mailbox::collect_posts(
    bool last) {
  std::deque<Post> posts;
  {
    std::lock_guard<std::mutex> lock(posts_mutex_);
    posts.swap(posts_);
    have_posts_.store(false, std::memory_order_release);
    closed_ = closed_ || last;
  }
  std::vector<std::list<Receive>::iterator> receives;
  if (!posts.empty()) {
    last_post_ = Clock::now();
  }
  for (Post& post : posts) {
    if (post.sends) {
      Peer& peer = peers_[post.peer];
      const uint64_t id = peer.next_id++;
      peer.sends.push_back(Send{std::move(post), id});
    } else {
      receives_.push_back(Receive{std::move(post)});
      receives.push_back(std::prev(receives_.end()));
    }
  }
  return receives;
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
      on_offer(peer, message);
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

void Mailbox::on_offer(int peer, const Message& offer) {
  auto& incoming = peers_[peer].incoming;
  incoming.push_back({offer, receives_.end()});
  for (auto r = receives_.begin(); r != receives_.end(); ++r) {
    const bool from = r->post.peer == peer || r->post.peer == kAnySource;
    if (from && !r->matched && r->post.tag == offer.tag) {
      incoming.back().receive = r;
      accept(peer, std::prev(incoming.end()));
      return;
    }
  }
}

void Mailbox::match_receive(std::list<Receive>::iterator receive) {
  const int from = receive->post.peer;
  for (int p = 0; p < domain_.size(); ++p) {
    if (p == me_ || (from != kAnySource && from != p)) {
      continue;
    }
    auto& incoming = peers_[p].incoming;
    for (auto it = incoming.begin(); it != incoming.end(); ++it) {
      if (!it->matched && it->offer.tag == receive->post.tag) {
        it->receive = receive;
        accept(p, it);
        return;
      }
    }
  }
}

// A receive has been found for a message.
void Mailbox::accept(int peer, std::list<Incoming>::iterator incoming) {
  incoming->matched = incoming->receive->matched = true;
  const Message& offer = incoming->offer;
  const Post& post = incoming->receive->post;
  if (offer.total != post.bytes) {
    peers_[peer].replies.push_back(
        {offer.id, kNack, offer.tag, post.bytes, 0, 0, 0});
    finish_receive(
        peer,
        incoming,
        std::make_exception_ptr(Error(
            ErrorKind::kMismatch,
            formatted(
                "fused: {} on rank {}: rank {} sent {} bytes, expected {}",
                name(post),
                me_,
                peer,
                offer.total,
                post.bytes))));
  } else if (offer.bytes == offer.total) {
    copy(peer, incoming, offer);
  } else {
    peers_[peer].replies.push_back(
        {offer.id, kTake, offer.tag, offer.total, 0, 0, 0});
  }
}

void Mailbox::on_part(int peer, const Message& part) {
  auto& incoming = peers_[peer].incoming;
  const auto it =
      std::find_if(incoming.begin(), incoming.end(), [&](const Incoming& i) {
        return i.offer.id == part.id;
      });
  if (it != incoming.end()) { // else it has failed here meanwhile
    copy(peer, it, part);
  }
}

void Mailbox::copy(
    int peer,
    std::list<Incoming>::iterator incoming,
    const Message& part) {
  Receive& receive = *incoming->receive;
  kernels_.copy(
      receive.post.data + part.offset,
      domain_.address(peer, part.location),
      part.bytes,
      false);
  check_source(receive.post, peer);
  receive.received += part.bytes;
  peers_[peer].replies.push_back(
      {part.id, kAck, part.tag, part.total, part.offset, part.bytes, 0});
  if (receive.received == part.total) {
    finish_receive(peer, incoming, nullptr);
  }
}

void Mailbox::finish_receive(
    int peer,
    std::list<Incoming>::iterator incoming,
    std::exception_ptr error) {
  Done done = std::move(incoming->receive->post.done);
  receives_.erase(incoming->receive);
  peers_[peer].incoming.erase(incoming);
  flush_replies(peer);
  finish(std::move(done), std::move(error), peer);
}

void Mailbox::finish(Done done, std::exception_ptr error, int peer) {
  finished_.push_back([done = std::move(done), error = std::move(error), peer] {
    done(error, peer);
  });
}

// A rank that failed or left has taken its memory away, so what was copied
// since may be anything. One that was killed has not. Where this rank has
// failed, it has given the peer's memory back, so the same.
void Mailbox::check_source(const Post& post, int peer) {
  std::atomic_thread_fence(std::memory_order_acquire); // after the copy
  if (domain_.failed()) {
    fail(domain_.failure_kind(), "{}", domain_.failure_reason());
  }
  if (domain_.control(peer).state.load(std::memory_order_acquire) !=
      static_cast<uint32_t>(RankState::kOk)) {
    domain_.check_peers(name(post), [&](int q) { return q == peer; });
  }
}

// --- waiting and failing -----------------------------------------------------

bool Mailbox::pending() const {
  return !receives_.empty() ||
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
        return !p.sends.empty() || !p.replies.empty();
      });
}

// True if the thread has to act once a peer rings. A send needs nothing but its
// end if the receiver can read all its bytes.
bool Mailbox::concerned() const {
  if (prompt_.load(std::memory_order_acquire)) {
    return pending();
  }
  return !receives_.empty() ||
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
        return !p.replies.empty() ||
            std::any_of(p.sends.begin(), p.sends.end(), [](const Send& s) {
              return !s.offered || !s.whole;
            });
      });
}

bool Mailbox::unsent_replies() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
    return !p.replies.empty();
  });
}

// Whether there is something to do now; of peers' messages if so asked.
bool Mailbox::news(bool of_peers) {
  if (have_posts_.load(std::memory_order_acquire) ||
      stop_.load(std::memory_order_acquire)) {
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
  std::vector<const Post*> posts;
  for (const Receive& r : receives_) {
    posts.push_back(&r.post);
  }
  for (const Peer& peer : peers_) {
    for (const Send& s : peer.sends) {
      posts.push_back(&s.post);
    }
  }
  std::vector<bool> gone(peers_.size());
  for (int p = 0; p < domain_.size(); ++p) {
    gone[p] = p != me_ && domain_.in_doubt(p) && !unread(p);
  }
  for (const Post* post : posts) {
    check(*post, gone);
  }
}

// Throws when nobody is left who could be at the other end, or time is over.
void Mailbox::check(const Post& post, const std::vector<bool>& gone) {
  const auto could_be = [&](int p) {
    return p != me_ && (post.peer == kAnySource || post.peer == p);
  };
  // A receive from any rank still hopes while one peer lives.
  bool hope = false;
  int last = -1;
  for (int p = 0; p < domain_.size(); ++p) {
    if (could_be(p)) {
      hope = hope || !gone[p];
      last = p;
    }
  }
  if (domain_.abort_requested() || !hope) {
    domain_.check_peers(name(post), [&](int q) { return q == last; });
  }
  if (post.deadline.expired()) {
    fail(
        ErrorKind::kTimeout,
        "fused: {}, failed on rank {}: timeout after {} ms without the other "
        "side",
        name(post),
        me_,
        post.deadline.timeout().count());
  }
}

// The error of another operation, for this one.
std::exception_ptr Mailbox::with_name(
    const std::exception_ptr& error,
    const Post& post) const {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    const std::string text = e.what();
    const std::string mine = name(post);
    if (text.find(mine) != std::string::npos) {
      return error;
    }
    return std::make_exception_ptr(Error(
        e.kind(),
        formatted(
            "fused: {}, failed on rank {}: {}",
            mine,
            me_,
            text.rfind("fused: ", 0) == 0 ? text.substr(7) : text)));
  } catch (...) {
    return error;
  }
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  for (Receive& r : receives_) {
    finish(std::move(r.post.done), with_name(error, r.post), r.post.peer);
  }
  receives_.clear();
  for (size_t p = 0; p < peers_.size(); ++p) {
    for (Send& s : peers_[p].sends) {
      release_parts(static_cast<int>(p), s);
      finish(std::move(s.post.done), with_name(error, s.post), s.post.peer);
    }
    peers_[p].sends.clear();
    peers_[p].incoming.clear();
    peers_[p].replies.clear();
  }
}

} // namespace fusedpg
