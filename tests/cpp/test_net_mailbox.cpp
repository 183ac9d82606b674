// Point to point by sockets on this machine; ranks are threads.

#include "messages/net_mailbox.hpp"

#include <algorithm>

#include "collectives/monitored_barrier.hpp"
#include "kernels_reference.hpp"
#include "mailbox_cases.hpp"
#include "net/tcp_transport.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// Where a rank listens, and the addresses of all ranks.
struct Meeting {
  Meeting(int rank, int size, Store& store)
      : endpoint(
            std::make_unique<TcpEndpoint>(
                TcpListener::at(SocketAddress::of("127.0.0.1 0")),
                rank,
                size)) {
    store.set(formatted("mail/{}", rank), endpoint->address());
    for (int p = 0; p < size; ++p) {
      addresses.push_back(store.get(formatted("mail/{}", p), Deadline(kLong)));
    }
  }
  std::unique_ptr<TcpTransport> open() {
    return std::make_unique<TcpTransport>(
        TcpTransport::Config(), std::move(endpoint));
  }
  std::unique_ptr<TcpEndpoint> endpoint;
  std::vector<std::string> addresses{};
};

// Who moves messages where a rank waits for one.
enum class Moves { kThread, kWaiter };

struct NetPost {
  const int rank;
  const int size;
  const Moves moves;
  Store& store;
  std::atomic<bool> aborted{false};
  std::atomic<bool> stopped{false}; // its thread does nothing
  std::atomic<int> failures{0};
  std::function<Error(const Error&)> on_failure = [](const Error& e) {
    return e;
  };
  Meeting meeting;
  NetMailbox box;

  NetPost(Moves moves, int rank, int size, Store& store)
      : rank(rank),
        size(size),
        moves(moves),
        store(store),
        meeting(rank, size, store),
        box(
            rank,
            size,
            [this] { return meeting.open(); },
            meeting.addresses,
            [this] {
              while (stopped) {
                std::this_thread::sleep_for(milliseconds(1));
              }
              if (aborted) {
                fail(ErrorKind::kAborted, "fused: aborted");
              }
            },
            [](int) { return false; },
            [this](const Error& error) {
              ++failures;
              return on_failure(error);
            }) {}

  Pending send(
      const Bytes& b,
      int to,
      int tag = 0,
      milliseconds timeout = kLong) {
    Pending pending;
    box.send(b.data(), b.size(), to, tag, timeout, pending.done());
    return moved(pending);
  }
  Pending receive(
      Bytes& b,
      int from,
      int tag = 0,
      milliseconds timeout = kLong) {
    Pending pending;
    box.receive(b.data(), b.size(), from, tag, timeout, pending.done());
    return moved(pending);
  }
  Pending moved(Pending pending) {
    if (moves == Moves::kWaiter) {
      pending.set_move([this](const auto& done, const Deadline& deadline) {
        box.move_until(done, deadline);
      });
    }
    return pending;
  }
  void meet(const std::string& name) {
    store.meet(name, size);
  }
};

void on_posts(int size, const std::function<void(NetPost&)>& body) {
  for (const Moves moves : {Moves::kThread, Moves::kWaiter}) {
    on_threads(size, [&](int rank, Store& store) {
      NetPost post(moves, rank, size, store);
      body(post);
      store.meet("end", size);
    });
  }
}

Bytes filled(size_t bytes, int seed) {
  Bytes b(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    b[i] = static_cast<uint8_t>(seed * 37 + i * 11 + (i >> 9));
  }
  return b;
}

