// Who connects to a rank's port without belonging to its group.

#include "net/tcp_listener.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <random>

#include "net/tcp_transport.hpp"
#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

class Stranger {
 public:
  explicit Stranger(const TcpAddress& address)
      : address_(address),
        socket_(connect_to(address.socket)) {
    pollfd fd{socket_.get(), POLLOUT, 0};
    poll(&fd, 1, 1000);
  }
  void say(const void* data, size_t bytes) const {
    [[maybe_unused]] const auto sent =
        send(socket_.get(), data, bytes, MSG_NOSIGNAL);
  }
  // What the listener answers, if it does before it hangs up.
  bool hears(void* data, size_t bytes) const {
    pollfd fd{socket_.get(), POLLIN, 0};
    return poll(&fd, 1, 1000) == 1 &&
        recv(socket_.get(), data, bytes, MSG_WAITALL) ==
        static_cast<ssize_t>(bytes);
  }
  bool is_dropped() const {
    char byte = 0;
    pollfd fd{socket_.get(), POLLIN, 0};
    return poll(&fd, 1, 1000) == 1 && recv(socket_.get(), &byte, 1, 0) <= 0;
  }
  tcp::Hello hello(int from, int to) const {
    tcp::Hello hello;
    hello.endpoint = address_.endpoint;
    hello.from = from;
    hello.to = to;
    hello.nonce = random_key();
    return hello;
  }

 private:
  const TcpAddress address_;
  Fd socket_;
};

std::shared_ptr<TcpListener> listener() {
  return TcpListener::at(SocketAddress::of("127.0.0.1 0"));
}

TEST(tcp_lets_in_who_has_the_key) {
  TcpEndpoint endpoint(listener(), 1, 3);
  const TcpAddress address = TcpAddress::of(endpoint.address());
  const auto try_to_enter = [&](const Key128& key, const Stranger& stranger) {
    const tcp::Hello hello = stranger.hello(2, 1);
    stranger.say(&hello, sizeof hello);
    tcp::Challenge challenge;
    CHECK(stranger.hears(&challenge, sizeof challenge));
    CHECK(same_secret(
        challenge.proof,
        tcp::listener_proof(address.key, hello, challenge.nonce)));
    const Key128 proof = tcp::connector_proof(key, hello, challenge.nonce);
    stranger.say(&proof, sizeof proof);
    return std::pair(hello, proof);
  };
  const Stranger wrong(address);
  try_to_enter(random_key(), wrong);
  CHECK(wrong.is_dropped());

  const Stranger right(address);
  const auto [hello, proof] = try_to_enter(address.key, right);
  pollfd fd{endpoint.signal().fd(), POLLIN, 0};
  CHECK(poll(&fd, 1, 5000) == 1);
  CHECK(endpoint.take().front().first == 2);

  // What somebody has heard does not help him.
  const Stranger again(address);
  again.say(&hello, sizeof hello);
  tcp::Challenge challenge;
  CHECK(again.hears(&challenge, sizeof challenge));
  again.say(&proof, sizeof proof);
  CHECK(again.is_dropped());
  // Nor does it if the listener's own proof is sent back to it.
  const Stranger mirror(address);
  mirror.say(&hello, sizeof hello);
  CHECK(mirror.hears(&challenge, sizeof challenge));
  mirror.say(&challenge.proof, sizeof challenge.proof);
  CHECK(mirror.is_dropped());
  CHECK(endpoint.take().empty());
}

TEST(tcp_addresses) {
  CHECK_THROWS(
      local_address("no-such-if0", "", 0), Error, "FUSEDPG_SOCKET_IFNAME");
  CHECK_EQ(local_address("lo", "", 0).host(), std::string("127.0.0.1"));
  CHECK_EQ(local_address("", "localhost", 1).host(), std::string("127.0.0.1"));
  CHECK_THROWS(SocketAddress::of("127.0.0.1"), Error, "no address");
  CHECK_THROWS(TcpAddress::of("127.0.0.1 1 2 short"), Error, "no key");
}

TEST(tcp_drops_what_is_no_greeting) {
  TcpEndpoint endpoint(listener(), 1, 3);
  const TcpAddress address = TcpAddress::of(endpoint.address());
  const auto is_dropped = [&](const std::function<void(tcp::Hello&)>& change) {
    const Stranger stranger(address);
    tcp::Hello hello = stranger.hello(0, 1);
    change(hello);
    stranger.say(&hello, sizeof hello);
    return stranger.is_dropped();
  };
  CHECK(is_dropped([](auto& h) { h.magic += 1; }));
  CHECK(is_dropped([](auto& h) { h.endpoint += 1; }));
  CHECK(is_dropped([](auto& h) { h.to = 0; }));
  CHECK(is_dropped([](auto& h) { h.from = 3; }));
  CHECK(is_dropped([](auto& h) { h.from = -1; }));
}

// A stranger says something, or nothing, and perhaps stays.
void visit(
    const TcpAddress& address,
    std::mt19937& random,
    std::vector<Stranger>& stay) {
  Stranger stranger(address);
  tcp::Hello hello = stranger.hello(1, 0);
  auto* bytes = reinterpret_cast<uint8_t*>(&hello);
  switch (random() % 4) {
    case 0:
      std::generate_n(bytes, sizeof hello, [&] { return uint8_t(random()); });
      stranger.say(&hello, sizeof hello);
      break;
    case 1:
      stranger.say(&hello, random() % sizeof hello);
      break;
    case 2:
      stranger.say(&hello, sizeof hello);
      stranger.say(&hello, sizeof hello); // no proof
      break;
    default:
      break;
  }
  if (random() % 2 == 0) {
    stay.push_back(std::move(stranger));
  }
  if (stay.size() == 300) {
    stay.clear();
  }
}

// Ranks connect, and connect again, while their port is full of strangers.
TEST(tcp_strangers_disturb_nobody) {
  constexpr int kTurns = 40;
  on_threads(3, [&](int rank, Store& store) {
    const auto key = [](int turn, int p) {
      return formatted("{}/{}", turn, p);
    };
    if (rank == 2) {
      std::mt19937 random(7);
      const auto address =
          TcpAddress::of(store.get("endpoint", Deadline(kLong)));
      std::vector<Stranger> stay;
      int visits = 0;
      while (!store.has("done") || visits < 1000) {
        visit(address, random, stay);
        if (++visits == 500) {
          store.set("crowded", "");
        }
      }
      return;
    }
    const TcpEndpoint unused(listener(), 0, 2);
    if (rank == 0) {
      store.set("endpoint", unused.address());
    }
    store.get("crowded", Deadline(kLong));
    for (int turn = 0; turn < kTurns; ++turn) {
      auto endpoint = std::make_unique<TcpEndpoint>(listener(), rank, 2);
      store.set(key(turn, rank), endpoint->address());
      std::vector<std::string> addresses;
      for (int p = 0; p < 2; ++p) {
        addresses.push_back(store.get(key(turn, p), Deadline(kLong)));
      }
      TcpTransport t(TcpTransport::Config(), std::move(endpoint), addresses);
      const NetBuffer out(1000), in(1000);
      std::fill_n(out.data(), 1000, static_cast<char>(turn + rank));
      const auto sent = t.send(1 - rank, 1, out);
      t.receive(1 - rank, 1, in)->wait(Deadline(kLong));
      sent->wait(Deadline(kLong));
      CHECK(in.data()[999] == static_cast<char>(turn + 1 - rank));
      t.flush(Deadline(kLong));
    }
    store.meet("over", 2);
    store.set("done", "");
  });
}

} // namespace
