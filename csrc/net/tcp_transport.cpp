#include "net/tcp_transport.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/error.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

constexpr uint32_t kHeaderMagic = 0x67736d66; // "fmsg"
constexpr size_t kAhead = 16 << 10; // bytes that are read with a header
constexpr int kSteps = 16; // of one connection; then others have theirs
// A port that refuses a connection may be one that a proxy serves.
constexpr std::chrono::milliseconds kConnectPatience{500};
constexpr std::chrono::milliseconds kRetryEvery{20};

std::string text_of(int error) {
  return std::strerror(error); // NOLINT(concurrency-mt-unsafe)
}

// Keys of epoll's events: 0 is a signal, others are a peer's connection in one
// direction.
uint64_t in_key(int peer) {
  return static_cast<uint64_t>(peer) * 2 + 2;
}
uint64_t out_key(int peer) {
  return in_key(peer) + 1;
}

} // namespace

// Waits once; an operation that nobody waits for ends with the transport.
class TcpTransport::TcpRequest : public Transport::Request {
 public:
  TcpRequest(TcpTransport& transport, OperationPtr operation)
      : transport_(transport),
        operation_(std::move(operation)) {}
  void wait(const Deadline& deadline) override {
    transport_.wait(*operation_, deadline);
  }
  const Operation& operation() const {
    return *operation_;
  }

 private:
  TcpTransport& transport_;
  const OperationPtr operation_;
};

TcpTransport::TcpTransport(
    const Config& config,
    std::unique_ptr<TcpEndpoint> endpoint)
    : config_(config),
      endpoint_(std::move(endpoint)),
      poll_(Fd::opened([] { return epoll_create1(EPOLL_CLOEXEC); })),
      outs_(endpoint_->size()),
      ins_(endpoint_->size()) {
  if (!poll_) {
    fail_errno("fused: epoll_create1");
  }
  for (const int fd : {endpoint_->signal().fd(), wake_signal_.fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail_errno("fused: epoll_ctl");
    }
  }
}

TcpTransport::TcpTransport(
    const Config& config,
    std::unique_ptr<TcpEndpoint> endpoint,
    const std::vector<std::string>& addresses)
    : TcpTransport(config, std::move(endpoint)) {
  for (int p = 0; p < size(); ++p) {
    if (p != rank()) {
      outs_[p].address = TcpAddress::of(addresses[p]);
    }
  }
}

TcpTransport::~TcpTransport() {
  flush(Deadline(config_.farewell));
}

// --- messages ----------------------------------------------------------------

Transport::RequestPtr TcpTransport::send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  const OperationPtr operation(
      new Operation{to, true, {message.bytes(), tag, kHeaderMagic}, message});
  check_usable(*operation);
  Out& out = outs_[to];
  out.queue.push_back(operation);
  reach(to);
  if (!out.corked) {
    write_to(to);
  }
  return std::make_unique<TcpRequest>(*this, operation);
}

Transport::RequestPtr TcpTransport::receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  const OperationPtr operation(
      new Operation{from, false, {into.bytes(), tag, kHeaderMagic}, into});
  check_usable(*operation);
  In& in = ins_[from];
  const auto early = in.waiting.find(tag);
  if (early != in.waiting.end()) {
    const NetBuffer message = std::move(early->second.front());
    early->second.pop_front();
    if (early->second.empty()) {
      in.waiting.erase(early);
    }
    if (message.bytes() == into.bytes()) {
      std::copy_n(message.data(), message.bytes(), into.data());
    }
    complete(*operation, message.bytes());
  } else if (
      in.inside && in.header.tag == tag && !in.into &&
      in.posted.find(tag) == in.posted.end() &&
      in.header.bytes == into.bytes()) {
    // It is half here: the rest may go where it belongs.
    std::copy_n(in.early.data(), in.got, into.data());
    in.into = operation;
    in.early = {};
    poll_in(from, true);
  } else {
    in.posted[tag].push_back(operation);
    ++in.num_posted;
    poll_in(from, true);
    take_read(from); // it may have been read already
  }
  return std::make_unique<TcpRequest>(*this, operation);
}

