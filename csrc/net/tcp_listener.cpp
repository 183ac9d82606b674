#include "net/tcp_listener.hpp"

#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <sstream>

#include "base/error.hpp"
#include "base/fork.hpp"

namespace fusedpg {
namespace tcp {
namespace {

// A side proves that it has seen this, and which side it is.
struct Transcript {
  Hello hello;
  Key128 nonce;
  uint64_t side;
};

Key128 proof(
    const Key128& key,
    const Hello& hello,
    const Key128& nonce,
    uint64_t side) {
  const Transcript said{hello, nonce, side};
  return siphash(key, &said, sizeof said);
}

} // namespace

Key128 listener_proof(
    const Key128& key,
    const Hello& hello,
    const Key128& nonce) {
  return proof(key, hello, nonce, 1);
}

Key128 connector_proof(
    const Key128& key,
    const Hello& hello,
    const Key128& nonce) {
  return proof(key, hello, nonce, 2);
}

} // namespace tcp

namespace {

constexpr size_t kMostVisitors = 256; // with strangers among them
constexpr size_t kMostChallenged = 4096;

struct Listeners {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<TcpListener>> by_host;
};
PerProcess<Listeners> listeners;

std::string hex(const Key128& key) {
  std::string text;
  for (const uint8_t byte : key) {
    text += formatted("{:02x}", byte);
  }
  return text;
}

} // namespace

// --- an endpoint -------------------------------------------------------------

TcpEndpoint::TcpEndpoint(
    std::shared_ptr<TcpListener> listener,
    int rank,
    int size)
    : listener_(std::move(listener)),
      rank_(rank),
      size_(size) {
  listener_->add(*this);
}

TcpEndpoint::TcpEndpoint(
    std::shared_ptr<TcpListener> listener,
    int rank,
    int size,
    const Key128& key,
    uint64_t id)
    : listener_(std::move(listener)),
      rank_(rank),
      size_(size),
      key_(key),
      id_(id) {
  listener_->add(*this);
}

TcpEndpoint::~TcpEndpoint() {
  close();
}

void TcpEndpoint::close() {
  listener_->remove(*this);
  const std::lock_guard<std::mutex> lock(mutex_);
  arrived_.clear();
}

const SocketAddress& TcpEndpoint::socket_address() const {
  return listener_->address();
}

std::string TcpEndpoint::address() const {
  return formatted("{} {} {}", listener_->address().text(), id_, hex(key_));
}

TcpAddress TcpAddress::of(const std::string& text) {
  std::istringstream words(text);
  std::string host, port, key;
  TcpAddress address;
  if (!(words >> host >> port >> address.endpoint >> key)) {
    fail(ErrorKind::kSystem, "fused: no address of an endpoint in the store");
  }
  address.socket = SocketAddress::of(host + " " + port);
  const std::optional<Key128> read = key_of_digits(key);
  if (!read) {
    fail(ErrorKind::kSystem, "fused: no key of an endpoint in the store");
  }
  address.key = *read;
  return address;
}

std::vector<std::pair<int, Fd>> TcpEndpoint::take() {
  signal_.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(arrived_, {});
}

bool TcpEndpoint::expects(int from) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto token = challenged_.find(from);
  return (token != challenged_.end() && token->second.use_count() > 1) ||
      std::any_of(arrived_.begin(), arrived_.end(), [from](const auto& one) {
           return one.first == from;
         });
}

// --- the listener ------------------------------------------------------------

std::shared_ptr<TcpListener> TcpListener::at(
    const SocketAddress& address,
    const PortRange& ports) {
  Listeners& all = listeners.get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& known = all.by_host[address.host()];
  auto listener = known.lock();
  if (!listener) {
    listener = std::make_shared<TcpListener>(address, Runs::kOnThread, ports);
    known = listener;
  }
  return listener;
}

TcpListener::TcpListener(
    const SocketAddress& address,
    Runs runs,
    const PortRange& ports)
    : socket_(listen_at(address, ports)),
      address_(bound_address(socket_)),
      poll_(Fd::opened([] { return epoll_create1(EPOLL_CLOEXEC); })) {
  if (!poll_) {
    fail_errno("fused: epoll_create1");
  }
  for (const int fd : {socket_.get(), signal_.fd()}) {
    epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      fail_errno("fused: epoll_ctl");
    }
  }
  if (runs == Runs::kOnThread) {
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "fusedpg-listen");
      constexpr int kLook = 1000; // ms; for those that are late
      while (turn(visitors_.empty() ? -1 : kLook)) {
      }
    });
  }
}

TcpListener::~TcpListener() {
  signal_.set();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void TcpListener::add(TcpEndpoint& endpoint) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (endpoint.id_ != 0) {
    if (!endpoints_.emplace(endpoint.id_, &endpoint).second) {
      fail(
          ErrorKind::kInvalid,
          "fused: there is an endpoint {} already",
          endpoint.id_);
    }
    return;
  }
  // Random, as one that has gone must not be taken for another.
  do {
    std::memcpy(&endpoint.id_, random_key().data(), sizeof endpoint.id_);
  } while (!endpoints_.emplace(endpoint.id_, &endpoint).second);
}

void TcpListener::remove(TcpEndpoint& endpoint) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = endpoints_.find(endpoint.id_);
  if (found != endpoints_.end() && found->second == &endpoint) {
    endpoints_.erase(found); // not another one of this number
  }
}

