// Who connects to a rank's port without belonging to its group.

#include "net/tcp_listener.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>

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
  bool is_dropped(int within_ms = 1000) const {
    char byte = 0;
    pollfd fd{socket_.get(), POLLIN, 0};
    return poll(&fd, 1, within_ms) == 1 &&
        recv(socket_.get(), &byte, 1, 0) <= 0;
  }
  // Does all that a member does: it has the key.
  bool enters(int from, int to) const {
    const tcp::Hello said = hello(from, to);
    say(&said, sizeof said);
    tcp::Challenge challenge;
    if (!hears(&challenge, sizeof challenge)) {
      return false;
    }
    const Key128 proof =
        tcp::connector_proof(address_.key, said, challenge.nonce);
    say(&proof, sizeof proof);
    return true;
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

bool has_arrived(const TcpEndpoint& endpoint) {
  pollfd fd{endpoint.signal().fd(), POLLIN, 0};
  return poll(&fd, 1, 5000) == 1;
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
  CHECK(has_arrived(endpoint));
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

TEST(tcp_greeting_in_pieces) {
  TcpEndpoint endpoint(listener(), 1, 3);
  const TcpAddress address = TcpAddress::of(endpoint.address());
  const Stranger slow(address);
  const auto say_in_pieces = [&](const void* data, size_t bytes) {
    for (size_t begin = 0; begin < bytes; begin += 7) {
      slow.say(
          static_cast<const char*>(data) + begin,
          std::min<size_t>(7, bytes - begin));
      std::this_thread::sleep_for(milliseconds(5)); // or it is one piece
    }
  };
  const tcp::Hello hello = slow.hello(2, 1);
  say_in_pieces(&hello, sizeof hello);
  tcp::Challenge challenge;
  if (!CHECK(slow.hears(&challenge, sizeof challenge))) {
    return;
  }
  const Key128 proof =
      tcp::connector_proof(address.key, hello, challenge.nonce);
  say_in_pieces(&proof, sizeof proof);
  CHECK(has_arrived(endpoint));
}

// Who says nothing holds a descriptor for some seconds, and no longer.
TEST(tcp_silent_visitors_go) {
  const TcpEndpoint endpoint(listener(), 1, 3);
  const Stranger silent(TcpAddress::of(endpoint.address()));
  CHECK(silent.is_dropped(15000));
}

// The oldest strangers make room, and not a member that is just being let in.
TEST(tcp_crowd_leaves_room) {
  TcpEndpoint endpoint(listener(), 1, 3);
  const TcpAddress address = TcpAddress::of(endpoint.address());
  const Stranger member(address);
  const tcp::Hello hello = member.hello(2, 1);
  member.say(&hello, sizeof hello);
  tcp::Challenge challenge;
  if (!CHECK(member.hears(&challenge, sizeof challenge))) {
    return;
  }
  std::vector<Stranger> crowd;
  for (int i = 0; i < 300; ++i) {
    crowd.emplace_back(address);
  }
  CHECK(crowd.front().is_dropped());
  const Key128 proof =
      tcp::connector_proof(address.key, hello, challenge.nonce);
  member.say(&proof, sizeof proof);
  CHECK(has_arrived(endpoint));
}

// Nor does one whose words have arrived and were not heard before the crowd.
TEST(tcp_what_has_been_said_is_heard_before_there_is_no_room) {
  const auto slow = std::make_shared<TcpListener>(
      SocketAddress::of("127.0.0.1 0"), TcpListener::Runs::kByTurns);
  TcpEndpoint endpoint(slow, 1, 3);
  const TcpAddress address = TcpAddress::of(endpoint.address());
  const auto crowd = [&] {
    std::vector<Stranger> strangers;
    for (int i = 0; i < 300; ++i) {
      strangers.emplace_back(address);
    }
    return strangers;
  };
  const Stranger member(address);
  const tcp::Hello hello = member.hello(2, 1);
  member.say(&hello, sizeof hello);
  const auto first = crowd();
  slow->turn(0); // lets in all of them
  tcp::Challenge challenge;
  if (!CHECK(member.hears(&challenge, sizeof challenge))) {
    return;
  }
  const Key128 proof =
      tcp::connector_proof(address.key, hello, challenge.nonce);
  member.say(&proof, sizeof proof);
  const auto second = crowd();
  for (int i = 0; i < 20 && endpoint.take().empty(); ++i) {
    CHECK(i < 19);
    slow->turn(0); // of many events, some at a time
  }
  CHECK(first.front().is_dropped() && second.front().is_dropped());
}

// However late the listener is to hear the proof of a rank that has left since.
TEST(tcp_what_was_sent_before_leaving_comes_in_the_end) {
  const auto slow = std::make_shared<TcpListener>(
      SocketAddress::of("127.0.0.1 0"), TcpListener::Runs::kByTurns);
  auto here = std::make_unique<TcpEndpoint>(slow, 0, 2);
  auto there = std::make_unique<TcpEndpoint>(listener(), 1, 2);
  const std::vector<std::string> addresses{here->address(), there->address()};
  const auto kByte = static_cast<char>(7);
  std::thread sender([&] {
    TcpTransport t({}, std::move(there), addresses);
    const NetBuffer out(1000);
    std::fill_n(out.data(), 1000, kByte);
    t.send(0, 1, out)->wait(Deadline(kLong));
    t.flush(Deadline(kLong));
  });
  slow->turn(-1); // lets it in
  slow->turn(-1); // and challenges it
  sender.join();
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    slow->turn(0);
  });
  TcpTransport t({}, std::move(here), addresses);
  const NetBuffer in(1000);
  try {
    t.receive(1, 1, in)->wait(Deadline(kLong));
    CHECK(in.data()[999] == kByte);
  } catch (const Error& error) {
    CHECK_EQ(std::string(error.what()), std::string());
  }
  late.join();
}

