#include "net/ucx_transport.hpp"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>

#include "base/error.hpp"
#include "net/exchange_words.hpp"
#include "net/ucx_leaving.hpp"

namespace fusedpg {

using namespace ucx;

namespace {

constexpr uint32_t kHello = ~uint32_t(0);

// Those of one sender and tag meet in order.
uint64_t tag_of(int from, uint32_t tag) {
  return static_cast<uint64_t>(from) << 32 | tag;
}

} // namespace

// Waits once; an operation that nobody waits for ends with the transport.
class UcxTransport::UcxRequest : public Transport::Request {
 public:
  UcxRequest(UcxTransport& transport, OperationPtr operation)
      : transport_(transport),
        operation_(std::move(operation)) {}
  void wait(const Deadline& deadline) override {
    transport_.wait(*operation_, deadline);
  }
  const Operation& operation() const {
    return *operation_;
  }

 private:
  UcxTransport& transport_;
  const OperationPtr operation_;
};

UcxTransport::UcxTransport(const Api& api, const UcxConfig& config, int rank)
    : api_(api),
      rank_(rank),
      spin_(config.spin),
      farewell_(config.farewell) {}

UcxTransport::UcxTransport(
    const Api& api,
    const UcxConfig& config,
    int rank,
    int size)
    : UcxTransport(api, config, rank) {
  start(config, size);
}

UcxTransport::UcxTransport(
    const Api& api,
    const UcxConfig& config,
    Rendezvous& rendezvous,
    int rank,
    int size,
    const Deadline& deadline,
    const std::function<void()>& check)
    : UcxTransport(api, config, rank) {
  const auto meet = [&](const std::string& mine) {
    return exchange_words(
        rendezvous, "ucx/address", rank_, size, mine, deadline, check);
  };
  std::string mine;
  try {
    start(config, size);
    mine = address();
  } catch (...) {
    meet(""); // so that nobody waits for it
    throw;
  }
  try {
    connect_all(meet(mine), deadline, check);
  } catch (...) {
    failed_ = true;
    throw;
  }
}

void UcxTransport::start(const UcxConfig& config, int size) {
  worker_ = std::make_unique<UcxWorker>(api_, config, size);
  both_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!both_) {
    fail_errno("fused: epoll_create1");
  }
  for (const int fd : {worker_->event_fd(), abort_signal_.fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
    if (epoll_ctl(both_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail_errno("fused: epoll_ctl");
    }
  }
}

void UcxTransport::connect_all(
    const std::vector<std::string>& addresses,
    const Deadline& deadline,
    const std::function<void()>& check_others) {
  for (int p = 0; p < size(); ++p) {
    if (addresses[p].empty()) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: rank {} could not start UCX; its own error says why",
          p);
    }
    if (p != rank_) {
      connect(p, addresses[p]);
    }
  }
  // Whatever cannot be reached shows here, where the cause is plain.
  std::vector<OperationPtr> hellos;
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) {
      hellos.push_back(start_receive(p, kHello, NetBuffer(1)));
      hellos.push_back(start_send(p, kHello, NetBuffer(1)));
    }
  }
  for (const auto& hello : hellos) {
    constexpr std::chrono::milliseconds kLook{20};
    while (!deadline.expired() &&
           !progress_until(Deadline(kLook), [&] { return over(*hello); })) {
      check_others();
    }
    wait(*hello, deadline);
  }
}

UcxTransport::~UcxTransport() {
  if (worker_ && !failed_ && !aborted_) {
    leave(std::move(worker_), Deadline(farewell_));
  }
}

void UcxTransport::end() noexcept {
  failed_ = true;
  worker_->end();
}

// --- messages ----------------------------------------------------------------

Transport::RequestPtr UcxTransport::send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  return std::make_unique<UcxRequest>(*this, start_send(to, tag, message));
}

Transport::RequestPtr UcxTransport::receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  return std::make_unique<UcxRequest>(*this, start_receive(from, tag, into));
}

UcxTransport::OperationPtr UcxTransport::start_send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  if (failed_ || aborted_ || lost(to)) {
    give_up({*worker_, to, true, message}, Deadline(std::chrono::hours(1)));
  }
  return worker_->send(to, tag_of(rank_, tag), message);
}

UcxTransport::OperationPtr UcxTransport::start_receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  // What a rank has sent before it left can still be received.
  if (failed_ || aborted_) {
    give_up({*worker_, from, false, into}, Deadline(std::chrono::hours(1)));
  }
  return worker_->receive(from, tag_of(from, tag), into);
}

bool UcxTransport::over(const Operation& operation) const {
  return operation.done || deaf(operation.peer);
}

// --- waiting -----------------------------------------------------------------

template <typename Done>
bool UcxTransport::progress_until(const Deadline& deadline, const Done& done) {
  auto spun = Clock::now();
  while (!done()) {
    const bool moved = worker_->progress();
    // Also while others keep this rank busy.
    if (aborted_ || deadline.expired()) {
      return done();
    }
    if (moved) {
      spun = Clock::now();
      fruitless_ = 0;
    } else if (Clock::now() - spun > spin_) {
      sleep_until(deadline);
    }
  }
  return true;
}