TEST(net_mailbox_matches_source_and_tag_in_order) {
  on_posts(3, [](NetPost& post) {
    const size_t sizes[] = {0, 1, 5000, 65536, 70000, size_t(3) << 20};
    struct Expected {
      Bytes got, want;
      Pending pending;
    };
    std::deque<Expected> receives;
    std::vector<Bytes> kept;
    kept.reserve(1000);
    std::vector<Pending> sends;
    const auto seed = [](int from, int to, int tag, int round) {
      return 1000 * from + 100 * to + 10 * tag + round;
    };
    for (int round = 0; round < 6; ++round) {
      for (int p = 0; p < 3; ++p) {
        for (int tag = 0; tag < 3 && p != post.rank; ++tag) {
          const int other = 2 - tag; // not in the order of the sends
          const size_t n = sizes[(round + other) % 6];
          receives.push_back(
              {Bytes(n), filled(n, seed(p, post.rank, other, round)), {}});
          Expected& one = receives.back();
          one.pending = post.receive(one.got, p, other);
          const size_t m = sizes[(round + tag) % 6];
          kept.push_back(filled(m, seed(post.rank, p, tag, round)));
          sends.push_back(post.send(kept.back(), p, tag));
        }
      }
    }
    for (Expected& one : receives) {
      one.pending.wait();
      CHECK(one.got == one.want);
    }
    for (Pending& one : sends) {
      one.wait();
    }
  });
}

// Receives that come after their messages, in another order.
TEST(net_mailbox_matches_what_has_come) {
  on_posts(2, [](NetPost& post) {
    if (post.rank == 0) {
      std::deque<Bytes> kept;
      std::deque<Pending> sends;
      for (int tag = 0; tag < 4; ++tag) {
        kept.push_back(filled(100, tag));
        sends.push_back(post.send(kept.back(), 1, tag));
      }
      for (Pending& one : sends) {
        one.wait();
      }
      return;
    }
    for (const int tag : {3, 2, 0, 1}) {
      Bytes got(100);
      post.receive(got, 0, tag).wait();
      CHECK(got == filled(100, tag));
    }
  });
}

// Several threads wait at once, and each has ranks answer each other.
TEST(net_mailbox_moved_by_several) {
  on_posts(2, [](NetPost& post) {
    const int peer = 1 - post.rank;
    const auto talk = [&](int tag) {
      for (int round = 0; round < 30; ++round) {
        const size_t bytes = round % 3 == 0 ? size_t(1) << 20 : 1000 * tag + 8;
        const Bytes said = filled(bytes, 2 * tag + post.rank);
        Bytes heard(bytes);
        // Sometimes the receive comes first, and sometimes the message.
        Pending receive;
        const bool first = (round + tag) % 2 == post.rank;
        if (first) {
          receive = post.receive(heard, peer, tag);
        }
        Pending send = post.send(said, peer, tag);
        if (!first) {
          receive = post.receive(heard, peer, tag);
        }
        receive.wait();
        send.wait();
        CHECK(heard == filled(bytes, 2 * tag + peer));
      }
    };
    std::vector<std::thread> others;
    for (int tag = 1; tag < 4; ++tag) {
      others.emplace_back(talk, tag);
    }
    talk(0);
    for (std::thread& other : others) {
      other.join();
    }
  });
}

TEST(net_mailbox_any_source) {
  on_posts(4, [](NetPost& post) {
    if (post.rank != 0) {
      const Bytes b = filled(1000, post.rank);
      post.send(b, 0, 5).wait();
      return;
    }
    std::vector<bool> came(4);
    for (int i = 1; i < 4; ++i) {
      Bytes b(1000);
      const int from = post.receive(b, NetMailbox::kAnySource, 5).wait();
      CHECK(!came[from]);
      came[from] = true;
      CHECK(b == filled(1000, from));
    }
  });
}

TEST(net_mailbox_sizes_that_differ_raise_on_both_sides) {
  on_posts(2, [](NetPost& post) {
    const std::pair<size_t, size_t> cases[] = {
        {10, 20}, {20, 10}, {0, 5}, {5, 0}, {3 << 20, 8}, {8, 3 << 20}};
    for (const auto& [n, m] : cases) {
      Bytes b = post.rank == 0 ? filled(n, 1) : filled(m, 3);
      Pending pending = post.rank == 0 ? post.send(b, 1) : post.receive(b, 0);
      expect_error(
          ErrorKind::kMismatch, {std::to_string(n), std::to_string(m)}, [&] {
            pending.wait();
          });
      CHECK(post.rank == 0 || b == filled(m, 3)); // not a part of the message
      Bytes next = post.rank == 0 ? filled(100000, 2) : Bytes(100000);
      (post.rank == 0 ? post.send(next, 1) : post.receive(next, 0)).wait();
      CHECK(next == filled(100000, 2));
    }
    CHECK_EQ(post.failures.load(), 0);
  });
}

