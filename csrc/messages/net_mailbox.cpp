#include "messages/net_mailbox.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

constexpr std::chrono::hours kNever{24 * 365};
// After a wait the thread leaves messages to the next one for so long.
constexpr std::chrono::milliseconds kNapping{5};
constexpr uint32_t kNotes = 0; // the tag; what follows are messages
// A message that is sent at once, and all of one peer's that have not arrived.
constexpr size_t kUnasked = size_t(64) << 10;
constexpr size_t kAllUnasked = size_t(1) << 20;
// Notes wait for the pieces that are under way to the same rank.
constexpr size_t kPiece = size_t(1) << 20;
constexpr size_t kPiecesAhead = 3;
static_assert(kPiece >= kUnasked);
// A large message that nobody waits for is held back for about as long as a link
// of 64 Gbit/s would take for it: often a receive is posted right after it, and
// the other side should hear of that first.
constexpr size_t kBytesPerNs = 8;
constexpr std::chrono::nanoseconds kLeastHold{500'000};
constexpr std::chrono::nanoseconds kMostHold{2'000'000};
std::chrono::nanoseconds hold(size_t bytes) {
  const auto length = std::chrono::nanoseconds(bytes / kBytesPerNs);
  return std::clamp(length, kLeastHold, kMostHold);
}

uint32_t mail_tag(uint64_t id) {
  return 1 + static_cast<uint32_t>(id % 0xfffffff0U);
}

using State = TcpTransport::State;

} // namespace

NetMailbox::NetMailbox(
    int rank,
    int size,
    Connect connect,
    std::vector<std::string> addresses,
    std::function<void()> check,
    std::function<bool(int)> gone,
    std::function<Error(const Error&)> failed)
    : me_(rank),
      connect_(std::move(connect)),
      addresses_(std::move(addresses)),
      check_(std::move(check)),
      gone_(std::move(gone)),
      failed_(std::move(failed)),
      matching_(size),
      peers_(size),
      thread_([this] { loop(); }) {}

NetMailbox::~NetMailbox() {
  stop();
}

void NetMailbox::stop() {
  stop_ = true;
  wake();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void NetMailbox::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (transport_) {
    transport_->wake();
  }
  called_ = true;
  called_changed_.notify_all();
}

void NetMailbox::notify(int destination, int tag) {
  post({What::kNotify, nullptr, 0, destination, tag, Deadline(kNever), {}});
}

void NetMailbox::withdraw(int tag) {
  post({What::kWithdraw, nullptr, 0, kAnySource, tag, Deadline(kNever), {}});
}

void NetMailbox::post(MessagePost&& post) {
  posts_.push(std::move(post), me_);
  bool moved = false;
  bool held = false;
  {
    const std::unique_lock<TimedMutex> moving(moving_, std::try_to_lock);
    if (moving && open_ && !stop_ && !trouble_) {
      moved = true;
      try {
        turn(By::kPoster);
        held = held_.has_value();
      } catch (...) {
        trouble_ = std::current_exception();
        moved = false;
      }
    }
  }
  // Someone has to go on with it; if nobody is about to look, the thread.
  if (!moved || asks_ || (waiters_ == 0 && (held || !looks_soon_))) {
    wake();
  }
}

// --- the thread --------------------------------------------------------------

void NetMailbox::loop() {
  pthread_setname_np(pthread_self(), "fusedpg-mail");
  bool stopping = false;
  int sleeps = 0; // since there was something to do
  uint32_t moves = 0;
  try {
    begin();
    while (true) {
      // A thread that waits moves everything, checks what this thread would
      // check, and has the lock and a core for it.
      while (waiters_ != 0 && !stop_ && !asks_) {
        const uint32_t now = moves_;
        sleeps = now == moves ? sleeps : 0;
        moves = now;
        if (sleep(sleeps++)) {
          sleeps = 0;
          break;
        }
      }
      TcpTransport::Sleep how;
      bool held = false;
      {
        const std::lock_guard<TimedMutex> moving(moving_);
        if (trouble_) {
          std::rethrow_exception(trouble_);
        }
        stopping = stop_;
        if (turn(By::kThread)) {
          sleeps = 0;
          continue;
        }
        if (stopping && may_leave()) {
          throw stopped_messages(me_);
        }
        how = transport_->sleep(
            stopping        ? std::chrono::milliseconds(1)
                : pending() ? kMailLook
                            : kMailIdle);
        if (held_) {
          how.most = std::min(
              how.most,
              std::chrono::ceil<std::chrono::microseconds>(
                  std::max(*held_ - Clock::now(), Clock::duration(0))));
        }
        held = held_.has_value();
      }
      // A thread that waits, or may do so again in a moment, needs the core.
      const Clock::time_point waited{Clock::duration(waited_)};
      if (!stopping && !held &&
          (waiters_ != 0 || Clock::now() - waited < kNapping)) {
        sleeps = sleep(sleeps) ? 0 : sleeps + 1;
      } else {
        sleeps = 0;
        how.run();
      }
    }
  } catch (const Error& error) {
    give_up(error, stopping);
  } catch (const std::exception& other) {
    give_up(Error(ErrorKind::kSystem, other.what()), stopping);
  }
}