TcpListener::Visitor::~Visitor() {
  if (socket) {
    epoll_ctl(poll, EPOLL_CTL_DEL, socket.get(), nullptr);
  }
}

bool TcpListener::turn(int most_ms) {
  constexpr int kEvents = 64;
  epoll_event events[kEvents];
  const int count = epoll_wait(poll_.get(), events, kEvents, most_ms);
  bool knocked = false;
  for (int i = 0; i < count; ++i) {
    auto* visitor = static_cast<Visitor*>(events[i].data.ptr);
    if (visitor == nullptr) {
      knocked = true;
    } else if (!hear(*visitor)) {
      visitors_.remove_if([&](const Visitor& v) { return &v == visitor; });
    }
  }
  if (knocked) {
    uint64_t set = 0;
    if (read(signal_.fd(), &set, sizeof set) > 0) {
      return false;
    }
    let_in(); // which may drop visitors, so after their events
  }
  drop_late();
  return true;
}

void TcpListener::let_in() {
  // Visitors that are inside must be heard, however many keep coming.
  constexpr int kAtATime = 512;
  for (int i = 0; i < kAtATime; ++i) {
    Fd socket = accept_from(socket_);
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
          errno == ENOMEM) {
        // Connections stay in the queue until there is room again.
        visitors_.remove_if(
            [this](Visitor& v) { return !hear(v) || !v.challenged; });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      return;
    }
    make_room();
    visitors_.emplace_back(std::move(socket), poll_.get());
    Visitor& visitor = visitors_.back();
    epoll_event event{.events = EPOLLIN, .data = {.ptr = &visitor}};
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, visitor.socket.get(), &event) !=
        0) {
      visitors_.pop_back();
    }
  }
}

// Strangers go first: one that knows the random name of an endpoint is hardly
// one. Before the oldest go, the listener reads what they have said while
// others came.
void TcpListener::make_room() {
  if (visitors_.size() < kMostVisitors) {
    return;
  }
  for (auto v = visitors_.begin(); v != visitors_.end(); ++v) {
    if (!v->challenged && !(hear(*v) && v->challenged)) {
      visitors_.erase(v);
      return;
    }
  }
  if (visitors_.size() >= kMostChallenged) {
    hear(visitors_.front());
    visitors_.pop_front();
  }
}

// Never more than it has to say: what follows is the endpoint's.
bool TcpListener::hear(Visitor& visitor) {
  const bool second = visitor.challenged != nullptr;
  auto* into = second ? static_cast<void*>(&visitor.proof) : &visitor.hello;
  const size_t all = second ? sizeof visitor.proof : sizeof visitor.hello;
  const ssize_t got = recv(
      visitor.socket.get(),
      static_cast<char*>(into) + visitor.got,
      all - visitor.got,
      0);
  if (got <= 0) {
    return got < 0 && (errno == EAGAIN || errno == EINTR);
  }
  visitor.got += static_cast<size_t>(got);
  if (visitor.got < all) {
    return true;
  }
  visitor.got = 0;
  return second ? hand_over(visitor) : challenge(visitor);
}

bool TcpListener::challenge(Visitor& visitor) {
  if (visitor.hello.magic != tcp::kMagic) {
    return false;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = endpoints_.find(visitor.hello.endpoint);
    if (found == endpoints_.end()) {
      answer(visitor); // zeros
      return false;
    }
    TcpEndpoint& endpoint = *found->second;
    if (visitor.hello.to != endpoint.rank_ || visitor.hello.from < 0 ||
        visitor.hello.from >= endpoint.size_) {
      return false;
    }
    visitor.deadline = Deadline(tcp::kPatience); // for the proof
    visitor.challenge.nonce = random_key();
    visitor.challenge.proof = tcp::listener_proof(
        endpoint.key_, visitor.hello, visitor.challenge.nonce);
    const std::lock_guard<std::mutex> inner(endpoint.mutex_);
    auto& token = endpoint.challenged_[visitor.hello.from];
    token = token ? token : std::make_shared<const int>(0);
    visitor.challenged = token;
  }
  return answer(visitor);
}

// A new connection has room for it.
bool TcpListener::answer(const Visitor& visitor) {
  return send(
             visitor.socket.get(),
             &visitor.challenge,
             sizeof visitor.challenge,
             MSG_NOSIGNAL) == sizeof visitor.challenge;
}

bool TcpListener::hand_over(Visitor& visitor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = endpoints_.find(visitor.hello.endpoint);
  if (found == endpoints_.end() ||
      !same_secret(
          visitor.proof,
          tcp::connector_proof(
              found->second->key_, visitor.hello, visitor.challenge.nonce))) {
    return false;
  }
  epoll_ctl(visitor.poll, EPOLL_CTL_DEL, visitor.socket.get(), nullptr);
  TcpEndpoint& endpoint = *found->second;
  const std::lock_guard<std::mutex> inner(endpoint.mutex_);
  endpoint.arrived_.emplace_back(visitor.hello.from, std::move(visitor.socket));
  visitor.challenged.reset(); // under the lock: it is one or the other
  endpoint.signal_.set();
  return false;
}

// This thread may be the one that is late, so visitors are heard first.
void TcpListener::drop_late() {
  visitors_.remove_if([this](Visitor& visitor) {
    return visitor.deadline.expired() &&
        (!hear(visitor) || visitor.deadline.expired());
  });
}

} // namespace fusedpg