// A sender is told of a large receive only where its next message is for that one.
TEST(net_mailbox_large_receive_behind_another) {
  on_posts(2, [](NetPost& post) {
    constexpr size_t kBytes = size_t(3) << 20;
    const Bytes message = filled(kBytes, 4);
    for (const int source : {0, NetMailbox::kAnySource}) {
      const std::string round = std::to_string(source);
      if (post.rank == 0) {
        post.meet("posted" + round);
        std::this_thread::sleep_for(milliseconds(50)); // it would say so
        Pending wrong = post.send(message, 1);
        Pending right = post.send(message, 1);
        expect_error(ErrorKind::kMismatch, {"send"}, [&] { wrong.wait(); });
        right.wait();
      } else {
        Bytes few(8);
        Bytes all(kBytes);
        Pending wrong = post.receive(few, source);
        Pending right = post.receive(all, 0);
        post.meet("posted" + round);
        expect_error(ErrorKind::kMismatch, {"recv"}, [&] { wrong.wait(); });
        right.wait();
        CHECK(all == message);
      }
      post.meet("next" + round);
    }
    CHECK_EQ(post.failures.load(), 0);
  });
}

// A transport that keeps what it was given to send: 'n' for a note, 'd' for 1 MB or more.
struct KeepsOrder : TcpTransport {
  KeepsOrder(std::unique_ptr<TcpEndpoint> endpoint, std::string& order)
      : TcpTransport(TcpTransport::Config(), std::move(endpoint)),
        order(order) {}
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override {
    if (tag == 0 || message.bytes() >= size_t(1) << 20) {
      order += tag == 0 ? 'n' : 'd';
    }
    return TcpTransport::send(to, tag, message);
  }
  std::string& order;
};

// The other side hears of a receive that is posted after a large send before that has
// passed, so that both large messages travel at once.
TEST(net_mailbox_both_ways_at_once) {
  std::string orders[2];
  on_threads(2, [&](int rank, Store& store) {
    constexpr int kRounds = 20;
    const int peer = 1 - rank;
    const Bytes large = filled(size_t(2) << 20, rank);
    Bytes got(large.size());
    Bytes ping(1);
    std::string& order = orders[rank];
    Meeting meeting(rank, 2, store);
    NetMailbox box(
        rank,
        2,
        [&] {
          return std::make_unique<KeepsOrder>(
              std::move(meeting.endpoint), order);
        },
        meeting.addresses,
        [] {},
        [](int) { return false; },
        [](const Error& error) { return error; });
    const auto wait = [&](Pending& pending) {
      pending.set_move([&](const auto& done, const Deadline& deadline) {
        box.move_until(done, deadline);
      });
      pending.wait();
    };
    int before = 0; // rounds in which the note went first
    for (int round = 0; round < kRounds; ++round) {
      Pending sent;
      Pending received;
      const auto receive = [&] {
        box.receive(got.data(), got.size(), peer, 1, kLong, received.done());
      };
      Pending pinged;
      if (rank == 1) {
        receive();
        box.send(ping.data(), 1, peer, 2, kLong, pinged.done());
        wait(pinged);
      } else {
        box.receive(ping.data(), 1, peer, 2, kLong, pinged.done());
        wait(pinged); // the other side's receive is known
        order.clear();
      }
      box.send(large.data(), large.size(), peer, 1, kLong, sent.done());
      if (rank == 0) {
        receive();
      }
      wait(sent);
      wait(received);
      CHECK(got == filled(large.size(), peer));
      if (rank == 0) {
        const size_t notes = order.find('d');
        before += notes != std::string::npos && notes >= 2 ? 1 : 0;
      }
      store.meet("round" + std::to_string(round), 2);
    }
    if (rank == 0) {
      CHECK(before > kRounds / 4); // the mailbox's thread may come between
    }
    store.meet("end", 2);
  });
}