void TcpTransport::complete(Operation& receive, uint64_t came) {
  receive.came = came;
  receive.done = true;
}

// A message that a peer has sent before it left can still be received.
void TcpTransport::check_usable(const Operation& operation) {
  if (failed_ || aborted_ ||
      (operation.sends && outs_[operation.peer].state == Out::State::kLost)) {
    give_up(operation, Deadline(std::chrono::hours(1)));
  }
}

// --- connecting --------------------------------------------------------------

// A caller that looks at its requests knows when it needs a connection.
void TcpTransport::connect(int peer, const std::string& address) {
  outs_[peer].address = TcpAddress::of(address);
  reach(peer);
}

void TcpTransport::reach(int peer) {
  Out& out = outs_[peer];
  if (!out.patience) {
    out.patience.emplace(kConnectPatience);
    start_connecting(peer);
  }
}

void TcpTransport::start_connecting(int peer) {
  Out& out = outs_[peer];
  out.heard = 0;
  out.rest.clear();
  out.polled_to_write = false;
  out.tried = Clock::now();
  out.answered = false;
  out.socket = connect_to(out.address->socket);
  if (!out.socket) {
    retry_or_lose(peer, text_of(errno));
    return;
  }
  out.state = Out::State::kConnecting;
  epoll_event event{
      .events = EPOLLIN | EPOLLOUT, .data = {.u64 = out_key(peer)}};
  if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, out.socket.get(), &event) != 0) {
    fail_errno("fused: epoll_ctl");
  }
  out.polled_to_write = true;
}

void TcpTransport::retry_or_lose(int peer, const std::string& why) {
  Out& out = outs_[peer];
  if (out.patience->expired()) {
    lose(peer, why);
    return;
  }
  out.socket.reset();
  out.state = Out::State::kNone;
  out.why = why;
  out.retry_at = Clock::now() + kRetryEvery;
  ++retries_;
}

// The peer has closed a new connection without a word: there are too many
// others, or it has just ended, which the next attempt will show.
void TcpTransport::retry_with_new_patience(int peer, const std::string& why) {
  outs_[peer].patience.emplace(kConnectPatience);
  retry_or_lose(peer, why);
}

bool TcpTransport::retry_connecting() {
  if (retries_ == 0) {
    return false;
  }
  bool moved = false;
  for (int p = 0; p < size(); ++p) {
    Out& out = outs_[p];
    if (out.state == Out::State::kNone && out.patience &&
        Clock::now() >= out.retry_at) {
      --retries_;
      start_connecting(p);
      moved = true;
    }
  }
  return moved;
}