// One process listens at an address of each kind, and its ranks talk.
TEST(tcp_addresses_of_both_kinds) {
  const auto at = [](const char* address) {
    return TcpListener::at(SocketAddress::of(address));
  };
  if (access("/proc/net/if_inet6", F_OK) != 0) {
    return; // a kernel without IPv6
  }
  std::vector<std::unique_ptr<TcpEndpoint>> endpoints;
  endpoints.push_back(std::make_unique<TcpEndpoint>(at("127.0.0.1 0"), 0, 2));
  endpoints.push_back(std::make_unique<TcpEndpoint>(at("::1 0"), 1, 2));
  std::vector<std::string> addresses;
  for (const auto& endpoint : endpoints) {
    addresses.push_back(endpoint->address());
  }
  CHECK_EQ(
      TcpAddress::of(addresses[0]).socket.host(), std::string("127.0.0.1"));
  CHECK_EQ(TcpAddress::of(addresses[1]).socket.host(), std::string("::1"));
  on_threads(2, [&](int rank, Store&) {
    TcpTransport t({}, std::move(endpoints[rank]), addresses);
    const NetBuffer out(8), in(8);
    std::fill_n(out.data(), 8, static_cast<char>(rank));
    const auto sent = t.send(1 - rank, 1, out);
    t.receive(1 - rank, 1, in)->wait(Deadline(kLong));
    sent->wait(Deadline(kLong));
    CHECK(in.data()[7] == static_cast<char>(1 - rank));
  });
}

// A rank that is let in proves that it belongs there; so must who lets it in.
TEST(tcp_who_listens_proves_that_it_has_the_key) {
  auto mine = std::make_unique<TcpEndpoint>(listener(), 0, 2);
  const TcpEndpoint theirs(listener(), 1, 2);
  std::string with_another_key = theirs.address();
  with_another_key.replace(with_another_key.size() - 32, 32, 32, '0');
  const std::string own = mine->address();
  TcpTransport t({}, std::move(mine), {own, with_another_key});
  CHECK_THROWS(
      t.send(1, 1, NetBuffer(8))->wait(Deadline(kLong)),
      Error,
      "is not of this group");
}

// Waits for a connection, and for bytes of it.
Fd next_of(const Fd& listening) {
  pollfd fd{listening.get(), POLLIN, 0};
  CHECK(poll(&fd, 1, 10000) == 1);
  return accept_from(listening);
}

template <typename T>
T heard_from(const Fd& socket) {
  T value{};
  for (size_t got = 0; got < sizeof value;) {
    pollfd fd{socket.get(), POLLIN, 0};
    const bool ready = poll(&fd, 1, 10000) == 1;
    const ssize_t more = !ready ? 0
                                : recv(
                                      socket.get(),
                                      reinterpret_cast<char*>(&value) + got,
                                      sizeof value - got,
                                      0);
    if (!CHECK(more > 0)) {
      break;
    }
    got += static_cast<size_t>(more);
  }
  return value;
}