// What the network has taken arrives although its sender leaves.
TEST(net_mailbox_sender_leaves) {
  on_threads(2, [](int rank, Store& store) {
    const Bytes message = filled(size_t(3) << 20, 5);
    Bytes got(message.size());
    {
      NetPost post(Moves::kWaiter, rank, 2, store);
      if (rank == 0) {
        post.send(message, 1).wait();
      } else {
        post.receive(got, 0).wait();
        CHECK(got == message);
      }
    }
    store.meet("end", 2);
  });
}

// The caller may free what it has received into as soon as it hears of the error.
TEST(net_mailbox_that_has_failed_writes_nothing) {
  on_posts(2, [](NetPost& post) {
    constexpr size_t kBytes = size_t(8) << 20;
    const Bytes message = filled(kBytes, 3);
    if (post.rank == 1) {
      post.send(message, 0, 1).wait();
      Pending late = post.send(message, 0, 2);
      std::this_thread::sleep_for(milliseconds(100)); // it says so
      post.stopped = true;
      std::this_thread::sleep_for(milliseconds(100));
      post.meet("stopped");
      post.meet("failed");
      post.stopped = false;
      expect_error(ErrorKind::kPeerFailed, {"send"}, [&] { late.wait(); });
      post.meet("over");
      return;
    }
    Bytes into(kBytes);
    post.receive(into, 1, 1).wait();
    CHECK(into == message);
    into.assign(kBytes, 0);
    post.meet("stopped");
    Pending pending = post.receive(into, 1, 2, milliseconds(300));
    expect_error(ErrorKind::kTimeout, {"recv"}, [&] { pending.wait(); });
    const Bytes then = into;
    post.meet("failed");
    post.meet("over");
    CHECK(into == then);
    CHECK(then != message);
  });
}

TEST(net_mailbox_ends) {
  // Nobody comes.
  on_posts(2, [](NetPost& post) {
    if (post.rank == 0) {
      Bytes b(10);
      Pending pending = post.receive(b, 1, 0, milliseconds(200));
      expect_error(
          ErrorKind::kTimeout, {"recv(10 bytes"}, [&] { pending.wait(); });
      CHECK_EQ(post.failures.load(), 1);
      expect_error(
          ErrorKind::kTimeout, {"timeout"}, [&] { post.receive(b, 1); });
    }
  });
  // Nobody takes what is sent.
  on_posts(2, [](NetPost& post) {
    if (post.rank == 0) {
      Bytes b(10);
      Pending pending = post.send(b, 1, 0, milliseconds(200));
      expect_error(
          ErrorKind::kTimeout, {"send(10 bytes"}, [&] { pending.wait(); });
    }
  });
  // The group is aborted, or ends; the other rank stays.
  for (const bool aborts : {true, false}) {
    on_posts(2, [&](NetPost& post) {
      if (post.rank == 1) {
        return;
      }
      Bytes b(100000), c(100000);
      Pending one = post.receive(b, 1, 1);
      Pending two = post.send(c, 1, 2);
      if (aborts) {
        post.aborted = true;
        post.box.wake();
      } else {
        post.box.stop();
      }
      expect_error(ErrorKind::kAborted, {"recv"}, [&] { one.wait(); });
      expect_error(ErrorKind::kAborted, {"send"}, [&] { two.wait(); });
    });
  }
  // The other side goes before anything was sent.
  on_posts(2, [](NetPost& post) {
    if (post.rank == 1) {
      post.meet("waits");
      std::this_thread::sleep_for(milliseconds(300)); // rank 0 has connected
      post.box.stop();
      return;
    }
    Bytes b(10);
    Pending pending = post.receive(b, 1, 0, milliseconds(10000));
    post.meet("waits");
    // Its words depend on whether rank 0 was connected by then.
    expect_error(ErrorKind::kPeerFailed, {"recv(10 bytes", "rank 1"}, [&] {
      pending.wait();
    });
  });
  // The other side goes, after what it sent has come.
  on_posts(2, [](NetPost& post) {
    Bytes b(200000);
    if (post.rank == 1) {
      post.send(b, 0).wait();
      post.box.stop();
      return;
    }
    post.receive(b, 1).wait();
    Pending pending = post.receive(b, 1);
    expect_error(ErrorKind::kPeerFailed, {"rank 1", "has ended"}, [&] {
      pending.wait();
    });
  });
}