// The handshake of the side that connects.
bool TcpTransport::handshake(int peer) {
  Out& out = outs_[peer];
  bool moved = false;
  if (out.state == Out::State::kConnecting) {
    if (const int error = connect_result(out.socket)) {
      retry_or_lose(peer, text_of(error));
      return true;
    }
    out.answered = true;
    out.hello = {
        tcp::kMagic, out.address->endpoint, rank(), peer, random_key()};
    out.rest.assign(
        reinterpret_cast<const char*>(&out.hello), sizeof out.hello);
    out.said_hello = Clock::now();
  }
  if (!out.rest.empty()) {
    const ssize_t sent = ::send(
        out.socket.get(), out.rest.data(), out.rest.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      // ENOTCONN: not yet.
      if (would_block() || errno == ENOTCONN) {
        poll_out(peer, true);
      } else {
        retry_with_new_patience(peer, text_of(errno));
      }
      return false;
    }
    out.state = Out::State::kHandshake;
    out.rest.erase(0, static_cast<size_t>(sent));
    moved = true;
    if (!out.rest.empty()) {
      return moved;
    }
  }
  if (out.state == Out::State::kHandshake && out.heard < sizeof out.challenge) {
    poll_out(peer, false);
    const ssize_t got = recv(
        out.socket.get(),
        reinterpret_cast<char*>(&out.challenge) + out.heard,
        sizeof out.challenge - out.heard,
        0);
    if (got <= 0) {
      if (got == 0 || !would_block()) {
        retry_with_new_patience(
            peer, got == 0 ? "it closed a new connection" : text_of(errno));
      }
      return moved;
    }
    out.heard += static_cast<size_t>(got);
    if (out.heard < sizeof out.challenge) {
      return true;
    }
    if (out.challenge.nonce == Key128{} && out.challenge.proof == Key128{}) {
      // It listened before anybody knew its address, and listens no more.
      lose(peer, "it has left the group, or the group has failed there");
      return true;
    }
    if (Clock::now() - out.said_hello > tcp::kPatience * 4 / 5) {
      // It may have closed this by now, which would show only when it is too
      // late to start_connecting again.
      retry_with_new_patience(peer, "this rank was late to answer it");
      return true;
    }
    const Key128& key = out.address->key;
    if (!same_secret(
            out.challenge.proof,
            tcp::listener_proof(key, out.hello, out.challenge.nonce))) {
      lose(peer, "who listens at its port is not of this group");
      return true;
    }
    const Key128 proof =
        tcp::connector_proof(key, out.hello, out.challenge.nonce);
    out.rest.assign(reinterpret_cast<const char*>(proof.data()), proof.size());
    moved = true;
  }
  if (out.heard == sizeof out.challenge && !out.rest.empty()) {
    return handshake(peer) || moved;
  }
  if (out.heard == sizeof out.challenge) {
    out.state = Out::State::kOpen;
    out.was_open = true;
    moved = true;
  }
  return moved;
}

bool TcpTransport::take_arrived() {
  bool moved = false;
  for (auto& [peer, socket] : endpoint_->take()) {
    In& in = ins_[peer];
    if (in.socket || in.ended) {
      continue; // it has one
    }
    in.socket = std::move(socket);
    in.ahead.resize(kAhead);
    poll_in(peer, true);
    moved = true;
  }
  return moved;
}

// --- moving bytes ------------------------------------------------------------

void TcpTransport::poll_out(int peer, bool to_write) {
  Out& out = outs_[peer];
  if (out.polled_to_write == to_write || !out.socket) {
    return;
  }
  out.polled_to_write = to_write;
  epoll_event event{
      .events = EPOLLIN | (to_write ? EPOLLOUT : 0U),
      .data = {.u64 = out_key(peer)}};
  epoll_ctl(poll_.get(), EPOLL_CTL_MOD, out.socket.get(), &event);
}

// A connection that nobody wants anything of is not looked at: it might always
// be ready.
void TcpTransport::poll_in(int peer, bool on) {
  In& in = ins_[peer];
  if (in.polled == on || !in.socket) {
    return;
  }
  in.polled = on;
  epoll_event event{.events = EPOLLIN, .data = {.u64 = in_key(peer)}};
  epoll_ctl(
      poll_.get(), on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, in.socket.get(), &event);
}

bool TcpTransport::write_to(int peer) {
  Out& out = outs_[peer];
  switch (out.state) {
    case Out::State::kConnecting:
    case Out::State::kHandshake:
      if (!handshake(peer) || out.state != Out::State::kOpen) {
        return false;
      }
      write_messages(peer);
      return true;
    case Out::State::kOpen:
      return write_messages(peer);
    default:
      return false;
  }
}