void UcxTransport::sleep_until(const Deadline& deadline) {
  constexpr std::chrono::milliseconds kLongest{1000};
  sleep(std::min(deadline.left(), kLongest)).run();
}

UcxTransport::State UcxTransport::state(const Request& request) {
  const Operation& operation =
      static_cast<const UcxRequest&>(request).operation();
  if (operation.done) {
    return operation.status == kOk ? State::kDone : State::kLost;
  }
  return lost(operation.peer) ? State::kLost : State::kUnderWay;
}

// Over TCP UCX's descriptor stays readable while the peer has not acknowledged a
// connection: to wait for it would use all of a core. So after some sleeps that
// ended early for nothing, it is left out until something moves or it is quiet.
PolledTransport::Sleep UcxTransport::sleep(std::chrono::milliseconds most) {
  constexpr std::chrono::microseconds kPause{100};
  constexpr int kPatience = 8;
  const auto now = Clock::now();
  if (fruitless_ < kPatience) {
    fruitless_ = now < sleeps_until_ ? fruitless_ + 1 : 0;
  } else {
    pollfd events{worker_->event_fd(), POLLIN, 0};
    if (poll(&events, 1, 0) == 0) {
      fruitless_ = 0; // it can be waited for again
    }
  }
  if (fruitless_ >= kPatience) {
    return {abort_signal_.fd(), kPause};
  }
  sleeps_until_ = now + most;
  return {worker_->arm() ? both_.get() : -1, most};
}

void UcxTransport::awake() {
  abort_signal_.reset();
}

void UcxTransport::wake() {
  abort_signal_.set();
}

void UcxTransport::wait(Operation& operation, const Deadline& deadline) {
  const Waits::Timer timer(operation.done ? nullptr : waits_, operation.peer);
  const auto done = [&] { return over(operation); };
  if (!failed_ && watch_) {
    constexpr std::chrono::milliseconds kLook{20};
    while (!progress_until(Deadline(std::min(kLook, deadline.left())), done) &&
           !aborted_ && !deadline.expired()) {
      try {
        watch_();
      } catch (...) {
        end();
        throw;
      }
    }
  } else if (!failed_) {
    progress_until(deadline, done);
  }
  if (!operation.done ||
      (operation.status != kOk && operation.status != kTruncated)) {
    give_up(operation, deadline);
  }
  const size_t expected = operation.buffer.bytes();
  const bool truncated = operation.status == kTruncated;
  if (!operation.sends && (truncated || operation.length != expected)) {
    end();
    fail(
        ErrorKind::kMismatch,
        "fused: rank {} (here) expected {} bytes of rank {}, which sent {}",
        rank_,
        expected,
        operation.peer,
        // UCX does not say by how much.
        truncated ? "more" : formatted("{}", operation.length));
  }
}

std::string UcxTransport::losses() const {
  std::string text;
  for (const int p : worker_->losses()) {
    text += formatted(
        "{}rank {} ({})",
        text.empty() ? "connections that ended, in this order: " : ", ",
        p,
        api_.status_string(worker_->lost(p)));
  }
  return text.empty() ? "no connection has ended" : text;
}

void UcxTransport::give_up(
    const Operation& operation,
    const Deadline& deadline) {
  const std::string what = formatted(
      "fused: a message from rank {} to rank {}",
      operation.sends ? formatted("{} (here)", rank_)
                      : formatted("{}", operation.peer),
      operation.sends ? formatted("{}", operation.peer)
                      : formatted("{} (here)", rank_));
  const Status lost = worker_->lost(operation.peer);
  const std::string losses = this->losses();
  const Status status = operation.status;
  const bool done = operation.done;
  end();
  if (aborted_) {
    fail(ErrorKind::kAborted, "{}: the group was aborted", what);
  }
  if (lost == kOk && !done && deadline.expired()) {
    fail(
        ErrorKind::kTimeout,
        "{}: not done within {} ms; {}",
        what,
        deadline.timeout().count(),
        losses);
  }
  fail(
      ErrorKind::kPeerFailed,
      "{}: {}; {}",
      what,
      api_.status_string(lost != kOk ? lost : status),
      losses);
}

void UcxTransport::flush(const Deadline& deadline) {
  if (failed_ || aborted_) {
    return;
  }
  const StatusPtr started = worker_->start_flush();
  if (started != nullptr) {
    progress_until(deadline, [&] { return worker_->over(started); });
    worker_->release(started);
  }
}

bool UcxTransport::progress() {
  constexpr int kSteps = 64; // each is a packet or so
  bool moved = false;
  if (!failed_ && !aborted_) {
    for (int step = 0; step < kSteps && worker_->progress(); ++step) {
      fruitless_ = 0;
      moved = true;
    }
  }
  return moved;
}

void UcxTransport::abort() {
  aborted_ = true;
  wake();
}

} // namespace fusedpg