// Under `moving_`.
bool NetMailbox::turn(By by) {
  // A post after this ends the next sleep. While somebody waits it is he who is
  // meant: he may not have noticed yet.
  if (by == By::kWaiter || waiters_ == 0) {
    transport_->awake();
  }
  held_.reset();
  const bool posted = take_posts();
  const bool any = progress(by);
  const auto now = Clock::now();
  if (by != By::kPoster && !stop_ && now - checked_ >= kMailLook) {
    checked_ = now;
    check();
  }
  moves_ += any ? 1 : 0;
  const int others = waiters_ - (by == By::kWaiter ? 1 : 0);
  if ((any || held_) && others > 0) {
    transport_->wake(); // what they wait for may have come with this
  }
  return posted || any;
}

// The longer, the longer nothing has happened. Whether somebody has called.
bool NetMailbox::sleep(int before) {
  const std::chrono::milliseconds length{1 << std::min(before / 16, 4)};
  looks_soon_ = length.count() == 1;
  bool called = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    called_changed_.wait_for(lock, length, [this] { return called_; });
    called = std::exchange(called_, false);
  }
  looks_soon_ = false;
  return called;
}

void NetMailbox::move_until(
    const std::function<bool()>& done,
    const Deadline& deadline) {
  ++waiters_;
  while (!done() && !deadline.expired()) {
    while_waiting();
    TcpTransport::Sleep how;
    std::shared_ptr<TcpTransport> slept_by; // its descriptor stays open
    {
      // The thread has it while a store does not answer.
      const std::unique_lock<TimedMutex> moving(
          moving_, std::min(kMailLook, deadline.left()));
      if (!moving) {
        continue;
      }
      if (!open_ || stop_ || trouble_) {
        break;
      }
      try {
        if (turn(By::kWaiter)) {
          continue;
        }
        // Another one may take what this one waits for.
        constexpr std::chrono::milliseconds kAmongOthers{1};
        how = transport_->sleep(
            std::min(waiters_ > 1 ? kAmongOthers : kMailLook, deadline.left()));
        slept_by = transport_;
      } catch (...) {
        trouble_ = std::current_exception();
        wake();
        break;
      }
    }
    if (!done()) {
      how.run();
    }
  }
  waited_ = Clock::now().time_since_epoch().count();
  if (--waiters_ == 0 && !looks_soon_) {
    wake(); // from a long sleep: there may be messages that nobody waits for
  }
}

void NetMailbox::begin() {
  std::unique_ptr<TcpTransport> made = connect_();
  const std::lock_guard<TimedMutex> moving(moving_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transport_ = std::move(made);
  }
  open_ = true;
  for (int p = 0; p < transport_->size(); ++p) {
    if (p != me_) {
      peers_[p].note = NetBuffer(sizeof(Note));
      peers_[p].listening = transport_->receive(p, kNotes, peers_[p].note);
    }
  }
}

// The other ranks hear of it as connections end. Posts that come while this
// rank asks them why wait for the answer, too: all pending ones end with one
// error.
void NetMailbox::give_up(Error error, bool stopping) {
  {
    const std::lock_guard<TimedMutex> moving(moving_);
    open_ = false; // a thread that waits for a message now waits for its end
  }
  if (transport_ && !(stopping && !pending())) {
    transport_->end(); // nothing is read or written any more
  }
  if (!stopping) {
    error = failed_(error);
  }
  const auto ended = [&](const MessagePost& post) { end(post, error); };
  posts_.close(error, taken_);
  matching_.clear(ended);
  std::for_each(taken_.begin(), taken_.end(), ended);
  taken_.clear();
  for (Peer& peer : peers_) {
    peer.listening.reset();
  }
  sent_notes_.clear();
  std::shared_ptr<TcpTransport> gone;
  std::lock_guard<std::mutex> lock(mutex_);
  gone = std::move(transport_);
}