bool TcpTransport::write_messages(int peer) {
  Out& out = outs_[peer];
  bool moved = false;
  while (!out.queue.empty()) {
    // Headers and bytes of several messages in one call.
    std::array<iovec, 16> parts;
    size_t count = 0;
    size_t skip = out.written;
    const auto add = [&](const void* data, size_t bytes) {
      const size_t gone = std::min(skip, bytes);
      skip -= gone;
      if (gone < bytes) {
        parts[count++] = {
            const_cast<char*>(static_cast<const char*>(data)) + gone,
            bytes - gone};
      }
    };
    for (const OperationPtr& one : out.queue) {
      if (count + 2 > parts.size()) {
        break;
      }
      add(&one->header, sizeof one->header);
      add(one->buffer.data(), one->buffer.bytes());
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(out.socket.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (would_block()) {
        poll_out(peer, true);
      } else {
        lose(peer, text_of(errno));
      }
      return moved;
    }
    moved = true;
    out.written += static_cast<size_t>(sent);
    while (!out.queue.empty()) {
      const size_t all = sizeof(Header) + out.queue.front()->buffer.bytes();
      if (out.written < all) {
        break;
      }
      out.written -= all;
      out.queue.front()->done = true;
      out.queue.pop_front();
    }
  }
  poll_out(peer, false);
  return moved;
}

void TcpTransport::cork(int peer, bool on) {
  Out& out = outs_[peer];
  out.corked = on;
  if (!on && !out.queue.empty()) {
    write_to(peer);
  }
}

// The socket may have something: the poll says so, or somebody waits for it.
bool TcpTransport::read_from(int peer) {
  In& in = ins_[peer];
  in.drained = false;
  if (in.socket && !in.wanted()) {
    poll_in(peer, false); // until somebody wants something again
    return false;
  }
  return take_read(peer);
}

// Takes bytes that were read ahead, and reads the socket as long as it is known
// to have some: the poll tells of more.
bool TcpTransport::take_read(int peer) {
  In& in = ins_[peer];
  bool moved = false;
  for (int step = 0; in.socket && in.wanted() &&
       (step < kSteps || in.begin != in.end) && read_some(peer);
       ++step) {
    moved = true;
  }
  return moved;
}

// As recv(). A short answer means that there is no more.
ssize_t TcpTransport::read_socket(int peer, char* into, size_t bytes) {
  In& in = ins_[peer];
  if (in.drained) {
    errno = EAGAIN;
    return -1;
  }
  const ssize_t got = recv(in.socket.get(), into, bytes, 0);
  in.drained = got < static_cast<ssize_t>(bytes);
  return got;
}

// One step: a header, or bytes of a message.
bool TcpTransport::read_some(int peer) {
  In& in = ins_[peer];
  if (!in.inside) {
    if (in.end - in.begin < sizeof(Header)) {
      std::copy(
          in.ahead.begin() + static_cast<ptrdiff_t>(in.begin),
          in.ahead.begin() + static_cast<ptrdiff_t>(in.end),
          in.ahead.begin());
      in.end -= in.begin;
      in.begin = 0;
      const ssize_t got =
          read_socket(peer, in.ahead.data() + in.end, in.ahead.size() - in.end);
      if (got <= 0) {
        if (got == 0 || !would_block()) {
          in_ended(
              peer, got == 0 ? "it closed its connection" : text_of(errno));
        }
        return false;
      }
      in.end += static_cast<size_t>(got);
    }
    return in.end - in.begin < sizeof(Header) || begin_message(peer);
  }
  char* into = in.into ? in.into->buffer.data() : in.early.data();
  const size_t left = in.header.bytes - in.got;
  if (in.begin != in.end) {
    const size_t here = std::min(left, in.end - in.begin);
    std::memcpy(into + in.got, in.ahead.data() + in.begin, here);
    in.begin += here;
    in.got += here;
  } else {
    const ssize_t got = read_socket(peer, into + in.got, left);
    if (got <= 0) {
      if (got == 0 || !would_block()) {
        in_ended(peer, got == 0 ? "it closed its connection" : text_of(errno));
      }
      return false;
    }
    in.got += static_cast<size_t>(got);
  }
  if (in.got == in.header.bytes) {
    end_message(peer);
  }
  return true;
}

bool TcpTransport::begin_message(int peer) {
  In& in = ins_[peer];
  std::memcpy(&in.header, in.ahead.data() + in.begin, sizeof(Header));
  in.begin += sizeof(Header);
  if (in.header.magic != kHeaderMagic) {
    in_ended(peer, "what it sends is no message");
    return false;
  }
  in.got = 0;
  const auto posted = in.posted.find(in.header.tag);
  if (posted != in.posted.end() &&
      posted->second.front()->buffer.bytes() == in.header.bytes) {
    in.into = std::move(posted->second.front());
    posted->second.pop_front();
    if (posted->second.empty()) {
      in.posted.erase(posted);
    }
    --in.num_posted;
  } else {
    try {
      in.early = NetBuffer(in.header.bytes);
    } catch (const std::bad_alloc&) {
      in_ended(
          peer,
          formatted("no memory for its message of {} bytes", in.header.bytes));
      return false;
    }
  }
  in.inside = true;
  if (in.header.bytes == 0) {
    end_message(peer);
  }
  return true;
}

void TcpTransport::end_message(int peer) {
  In& in = ins_[peer];
  in.inside = false;
  if (in.into) {
    complete(*std::exchange(in.into, nullptr), in.header.bytes);
    return;
  }
  const NetBuffer message = std::exchange(in.early, {});
  // Posted since; or another length than was expected.
  const auto posted = in.posted.find(in.header.tag);
  if (posted == in.posted.end()) {
    in.waiting[in.header.tag].push_back(message);
    return;
  }
  const OperationPtr receive = std::move(posted->second.front());
  posted->second.pop_front();
  if (posted->second.empty()) {
    in.posted.erase(posted);
  }
  --in.num_posted;
  if (receive->buffer.bytes() == message.bytes()) {
    std::copy_n(message.data(), message.bytes(), receive->buffer.data());
  }
  complete(*receive, message.bytes());
}

// --- the end of connections --------------------------------------------------

void TcpTransport::lose(int peer, const std::string& why) {
  Out& out = outs_[peer];
  out.state = Out::State::kLost;
  out.socket.reset();
  out.queue.clear();
  out.why = why;
  note_loss(peer, why);
}

void TcpTransport::in_ended(int peer, const std::string& why) {
  In& in = ins_[peer];
  in.socket.reset();
  in.polled = false;
  in.ended = true;
  in.why = why;
  note_loss(peer, why);
}

void TcpTransport::note_loss(int peer, const std::string& why) {
  if (std::none_of(lost_.begin(), lost_.end(), [peer](const auto& one) {
        return one.first == peer; // its other connection went first
      })) {
    lost_.emplace_back(peer, why);
  }
}

void TcpTransport::end() noexcept {
  failed_ = true;
  endpoint_->close();
  for (Out& out : outs_) {
    out.socket.reset();
    out.queue.clear();
  }
  for (In& in : ins_) {
    in.socket.reset();
    in.polled = false;
    in.into.reset();
    in.posted.clear();
  }
}

// --- waiting -----------------------------------------------------------------

bool TcpTransport::turn(int timeout_ms) {
  bool moved = retry_connecting();
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(
      poll_.get(),
      events.data(),
      static_cast<int>(events.size()),
      retries_ == 0 ? timeout_ms
                    : std::min<int>(timeout_ms, kRetryEvery.count()));
  for (int i = 0; i < count; ++i) {
    const uint64_t key = events[i].data.u64;
    if (key == 0) {
      moved = take_arrived() || moved;
      continue;
    }
    const int peer = static_cast<int>((key - 2) / 2);
    if (key == in_key(peer)) {
      moved = read_from(peer) || moved;
      continue;
    }
    Out& out = outs_[peer];
    if (out.state == Out::State::kOpen &&
        (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
      // Nobody sends anything here: it has gone.
      char nothing = 0;
      const ssize_t got = recv(out.socket.get(), &nothing, 1, 0);
      if (got >= 0 || !would_block()) {
        lose(peer, got < 0 ? text_of(errno) : "it closed its connection");
        moved = true;
        continue;
      }
    }
    moved = write_to(peer) || moved;
  }
  return moved;
}

template <typename Done>
bool TcpTransport::progress_until(const Deadline& deadline, const Done& done) {
  constexpr std::chrono::milliseconds kLongest{1000};
  auto spun = Clock::now();
  while (!done()) {
    const bool spins = Clock::now() - spun < config_.spin;
    const auto longest = std::min(deadline.left(), kLongest);
    const bool moved = turn(spins ? 0 : static_cast<int>(longest.count()));
    // Also while others keep this rank busy.
    if (aborted_ || deadline.expired()) {
      return done();
    }
    if (moved) {
      spun = Clock::now();
    }
  }
  return true;
}

// A receive fails when nothing can come any more.
bool TcpTransport::over(const Operation& operation) {
  if (operation.done) {
    return true;
  }
  if (operation.sends) {
    return send_closed(operation.peer);
  }
  return lost(operation.peer);
}

// A peer's messages come by a connection of their own, which ends behind the
// last one.
bool TcpTransport::lost(int peer) {
  In& in = ins_[peer];
  if (in.ended) {
    return true;
  }
  // A peer that has left may have sent a first message, whose connection is
  // still in its handshake.
  if (in.socket || !send_closed(peer) || endpoint_->expects(peer)) {
    return false;
  }
  in_ended(peer, outs_[peer].why);
  return true;
}

TcpTransport::State TcpTransport::state(const Request& request) {
  const Operation& operation =
      static_cast<const TcpRequest&>(request).operation();
  if (operation.done) {
    return operation.sends || operation.came == operation.buffer.bytes()
        ? State::kDone
        : State::kLost;
  }
  return failed_ || over(operation) ? State::kLost : State::kUnderWay;
}

void TcpTransport::Sleep::run() const {
  if (descriptor >= 0) {
    pollfd fd{descriptor, POLLIN, 0};
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
    const timespec time{
        .tv_sec = seconds.count(), .tv_nsec = (most - seconds).count() * 1000};
    ppoll(&fd, 1, &time, nullptr);
  }
}

void TcpTransport::wait_briefly(std::chrono::milliseconds most) {
  sleep(most).run();
  awake();
  progress();
}

TcpTransport::Sleep TcpTransport::sleep(std::chrono::milliseconds most) {
  return {poll_.get(), retries_ == 0 ? most : std::min(most, kRetryEvery)};
}

void TcpTransport::wake() {
  wake_signal_.set();
}

void TcpTransport::awake() {
  wake_signal_.reset();
}

void TcpTransport::wait(Operation& operation, const Deadline& deadline) {
  const Waits::Timer timer(operation.done ? nullptr : waits_, operation.peer);
  const auto done = [&] { return over(operation); };
  if (!failed_ && !operation.done && !aborted_) {
    // This peer's connection first: often there is nothing else to do.
    operation.sends ? write_to(operation.peer) : read_from(operation.peer);
    // A connection of our own ends when the peer does, whether or not it has
    // sent anything.
    if (!done()) {
      reach(operation.peer);
    }
  }
  constexpr std::chrono::milliseconds kLook{20};
  while (!failed_ &&
         !progress_until(Deadline(std::min(kLook, deadline.left())), done) &&
         !aborted_ && !deadline.expired()) {
    try {
      while_waiting();
      if (watch_) {
        watch_();
      }
    } catch (...) {
      end();
      throw;
    }
  }
  if (!operation.done) {
    give_up(operation, deadline);
  }
  if (!operation.sends && operation.came != operation.buffer.bytes()) {
    end();
    fail(
        ErrorKind::kSystem, // kMismatch leaves ranks in step
        "fused: rank {} (here) expected {} bytes of rank {}, which sent {}",
        rank(),
        operation.buffer.bytes(),
        operation.peer,
        operation.came);
  }
}

// But for what describe(peer) says.
std::string TcpTransport::losses(int peer) const {
  std::string text;
  if (lost_.size() == 1 && lost_[0].first == peer) {
    return text;
  }
  for (const auto& [p, why] : lost_) {
    text += formatted(
        "{}rank {} ({})",
        text.empty() ? "; connections that ended, in this order: " : ", ",
        p,
        why);
  }
  return text;
}

std::string TcpTransport::describe(int peer) const {
  constexpr const char* kCheck =
      "check that no firewall stops these connections (FUSEDPG_PORT_RANGE "
      "chooses the ports) and that FUSEDPG_SOCKET_IFNAME or GLOO_SOCKET_IFNAME "
      "names an interface that the other hosts reach";
  const Out& out = outs_[peer];
  const In& in = ins_[peer];
  const std::string there = out.address
      ? formatted("rank {} at {}", peer, out.address->socket.readable())
      : formatted("rank {}", peer);
  const auto ms_since = [](Clock::time_point begin) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               Clock::now() - begin)
        .count();
  };
  const bool lost = out.state == Out::State::kLost;
  if (out.was_open ? lost || in.ended : in.ended && !lost) {
    return formatted(
        "the connection {} {} has ended ({})",
        out.was_open ? "to" : "from",
        there,
        in.ended ? in.why : out.why);
  }
  if (out.state == Out::State::kOpen && in.socket) {
    return formatted("the connections to and from {} stand", there);
  }
  if (out.state == Out::State::kOpen) {
    return formatted(
        "{} has let this rank in, but has not connected to this one at {}: it "
        "has not come to this operation, or a firewall stops it on the way to "
        "that address",
        there,
        endpoint_->socket_address().readable());
  }
  if (out.state == Out::State::kConnecting) {
    return formatted(
        "{} has not answered this rank's connection for {} ms: {}",
        there,
        ms_since(out.tried),
        kCheck);
  }
  if (out.state == Out::State::kHandshake) {
    return formatted(
        "{} has taken this rank's connection, but has not said a word for {} "
        "ms: its process is stopped, or something else listens there",
        there,
        ms_since(out.said_hello));
  }
  if (out.answered) {
    return formatted("{} does not let this rank in ({})", there, out.why);
  }
  return formatted(
      "{} cannot be connected to ({}): its process has ended; if it lives, {}",
      there,
      out.why.empty() ? "not tried" : out.why,
      kCheck);
}

