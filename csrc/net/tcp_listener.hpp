#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "base/siphash.hpp"
#include "net/tcp_socket.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg {

// How a connection begins. The side that connects names the endpoint that it
// wants; the listener proves that it has that endpoint's key, and asks for the
// same proof. The keys are in the group's store, so anyone who can read that is
// inside. Nothing is encrypted, and what follows carries no proof of its own.
namespace tcp {

constexpr uint64_t kMagic = 0x3130706370736466; // "fdspcp01"

struct Hello {
  uint64_t magic = kMagic; // of this version, and this order of bytes
  uint64_t endpoint = 0;
  int32_t from = 0; // ranks
  int32_t to = 0;
  Key128 nonce{};
};
// All zeros: there is no such endpoint here, or no more.
struct Challenge {
  Key128 nonce{};
  Key128 proof{};
};
static_assert(std::is_trivially_copyable_v<Hello> && sizeof(Hello) == 40);
static_assert(sizeof(Challenge) == 32);

// A listener waits so long for each of the two things that it has to hear.
constexpr std::chrono::milliseconds kPatience{5000};

// The proof of one side that it has the key.
Key128 listener_proof(const Key128& key, const Hello&, const Key128& nonce);
Key128 connector_proof(const Key128& key, const Hello&, const Key128& nonce);

} // namespace tcp

class TcpListener;

// The ranks of one group connect to this one here.
class TcpEndpoint {
 public:
  TcpEndpoint(std::shared_ptr<TcpListener> listener, int rank, int size);
  // One whose key and number peers know from elsewhere.
  TcpEndpoint(
      std::shared_ptr<TcpListener> listener,
      int rank,
      int size,
      const Key128& key,
      uint64_t id);
  TcpEndpoint(const TcpEndpoint&) = delete;
  ~TcpEndpoint();

  // A peer has to know this to connect; a secret.
  std::string address() const;
  const SocketAddress& socket_address() const;
  // Lets nobody in any more; whoever has come and was not taken hears of it.
  void close();
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // Set when a connection has come.
  const WakeSignal& signal() const {
    return signal_;
  }
  // Returns the connections that have come, with the rank that each is from.
  std::vector<std::pair<int, Fd>> take();
  // Whether a connection of this rank has come or is being let in. A rank sends
  // nothing before it was challenged, so if not, what it sent before it left
  // has all been taken.
  bool expects(int from);

 private:
  friend class TcpListener;
  const std::shared_ptr<TcpListener> listener_;
  const int rank_;
  const int size_;
  const Key128 key_ = random_key();
  uint64_t id_ = 0; // 0: the listener draws one
  WakeSignal signal_;
  std::mutex mutex_;
  std::vector<std::pair<int, Fd>> arrived_;
  // By rank; each of its visitors that has been challenged has a copy.
  std::map<int, std::shared_ptr<const int>> challenged_;
};

// TcpEndpoint::address() as values.
struct TcpAddress {
  SocketAddress socket;
  uint64_t endpoint = 0;
  Key128 key{};

  static TcpAddress of(const std::string& text);
};

// The port of this process, and the thread that lets connections in: it hands
// to an endpoint what has proved to belong there. Strangers cost it a
// descriptor for a few seconds, of which it holds a limited number; before it
// takes one back, it hears what has been said there.
class TcpListener {
 public:
  enum class Runs { kOnThread, kByTurns };

  // At a local address: one in a process, as long as anybody has it. `ports`:
  // among which it finds one if it is not there yet.
  static std::shared_ptr<TcpListener> at(
      const SocketAddress& address,
      const PortRange& ports = {});

  // `runs` by turns: only when turn() is called.
  explicit TcpListener(
      const SocketAddress& address,
      Runs runs = Runs::kOnThread,
      const PortRange& ports = {});
  TcpListener(const TcpListener&) = delete;
  ~TcpListener();
  const SocketAddress& address() const {
    return address_;
  }
  // Waits for at most so long (ms; -1: without a limit), then does what there
  // is to do. False once it ends.
  bool turn(int most_ms);

 private:
  friend class TcpEndpoint;
  // One that has connected and not yet proved anything.
  struct Visitor {
    Visitor(Fd socket, int poll) : socket(std::move(socket)), poll(poll) {}
    Visitor(const Visitor&) = delete;
    // To close a socket does not end its events while a child that is just being
    // forked has it, too.
    ~Visitor();

    Fd socket;
    const int poll;
    Deadline deadline{tcp::kPatience};
    tcp::Hello hello{};
    tcp::Challenge challenge{};
    Key128 proof{};
    size_t got = 0; // of what it has to say now
    std::shared_ptr<const int> challenged{}; // of the endpoint; null: not yet
  };
  using Visitors = std::list<Visitor>;

  void let_in();
  void make_room();
  // False: it is done with, whatever became of it.
  bool hear(Visitor& visitor);
  bool challenge(Visitor& visitor);
  static bool answer(const Visitor& visitor);
  bool hand_over(Visitor& visitor);
  void drop_late();
  void add(TcpEndpoint& endpoint);
  void remove(TcpEndpoint& endpoint);

  Fd socket_;
  const SocketAddress address_;
  Fd poll_;
  WakeSignal signal_; // that it ends
  Visitors visitors_; // of the thread, the oldest first
  std::mutex mutex_;
  std::map<uint64_t, TcpEndpoint*> endpoints_;
  std::thread thread_;
};

} // namespace fusedpg