// Rank 0 sends a message to rank 1, whose listener is peer(listening, answer):
// `answer` hears a greeting and answers it. Rank 0 calls `away` before it waits.
using Answer = std::function<tcp::Challenge(const Fd&)>;
void send_to_listener(
    const std::function<void(const Fd&, const Answer&)>& peer,
    const std::function<void(TcpTransport&)>& away = [](TcpTransport&) {}) {
  const Fd listening = listen_at(SocketAddress::of("127.0.0.1 0"));
  const Key128 key{}; // as in its address
  tcp::Hello hello;
  const Answer answer = [&](const Fd& socket) {
    hello = heard_from<tcp::Hello>(socket);
    CHECK(hello.from == 0 && hello.to == 1 && hello.endpoint == 7);
    tcp::Challenge challenge{random_key(), {}};
    challenge.proof = tcp::listener_proof(key, hello, challenge.nonce);
    send(socket.get(), &challenge, sizeof challenge, MSG_NOSIGNAL);
    return challenge;
  };
  std::thread other([&] {
    peer(listening, answer);
    const Fd socket = next_of(listening);
    const auto challenge = answer(socket);
    CHECK(same_secret(
        heard_from<Key128>(socket),
        tcp::connector_proof(key, hello, challenge.nonce)));
    heard_from<std::array<char, 16 + 8>>(socket); // a header and its bytes
  });
  auto mine = std::make_unique<TcpEndpoint>(listener(), 0, 2);
  const std::string own = mine->address();
  const std::string theirs = formatted(
      "{} 7 {}", bound_address(listening).text(), std::string(32, '0'));
  TcpTransport t({}, std::move(mine), {own, theirs});
  const auto sent = t.send(1, 1, NetBuffer(8));
  away(t);
  sent->wait(Deadline(kLong));
  other.join();
}

// A port may be full of strangers for long.
TEST(tcp_knocks_again_where_it_is_not_let_in) {
  send_to_listener([](const Fd& listening, const Answer&) {
    for (const auto begin = Clock::now();
         Clock::now() - begin < milliseconds(1500);) {
      next_of(listening).reset(); // closes a connection
    }
  });
}

// Who has not answered a challenge for seconds may have been taken for a stranger.
TEST(tcp_knocks_again_where_it_was_late_itself) {
  std::atomic<bool> greeted{false}, away{false};
  send_to_listener(
      [&](const Fd& listening, const Answer& answer) {
        const Fd socket = next_of(listening);
        pollfd fd{socket.get(), POLLIN, 0};
        CHECK(poll(&fd, 1, 10000) == 1);
        greeted = true;
        while (!away) {
          std::this_thread::yield();
        }
        answer(socket); // and closes it
      },
      [&](TcpTransport& t) {
        while (!greeted) {
          t.progress();
        }
        away = true;
        std::this_thread::sleep_for(tcp::kPatience - milliseconds(500));
      });
}

TEST(tcp_what_is_no_message_ends_a_connection) {
  auto mine = std::make_unique<TcpEndpoint>(listener(), 0, 2);
  const TcpEndpoint theirs(listener(), 1, 2);
  const std::string own = mine->address();
  const Stranger member(TcpAddress::of(own));
  TcpTransport t({}, std::move(mine), {own, theirs.address()});
  CHECK(member.enters(1, 0));
  const struct {
    uint64_t bytes = 8;
    uint32_t tag = 1;
    uint32_t magic = 0;
    uint64_t message = 0;
  } said;
  member.say(&said, sizeof said);
  CHECK_THROWS(
      t.receive(1, 1, NetBuffer(8))->wait(Deadline(kLong)),
      Error,
      "what it sends is no message");
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
  CHECK(is_dropped([](auto& h) { h.to = 0; }));
  CHECK(is_dropped([](auto& h) { h.from = 3; }));
  CHECK(is_dropped([](auto& h) { h.from = -1; }));
  // Who knows how to greet hears that there is no such endpoint.
  const Stranger late(address);
  tcp::Hello hello = late.hello(0, 1);
  hello.endpoint += 1;
  late.say(&hello, sizeof hello);
  tcp::Challenge nothing{random_key(), random_key()};
  CHECK(late.hears(&nothing, sizeof nothing));
  CHECK(nothing.nonce == Key128{} && nothing.proof == Key128{});
  CHECK(late.is_dropped());
}