void NetMailbox::end(const MessagePost& post, const Error& error) const {
  if (post.done) {
    post.done(error_of(error, post, me_), post.peer);
  }
}

bool NetMailbox::take_posts() {
  posts_.take(taken_);
  auto receive = matching_.add(taken_);
  for (; receive != matching_.receives.end(); ++receive) {
    if (matching_.meet(*receive)) {
      found(*receive);
    } else {
      announce(*receive);
    }
  }
  for (const MessagePost& post : taken_) {
    if (post.what == What::kWithdraw) {
      withdraw_now(post.tag);
    }
  }
  return !taken_.empty();
}

bool NetMailbox::progress(By by) {
  bool asks = false;
  transport_->progress();
  bool any = finish_receives(by);
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    if (p != me_) {
      any |= hear(p);
      if (by == By::kThread) {
        any |= reach(p);
      }
      asks = asks || needs(p);
      any |= push(p, by);
      any |= finish_sends(p);
    }
  }
  any |= finish_notes();
  if (asks && !asks_.exchange(true) && by == By::kWaiter) {
    wake(); // a thread that posts does so anyway
  } else if (!asks) {
    asks_ = false;
  }
  return any;
}

// --- receiving ---------------------------------------------------------------

bool NetMailbox::hear(int p) {
  Peer& peer = peers_[p];
  bool any = false;
  while (transport_->state(*peer.listening) == State::kDone) {
    any = true;
    Note note;
    std::memcpy(&note, peer.note.data(), sizeof note);
    take(p, note);
    // Only now: what follows the note must find its receive.
    peer.listening = transport_->receive(p, kNotes, peer.note);
  }
  return any;
}

void NetMailbox::take(int p, const Note& note) {
  if (note.kind == kMessage || note.kind == kOffer) {
    peers_[p].heard = note.id + 1;
    if (const auto receive = matching_.arrive(p, note)) {
      found(**receive);
    }
  } else if (note.kind == kReceivePosted) {
    learn_of_receive(p, note);
  } else if (note.kind != kHello) {
    const auto send = matching_.find_send(p, note.id);
    if (send && note.kind == kRequest) {
      requested(**send);
    } else if (send) {
      (*send)->answer = note;
    }
  }
}

// The first message that the other side did not know when it posted the receive
// is for it. This rank may have posted it already, or may still do so.
void NetMailbox::learn_of_receive(int p, const Note& note) {
  for (Send& send : matching_.sends[p]) {
    if (send.told && !send.met && send.id >= note.id &&
        send.post.tag == note.tag) {
      send.met = true;
      if (send.post.bytes == note.bytes) {
        requested(send);
      }
      return;
    }
  }
  peers_[p].posted.push_back(note);
}

void NetMailbox::requested(Send& send) {
  if (send.offered && !send.asked) {
    send.asked = true;
    send.due = send.post.bytes != 0;
  }
}

// A sender that knows of a receive need not ask, if its next message cannot meet
// another one.
void NetMailbox::announce(Receive& receive) {
  const MessagePost& post = receive.post;
  const auto& receives = matching_.receives;
  const auto comes_first = [&](const Receive& r) {
    return &r != &receive && !r.told && r.takes(post.peer, post.tag);
  };
  if (post.peer != kAnySource && post.bytes > kUnasked &&
      std::none_of(receives.begin(), receives.end(), comes_first)) {
    Peer& peer = peers_[post.peer];
    receive.told = true;
    peer.notes.push_back({kReceivePosted, post.tag, peer.heard, post.bytes});
  }
}

void NetMailbox::withdraw_now(int tag) {
  auto& receives = matching_.receives;
  for (auto r = receives.begin(); r != receives.end();) {
    if (!r->matched() && r->post.tag == tag) {
      const MessagePost post = std::move(r->post);
      r = receives.erase(r);
      end(post, Error(ErrorKind::kAborted, "it was withdrawn"));
    } else {
      ++r;
    }
  }
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    matching_.sends[p].remove_if([&](const Send& s) {
      return s.post.what == What::kNotify && s.post.tag == tag;
    });
  }
}