void TcpTransport::give_up(
    const Operation& operation,
    const Deadline& deadline) {
  const int peer = operation.peer;
  const std::string what = formatted(
      "fused: a message from rank {} to rank {}",
      operation.sends ? formatted("{} (here)", rank()) : formatted("{}", peer),
      operation.sends ? formatted("{}", peer) : formatted("{} (here)", rank()));
  const bool was_failed = failed_;
  const std::string state = was_failed
      ? "the connections were closed after a failure"
      : describe(peer);
  const std::string losses = this->losses(peer);
  const bool lost = operation.sends ? outs_[peer].state == Out::State::kLost
                                    : ins_[peer].ended;
  end();
  if (aborted_) {
    fail(ErrorKind::kAborted, "{}: the group was aborted", what);
  }
  if (!lost && !was_failed && deadline.expired()) {
    fail(
        ErrorKind::kTimeout,
        "{}: not done within {} ms; {}{}",
        what,
        deadline.timeout().count(),
        state,
        losses);
  }
  fail(ErrorKind::kPeerFailed, "{}: {}{}", what, state, losses);
}

void TcpTransport::flush(const Deadline& deadline) {
  if (failed_ || aborted_) {
    return;
  }
  // Bytes that the system has taken are on their way.
  progress_until(deadline, [&] {
    return std::all_of(outs_.begin(), outs_.end(), [](const Out& out) {
      return out.queue.empty();
    });
  });
}

bool TcpTransport::progress() {
  return !failed_ && !aborted_ && turn(0);
}

void TcpTransport::abort() {
  aborted_ = true;
  wake();
}

} // namespace fusedpg