// What a member has said when it was let in, for who has listened to it.
struct Overheard {
  tcp::Hello hello;
  Key128 proof;
};

Overheard overhear(const TcpAddress& address) {
  const Stranger member(address);
  Overheard heard{member.hello(1, 0), {}};
  member.say(&heard.hello, sizeof heard.hello);
  tcp::Challenge challenge;
  CHECK(member.hears(&challenge, sizeof challenge));
  heard.proof = tcp::connector_proof(address.key, heard.hello, challenge.nonce);
  member.say(&heard.proof, sizeof heard.proof);
  return heard;
}

// A stranger says something, or nothing, and perhaps stays.
void visit(
    const TcpAddress& address,
    const Overheard& heard,
    std::mt19937& random,
    std::vector<Stranger>& stay) {
  Stranger stranger(address);
  tcp::Hello hello = stranger.hello(1, 0);
  std::array<uint8_t, 4096> bytes;
  switch (random() % 6) {
    case 0:
      std::generate(
          bytes.begin(), bytes.end(), [&] { return uint8_t(random()); });
      stranger.say(bytes.data(), random() % bytes.size());
      break;
    case 3:
      stranger.say(&heard, sizeof heard); // the nonce is another one now
      break;
    case 4: // a whole handshake at once, and a message
      std::generate(
          bytes.begin(), bytes.end(), [&] { return uint8_t(random()); });
      stranger.say(&hello, sizeof hello);
      stranger.say(bytes.data(), bytes.size());
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

// FUSEDPG_TEST_STRANGERS: how many come.
int strangers() {
  const char* count = std::getenv("FUSEDPG_TEST_STRANGERS");
  return count == nullptr ? 1000 : std::stoi(count);
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
      const Overheard heard = overhear(address);
      std::vector<Stranger> stay;
      const int crowd = strangers() / 2;
      int turns = 0; // that may have begun: at first the port is full
      for (int visits = 1; !store.has("done"); ++visits) {
        visit(address, heard, random, stay);
        for (; turns < kTurns && visits >= crowd + turns * crowd / kTurns;
             ++turns) {
          store.set(key(turns, 2), "");
        }
      }
      return;
    }
    // Also where this rank fails: strangers would come for ever.
    struct AtEnd {
      Store& store;
      ~AtEnd() {
        store.set("done", "");
      }
    };
    TcpEndpoint unused(listener(), 0, 2);
    if (rank == 0) {
      store.set("endpoint", unused.address());
    }
    const AtEnd at_end{store};
    for (int turn = 0; turn < kTurns; ++turn) {
      store.get(key(turn, 2), Deadline(kLong * (1 + strangers() / 10'000)));
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
    if (rank == 0) {
      // The member that was overheard, and nobody else.
      CHECK(unused.take().size() <= 1);
    }
    store.meet("over", 2);
  });
}

} // namespace

TEST(tcp_listens_in_a_range_of_ports) {
  const SocketAddress any = SocketAddress::of("127.0.0.1 0");
  const Fd taken = listen_at(any);
  const auto port_of = [](const Fd& socket) {
    const std::string text = bound_address(socket).text();
    return std::stoi(text.substr(text.rfind(' ')));
  };
  const auto first = static_cast<uint16_t>(port_of(taken));
  if (first <= 65535 - 100) {
    const PortRange ports{first, static_cast<uint16_t>(first + 100)};
    const int port = port_of(listen_at(any, ports));
    CHECK(port > ports.first && port <= ports.last);
  }
  CHECK_THROWS(listen_at(any, {first, first}), Error, "FUSEDPG_PORT_RANGE");
  // Of an address that has a port it is that one.
  const SocketAddress named = bound_address(listen_at(any));
  CHECK_EQ(
      bound_address(listen_at(named, {first, first})).text(), named.text());
  const PortRange read = PortRange::of("40000-40099");
  CHECK(read.first == 40000 && read.last == 40099);
  CHECK(PortRange::of("7").last == 7 && PortRange::of("").any());
  for (const char* wrong :
       {"x", "0-9", "9-8", "1-65536", "1-2-3", "1,2", "-5"}) {
    CHECK_THROWS(PortRange::of(wrong), Error, "must be two ports");
  }
}