// A message has been found for a receive.
void NetMailbox::found(Receive& receive) {
  const int peer = receive.from;
  const Note& message = receive.message;
  if (message.bytes == 0) {
    return;
  }
  const bool fits = message.bytes == receive.post.bytes;
  if (!fits) {
    if (message.kind == kOffer) {
      return; // it stays where it is
    }
    receive.scratch = NetBuffer(message.bytes); // the sender gets rid of it
  }
  const NetBuffer into = fits
      ? NetBuffer::borrowed(receive.post.data, receive.post.bytes)
      : receive.scratch;
  for (size_t begin = 0; begin < message.bytes; begin += kPiece) {
    receive.data.push_back(transport_->receive(
        peer,
        mail_tag(message.id),
        into.part(begin, std::min<size_t>(kPiece, message.bytes - begin))));
  }
  if (message.kind == kOffer) {
    peers_[peer].notes.push_back({kRequest, message.tag, message.id, 0});
  }
}

bool NetMailbox::drop_done(std::deque<Transport::RequestPtr>& pieces) {
  while (!pieces.empty() &&
         transport_->state(*pieces.front()) == State::kDone) {
    pieces.pop_front();
  }
  return pieces.empty();
}

bool NetMailbox::finish_receives(By by) {
  bool any = false;
  auto& receives = matching_.receives;
  for (auto r = receives.begin(); r != receives.end();) {
    if (!r->matched() || !drop_done(r->data)) {
      ++r;
      continue;
    }
    any = true;
    const bool fits = r->message.bytes == r->post.bytes;
    const bool asked = fits && r->message.bytes != 0 &&
        (r->message.kind == kOffer || r->message.bytes > kUnasked);
    if (!asked) {
      peers_[r->from].notes.push_back(
          {fits ? kAck : kUnexpected,
           r->message.tag,
           r->message.id,
           r->post.bytes});
    }
    const int from = r->from;
    std::exception_ptr error;
    if (!fits) {
      error = std::make_exception_ptr(
          receive_mismatch(r->post, me_, from, r->message.bytes));
    }
    const Done done = std::move(r->post.done);
    r = receives.erase(r);
    push(from, by);
    done(error, from);
  }
  return any;
}

// --- sending -----------------------------------------------------------------

// Whether there is something to do with a rank that is not connected.
bool NetMailbox::needs(int p) const {
  const auto& receives = matching_.receives;
  return !transport_->connected(p) &&
      (!matching_.sends[p].empty() || !peers_[p].notes.empty() ||
       std::any_of(receives.begin(), receives.end(), [&](const Receive& r) {
         // A message from any rank may come from this one.
         return r.post.peer == p || (r.post.peer == kAnySource && !r.matched());
       }));
}

bool NetMailbox::reach(int p) {
  if (!needs(p)) {
    return false;
  }
  try {
    transport_->connect(p, addresses_[p]);
  } catch (const Error& error) {
    check_(); // an abort here comes first
    fail(
        ErrorKind::kPeerFailed,
        "fused: rank {} cannot be reached, and may have ended or left the "
        "group: {}",
        p,
        error.what());
  }
  // Its end shows only on a connection that has carried something.
  peers_[p].notes.push_front({kHello, 0, 0, 0});
  return true;
}

bool NetMailbox::push(int p, By by) {
  Peer& peer = peers_[p];
  auto& sends = matching_.sends[p];
  if (transport_->send_closed(p)) {
    peer.notes.clear();
  }
  if (!transport_->connected(p) || transport_->send_closed(p)) {
    return false;
  }
  bool any = false;
  const auto tell = [&](const Note& note) {
    const NetBuffer text(sizeof note);
    std::memcpy(text.data(), &note, sizeof note);
    sent_notes_.push_back(transport_->send(p, kNotes, text));
    any = true;
  };
  if (peer.notes.empty() &&
      std::all_of(sends.begin(), sends.end(), [](const Send& send) {
        return send.told && !(send.due && send.data.size() < kPiecesAhead);
      })) {
    return false;
  }
  transport_->cork(p, true); // a note and what follows it
  for (; !peer.notes.empty(); peer.notes.pop_front()) {
    tell(peer.notes.front());
  }
  for (Send& send : sends) {
    const size_t bytes = send.post.bytes;
    const auto send_data = [&] {
      const auto until = send.posted + hold(bytes);
      if (by != By::kWaiter && bytes > kUnasked && send.begun == 0 &&
          Clock::now() < until && !awaits_large(p)) {
        held_ = std::min(until, held_.value_or(until));
        return;
      }
      while (send.due && send.data.size() < kPiecesAhead) {
        const size_t piece = std::min(kPiece, bytes - send.begun);
        send.data.push_back(transport_->send(
            p,
            mail_tag(send.id),
            NetBuffer::borrowed(send.post.data + send.begun, piece)));
        send.begun += piece;
        send.due = send.begun < bytes;
        any = true;
      }
    };
    if (send.due) {
      send_data();
    }
    if (send.told) {
      continue;
    }
    send.told = true;
    const auto posted = std::find_if(
        peer.posted.begin(), peer.posted.end(), [&](const Note& note) {
          return note.tag == send.post.tag;
        });
    send.met = posted != peer.posted.end();
    send.asked = send.met && posted->bytes == bytes;
    if (send.met) {
      peer.posted.erase(posted);
    }
    send.offered =
        !send.asked && (bytes > kUnasked || peer.unasked + bytes > kAllUnasked);
    tell({send.offered ? kOffer : kMessage, send.post.tag, send.id, bytes});
    if (!send.offered) {
      send.unasked = !send.asked;
      peer.unasked += send.asked ? 0 : bytes;
      send.due = bytes != 0;
      if (send.due) {
        send_data();
      }
    }
  }
  transport_->cork(p, false);
  return any;
}