// What is posted while a rank still asks why its peer has gone hears the answer.
TEST(net_mailbox_ends_with_one_error) {
  on_posts(2, [](NetPost& post) {
    Bytes b(100000), c(100000);
    if (post.rank == 1) {
      post.send(b, 0).wait();
      post.meet("waits");
      post.box.stop();
      return;
    }
    std::promise<void> asks, posted;
    post.on_failure = [&](const Error& error) {
      asks.set_value();
      posted.get_future().wait_for(kLong);
      return Error(error.kind(), formatted("{}; because", error.what()));
    };
    post.receive(b, 1).wait();
    Pending first = post.receive(b, 1);
    post.meet("waits");
    asks.get_future().wait_for(kLong);
    Pending second = post.send(c, 1);
    posted.set_value();
    for (Pending* pending : {&first, &second}) {
      expect_error(
          ErrorKind::kPeerFailed, {"because"}, [&] { pending->wait(); });
    }
    expect_error(
        ErrorKind::kPeerFailed, {"because"}, [&] { post.receive(b, 1); });
  });
}

// What nobody receives stays with its sender and keeps nothing else from coming.
TEST(net_mailbox_messages_that_nobody_receives) {
  on_posts(2, [](NetPost& post) {
    constexpr size_t kLarge = size_t(24) << 20;
    constexpr size_t kSmall = 60000; // of which less than 1 MiB is sent unasked
    constexpr int kMany = 40;
    const auto all = [&](const auto& each) {
      for (int tag = 0; tag < 4; ++tag) {
        each(kLarge, tag);
      }
      for (int tag = 10; tag < 10 + kMany; ++tag) {
        each(kSmall, tag);
      }
    };
    if (post.rank == 0) {
      std::deque<Bytes> kept;
      std::deque<Pending> sends;
      all([&](size_t bytes, int tag) {
        kept.push_back(filled(bytes, tag));
        sends.push_back(post.send(kept.back(), 1, tag));
      });
      const Bytes last = filled(100, 99);
      post.send(last, 1, 99).wait(); // though 98 MB are before it
      post.meet("last");
      for (Pending& one : sends) {
        one.wait();
      }
      return;
    }
    Bytes got(100);
    post.receive(got, 0, 99).wait();
    CHECK(got == filled(100, 99));
    post.meet("last");
    std::vector<std::pair<size_t, int>> backwards;
    all([&](size_t bytes, int tag) { backwards.emplace_back(bytes, tag); });
    std::reverse(backwards.begin(), backwards.end());
    for (const auto& [bytes, tag] : backwards) {
      Bytes one(bytes);
      post.receive(one, 0, tag).wait();
      CHECK(one == filled(bytes, tag));
    }
  });
}

TEST(net_mailbox_monitored_barrier) {
  on_posts(3, [](NetPost& post) {
    uint32_t number = 0;
    const auto barrier = [&](milliseconds timeout, bool all) {
      monitored_barrier(post.box, post.rank, post.size, number++, timeout, all);
    };
    const auto works = [&] {
      Bytes b = post.rank == 0 ? Bytes(70000) : filled(70000, post.rank);
      if (post.rank != 0) {
        post.send(b, 0, 3).wait();
      }
      for (int p = 1; p < 3 && post.rank == 0; ++p) {
        post.receive(b, p, 3).wait();
        CHECK(b == filled(70000, p));
      }
    };
    for (int i = 0; i < 3; ++i) {
      barrier(kLong, i == 1);
    }
    // Who does not come is named, and the group goes on.
    for (const bool all : {false, true}) {
      const bool comes = post.rank == 0 || (post.rank == 2 && !all);
      if (comes) {
        const std::string text = post.rank != 0 ? "Rank 2 successfully reached"
            : all                               ? "Ranks 1, 2 failed to pass"
                                                : "Rank 1 failed to pass";
        expect_error(ErrorKind::kTimeout, {text}, [&] {
          barrier(milliseconds(post.rank == 0 ? 300 : 1500), all);
        });
      }
      number += comes ? 0 : 1; // the call that it has left out
      post.meet(all ? "all" : "one");
      works();
      barrier(kLong, true);
    }
    CHECK_EQ(post.failures.load(), 0);
  });
}

} // namespace
