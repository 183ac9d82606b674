// Messages by TCP on this machine.

#include "net/tcp_transport.hpp"

#include <filesystem>
#include <iterator>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

std::unique_ptr<Transport> connect(Store& store, int rank, int size) {
  auto endpoint = std::make_unique<TcpEndpoint>(
      TcpListener::at(SocketAddress::of("127.0.0.1 0")), rank, size);
  store.set(formatted("tcp/{}", rank), endpoint->address());
  std::vector<std::string> addresses;
  for (int p = 0; p < size; ++p) {
    addresses.push_back(store.get(formatted("tcp/{}", p), Deadline(kLong)));
  }
  return std::make_unique<TcpTransport>(
      TcpTransport::Config(), std::move(endpoint), addresses);
}

// Ranks as threads, each with a transport of its own.
void on_transports(
    int size,
    const std::function<void(int rank, Transport&, Store&)>& body) {
  on_threads(size, [&](int rank, Store& store) {
    const auto transport = connect(store, rank, size);
    body(rank, *transport, store);
  });
}

NetBuffer filled(size_t bytes, uint64_t seed) {
  NetBuffer b(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    b.data()[i] = static_cast<char>((seed * 31 + i * 7 + (i >> 8)) & 0xff);
  }
  return b;
}

bool same(const NetBuffer& a, const NetBuffer& b) {
  return a.bytes() == b.bytes() &&
      std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

TEST(transport_messages_of_every_size_arrive_in_order) {
  for (const int size : {2, 3}) {
    on_transports(size, [&](int rank, Transport& t, Store&) {
      const size_t sizes[] = {1, 8, 4096, 65536, 1 << 20, (5 << 20) + 3};
      std::vector<Transport::RequestPtr> requests;
      std::vector<std::pair<NetBuffer, NetBuffer>> got;
      uint64_t n = 0;
      for (const size_t bytes : sizes) {
        for (int again = 0; again < 3; ++again, ++n) {
          for (int p = 0; p < size; ++p) {
            if (p == rank) {
              continue;
            }
            const NetBuffer into(bytes);
            got.emplace_back(into, filled(bytes, 100 * n + 10 * p + rank));
            // Sometimes it has been sent before it is expected.
            if ((n + rank) % 2 == 0) {
              requests.push_back(t.receive(p, 7, into));
            }
            requests.push_back(
                t.send(p, 7, filled(bytes, 100 * n + 10 * rank + p)));
            if ((n + rank) % 2 != 0) {
              requests.push_back(t.receive(p, 7, into));
            }
          }
        }
      }
      for (const auto& request : requests) {
        request->wait(Deadline(kLong));
      }
      for (const auto& [into, expected] : got) {
        CHECK(same(into, expected));
      }
      t.flush(Deadline(kLong));
    });
  }
}

// What one rank's wait has thrown.
struct Failure {
  ErrorKind kind;
  std::string what;
  milliseconds after;
};

Failure failure_of(const std::function<void()>& call) {
  const auto begin = Clock::now();
  const auto after = [&] {
    return std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
  };
  try {
    call();
  } catch (const Error& error) {
    return {error.kind(), error.what(), after()};
  }
  report_failure(__FILE__, __LINE__, "nothing was thrown");
  return {ErrorKind::kInvalid, "", after()};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A large message is half there when one of its ends is killed; or nothing has
// been sent either way.
TEST(transport_killed_peer_is_named) {
  if (kOnlyThreads) {
    return;
  }
  for (const size_t bytes : {size_t(0), size_t(8), size_t(64) << 20}) {
    Processes processes(3, [&](int rank, Store& store) {
      const auto t = connect(store, rank, 3);
      store.meet("connected", 4);
      if (rank == 2) {
        pause();
      }
      const Failure f = failure_of([&] {
        const auto sent =
            bytes == 0 ? nullptr : t->send(2, 1, filled(bytes, 1));
        t->receive(2, 1, NetBuffer(bytes))->wait(Deadline(kLong));
      });
      CHECK(f.kind == ErrorKind::kPeerFailed);
      CHECK(contains(f.what, "rank 2"));
      CHECK(f.after < milliseconds(10000));
      CHECK(failure_of([&] {
              (void)t->send(1 - rank, 1, filled(8, 1));
            }).kind == ErrorKind::kPeerFailed);
    });
    processes.store().meet("connected", 4);
    if (bytes == 0) {
      // They have connected by themselves then.
      std::this_thread::sleep_for(milliseconds(300));
    }
    processes.signal(2, SIGKILL);
    processes.check(0);
    processes.check(1);
  }
}

TEST(transport_stopped_peer_is_a_timeout) {
  if (kOnlyThreads) {
    return;
  }
  Processes processes(2, [&](int rank, Store& store) {
    const auto t = connect(store, rank, 2);
    store.meet("connected", 3);
    if (rank == 1) {
      pause();
    }
    store.get("stopped", Deadline(kLong));
    const NetBuffer large = filled(size_t(64) << 20, 1);
    const Failure f = failure_of([&] {
      const auto sent = t->send(1, 1, large);
      sent->wait(Deadline(milliseconds(300)));
    });
    CHECK(f.kind == ErrorKind::kTimeout);
    CHECK(contains(f.what, "to rank 1: not done within 300 ms"));
  });
  processes.store().meet("connected", 3);
  processes.signal(1, SIGSTOP);
  processes.store().set("stopped", "");
  processes.check(0);
}

TEST(transport_abort_ends_a_wait) {
  on_transports(2, [](int rank, Transport& t, Store& store) {
    if (rank == 1) {
      // Its peer goes away.
      store.get("waits", Deadline(kLong));
      const Failure f = failure_of(
          [&] { t.receive(0, 1, NetBuffer(8))->wait(Deadline(kLong)); });
      CHECK(f.kind == ErrorKind::kPeerFailed);
      store.set("told", "");
      return;
    }
    std::thread aborts([&] {
      store.set("waits", "");
      std::this_thread::sleep_for(milliseconds(100));
      t.abort();
    });
    const Failure f = failure_of(
        [&] { t.receive(1, 1, NetBuffer(8))->wait(Deadline(kLong)); });
    aborts.join();
    CHECK(f.kind == ErrorKind::kAborted);
    store.get("told", Deadline(kLong)); // long before this transport goes
    CHECK(failure_of([&] {
            (void)t.receive(1, 1, NetBuffer(8));
          }).kind == ErrorKind::kAborted);
  });
}

// Shorter or longer than expected; nothing goes on after it.
TEST(transport_lengths_that_differ_are_an_error) {
  for (const size_t bytes : {size_t(8), size_t(24), size_t(1) << 20}) {
    on_transports(2, [bytes](int rank, Transport& t, Store& store) {
      if (rank == 0) {
        const auto sent = t.send(1, 1, filled(bytes, 1));
        t.flush(Deadline(milliseconds(1000)));
      } else {
        const Failure f = failure_of(
            [&] { t.receive(0, 1, NetBuffer(16))->wait(Deadline(kLong)); });
        CHECK(f.kind == ErrorKind::kSystem);
        const std::string what = "expected 16 bytes of rank 0, which sent ";
        CHECK(
            contains(f.what, what + std::to_string(bytes)) ||
            (bytes > 16 && contains(f.what, what + "more")));
        CHECK(failure_of([&] {
                (void)t.send(0, 1, filled(8, 1));
              }).kind == ErrorKind::kPeerFailed);
      }
      store.meet("compared", 2);
    });
  }
}

// Opens the connection from rank 0 to rank 1.
void greet(int rank, Transport& t) {
  if (rank == 0) {
    t.send(1, 5, filled(8, 5))->wait(Deadline(kLong));
  } else {
    t.receive(0, 5, NetBuffer(8))->wait(Deadline(kLong));
  }
}

void progress_for_a_while(Transport& t) {
  for (int turn = 0; turn < 100; ++turn) {
    t.progress();
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// Its first part has come while another message was waited for.
TEST(transport_receive_of_what_is_half_here) {
  on_transports(2, [](int rank, Transport& t, Store& store) {
    const NetBuffer large = filled(size_t(32) << 20, 3);
    greet(rank, t);
    if (rank == 0) {
      const auto sent = t.send(1, 1, large);
      store.get("half", Deadline(kLong)); // the rest stays here so long
      sent->wait(Deadline(kLong));
      t.send(1, 7, filled(8, 7))->wait(Deadline(kLong));
      t.flush(Deadline(kLong));
    } else {
      const NetBuffer behind(8), into(large.bytes());
      const auto second = t.receive(0, 7, behind);
      progress_for_a_while(t);
      store.set("half", "");
      t.receive(0, 1, into)->wait(Deadline(kLong));
      second->wait(Deadline(kLong));
      CHECK(same(into, large));
      CHECK(same(behind, filled(8, 7)));
    }
    store.meet("over", 2);
  });
}

// A message is of the receive that was posted first, whatever their lengths.
TEST(transport_half_a_message_is_of_the_first_receive) {
  on_threads(2, [](int rank, Store& store) {
    const auto t = connect(store, rank, 2);
    const NetBuffer large(size_t(32) << 20);
    greet(rank, *t);
    if (rank == 0) {
      const auto sent = t->send(1, 1, large);
      store.get("half", Deadline(kLong));
      sent->wait(Deadline(kLong));
    } else {
      const auto first = t->receive(0, 1, NetBuffer(8));
      progress_for_a_while(*t);
      const auto second = t->receive(0, 1, large);
      store.set("half", "");
      CHECK(failure_of([&] {
              first->wait(Deadline(kLong / 2));
            }).kind == ErrorKind::kSystem);
    }
    store.meet("compared", 2);
  });
}

// Read at once, though only the last one is waited for.
TEST(transport_many_small_messages) {
  on_transports(2, [](int rank, Transport& t, Store& store) {
    constexpr uint64_t kMessages = 400;
    greet(rank, t);
    if (rank == 0) {
      std::vector<Transport::RequestPtr> sent;
      for (uint64_t n = 0; n < kMessages; ++n) {
        sent.push_back(t.send(1, 1, filled(8, n)));
      }
      sent.push_back(t.send(1, 2, filled(8, kMessages)));
      for (const auto& request : sent) {
        request->wait(Deadline(kLong));
      }
      t.flush(Deadline(kLong));
      store.set("sent", "");
    } else {
      store.get("sent", Deadline(kLong));
      const NetBuffer into(8);
      t.receive(0, 2, into)->wait(Deadline(kLong));
      CHECK(same(into, filled(8, kMessages)));
      for (uint64_t n = 0; n < kMessages; ++n) {
        t.receive(0, 1, into)->wait(Deadline(kLong));
        CHECK(same(into, filled(8, n)));
      }
    }
    store.meet("over", 2);
  });
}

// It has left before its messages have: they are on their way all the same.
TEST(transport_sends_what_nobody_waits_for) {
  on_threads(2, [](int rank, Store& store) {
    const auto t = connect(store, rank, 2);
    const NetBuffer large = filled(size_t(16) << 20, 3);
    if (rank == 0) {
      (void)t->send(1, 1, large);
      return;
    }
    const NetBuffer into(large.bytes());
    t->receive(0, 1, into)->wait(Deadline(kLong));
    CHECK(same(into, large));
  });
}

// Who waits looks after its neighbours meanwhile.
TEST(transport_watch_ends_a_wait) {
  on_transports(2, [](int rank, Transport& t, Store& store) {
    if (rank == 0) {
      int looks = 0;
      t.set_watch([&] {
        if (++looks == 3) {
          fail(ErrorKind::kPeerFailed, "the neighbour has gone");
        }
      });
      const Failure f = failure_of(
          [&] { t.receive(1, 1, NetBuffer(8))->wait(Deadline(kLong)); });
      CHECK_EQ(f.what, std::string("the neighbour has gone"));
      CHECK(f.after < kLong / 2);
      CHECK(failure_of([&] {
              (void)t.receive(1, 1, NetBuffer(8));
            }).kind == ErrorKind::kPeerFailed);
    }
    store.meet("over", 2);
  });
}

// Of every size, though nobody has asked for it yet, and its sender has gone.
TEST(transport_receives_what_was_here_before) {
  on_transports(2, [](int rank, Transport& t, Store& store) {
    const size_t sizes[] = {1, 8000, 9000, 20000, 32768, 60000};
    if (rank == 0) {
      for (const size_t bytes : sizes) {
        t.send(1, 9, filled(bytes, bytes))->wait(Deadline(kLong));
      }
      t.send(1, 1, filled(8, 1))->wait(Deadline(kLong));
      return; // and leaves
    }
    t.receive(0, 1, NetBuffer(8))->wait(Deadline(kLong)); // behind all others
    store.set("has all", "");
    std::this_thread::sleep_for(milliseconds(200));
    for (const size_t bytes : sizes) {
      const NetBuffer into(bytes);
      t.receive(0, 9, into)->wait(Deadline(kLong));
      CHECK(same(into, filled(bytes, bytes)));
    }
  });
}

// A rank that has sent its last message and goes loses nothing of it.
TEST(transport_last_messages_arrive) {
  for (int turn = 0; turn < 5; ++turn) {
    on_transports(3, [](int rank, Transport& t, Store&) {
      const int next = (rank + 1) % 3;
      const int previous = (rank + 2) % 3;
      for (const size_t bytes : {size_t(100), size_t(300) << 10}) {
        const NetBuffer into(bytes);
        const auto received = t.receive(previous, 3, into);
        t.send(next, 3, filled(bytes, rank))->wait(Deadline(kLong));
        received->wait(Deadline(kLong));
        CHECK(same(into, filled(bytes, previous)));
      }
    });
  }
}

// It may be busy with another group, and come back to this one later; or have
// left itself.
TEST(transport_leaving_does_not_wait_for_a_peer) {
  for (const bool gone : {false, true}) {
    for (const size_t bytes : {size_t(0), size_t(100), size_t(60) << 10}) {
      on_threads(2, [&](int rank, Store& store) {
        auto t = connect(store, rank, 2);
        const NetBuffer into(bytes);
        if (rank == 0) {
          t->send(1, 1, filled(bytes, 1))->wait(Deadline(kLong));
          if (gone) {
            store.get("gone", Deadline(kLong));
          }
          const auto begin = Clock::now();
          t.reset();
          CHECK(Clock::now() - begin < TcpTransport::Config().farewell / 4);
          store.set("left", "");
        } else {
          if (!gone) {
            store.get("left", Deadline(kLong));
          }
          t->receive(0, 1, into)->wait(Deadline(kLong));
          CHECK(same(into, filled(bytes, 1)));
          t.reset();
          store.set("gone", "");
        }
      });
    }
  }
}

// Also of those that fail half-way.
TEST(transport_leaves_no_descriptor) {
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  // What still leaves, on a thread, may open more before it closes all; so may
  // what the test before this one has left.
  const auto settle = [&] {
    constexpr int kOurs = kOnlyThreads ? 2 : 1; // TSan has one of its own
    const Deadline farewell(kLong); // peers may hold it up
    while (threads() > kOurs && !farewell.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(threads() <= kOurs);
  };
  settle();
  size_t before = 0;
  for (int turn = 0; turn < 4; ++turn) {
    on_transports(2, [](int rank, Transport& t, Store&) {
      const NetBuffer into(1 << 20);
      const auto received = t.receive(1 - rank, 1, into);
      if (rank == 0) {
        t.abort();
      }
    });
    settle();
    const size_t after = open_files();
    CHECK(turn == 0 || after <= before);
    before = after;
  }
}

} // namespace