// Tells whether a large receive from that rank is posted of which it knows, or will
// in a moment.
bool NetMailbox::awaits_large(int p) const {
  const auto& receives = matching_.receives;
  return std::any_of(receives.begin(), receives.end(), [&](const Receive& r) {
    return r.post.bytes > kUnasked && (r.told || r.from == p) &&
        r.post.peer == p;
  });
}

bool NetMailbox::finish_sends(int p) {
  bool any = false;
  auto& sends = matching_.sends[p];
  sends.remove_if(
      [](const Send& s) { return s.told && s.post.what == What::kNotify; });
  for (auto s = sends.begin(); s != sends.end();) {
    const size_t before = s->data.size();
    const bool sent = drop_done(s->data) && !s->due;
    any = any || s->data.size() != before; // the next piece may go
    if (!sent || !(s->asked || s->answer)) {
      ++s;
      continue;
    }
    any = true;
    if (s->unasked) {
      peers_[p].unasked -= s->post.bytes;
    }
    std::exception_ptr error;
    if (s->answer && s->answer->kind == kUnexpected) {
      error = std::make_exception_ptr(
          send_mismatch(s->post, me_, p, s->answer->bytes));
    }
    const Done done = std::move(s->post.done);
    s = sends.erase(s);
    done(error, p);
  }
  return any;
}

bool NetMailbox::finish_notes() {
  const size_t before = sent_notes_.size();
  while (!sent_notes_.empty() &&
         transport_->state(*sent_notes_.front()) != State::kUnderWay) {
    sent_notes_.pop_front();
  }
  return sent_notes_.size() != before;
}

// --- waiting and failing -----------------------------------------------------

bool NetMailbox::pending() const {
  return matching_.pending() || owes();
}

// A peer may wait to hear that its message has arrived.
bool NetMailbox::owes() const {
  return !sent_notes_.empty() ||
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& p) {
        return !p.notes.empty();
      });
}

void NetMailbox::check() {
  check_(); // peers may wait for a rank that has failed otherwise
  for (const Receive& r : matching_.receives) {
    check(r.post, r.from, false);
  }
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    for (const Send& s : matching_.sends[p]) {
      check(
          s.post,
          s.post.peer,
          !s.told || (s.offered && !s.asked) || s.due || !s.data.empty());
    }
  }
}

bool NetMailbox::may_leave() {
  if (!patience_) {
    patience_.emplace(kMailStopPatience);
  }
  return !owes() || patience_->expired();
}

// Throws when nobody is left who could be at the other end, or time is over.
void NetMailbox::check(const MessagePost& post, int peer, bool to_be_sent) {
  const int other = post.peer == kAnySource ? peer : post.peer;
  bool hope = false; // a message from any rank may come from whoever lives
  for (int p = 0; p < static_cast<int>(peers_.size()); ++p) {
    const bool could_be = p != me_ && (other == kAnySource || other == p);
    hope = hope ||
        (could_be && !transport_->lost(p) &&
         !(to_be_sent && transport_->send_closed(p)) &&
         (transport_->connected(p) || !gone_(p)));
  }
  if (hope && !post.deadline.expired()) {
    return;
  }
  const std::string state =
      other == kAnySource ? "" : transport_->describe(other);
  if (!hope) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: {}, failed on rank {}: {}",
        post.name(),
        me_,
        other == kAnySource ? "every other rank has ended or left the group"
            : state.empty()
            ? formatted("rank {} has ended or left the group", other)
            : state);
  }
  throw late_message(post, me_, state);
}

} // namespace fusedpg
