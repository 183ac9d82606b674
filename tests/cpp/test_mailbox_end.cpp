// The mailbox while peers end, are late, or this rank stops.

#include <csignal>

#include "mailbox_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

} // namespace

// Messages between two ranks must not hide that a third is dead or late.
TEST(mailbox_traffic_hides_nobody) {
  for (bool killed : {true, false}) {
    Processes ranks(3, [&](int rank, Store& store) {
      Post me(rank, 3, store);
      const PlacedMemory to = me.buffer(5000);
      const PlacedMemory from = me.buffer(5000);
      const PlacedMemory b = me.buffer(100);
      me.barrier();
      if (rank == 1) {
        store.set("ready", "");
        pause();
      }
      std::optional<Pending> owed;
      const auto start = Clock::now();
      if (rank == 0) {
        owed = me.receive(b, 1, 7, killed ? kLong : milliseconds(300));
      }
      try {
        while (seconds_since(start) < 8) {
          Pending r = me.receive(from, 2 - rank);
          me.send(to, 2 - rank).wait();
          r.wait();
        }
      } catch (const Error&) {
        // The failure of rank 0 ends the group.
      }
      CHECK(seconds_since(start) < 4);
      if (rank == 0) {
        expect_error(
            killed ? ErrorKind::kPeerDead : ErrorKind::kTimeout,
            {"recv(100 bytes, tag 7, from rank 1)", "on rank 0"},
            [&] { owed->wait(); });
      }
    });
    ranks.store().get("ready", Deadline(kLong));
    if (killed) {
      std::this_thread::sleep_for(milliseconds(300));
      ranks.signal(1, SIGKILL);
    }
    ranks.check(0);
    ranks.check(2);
  }
}

// A peer that never stops sending does not keep the mailbox from stopping.
TEST(mailbox_stops_under_traffic) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const PlacedMemory b = me.buffer(64);
    if (rank == 1) {
      std::vector<Pending> sent;
      const auto start = Clock::now();
      while (!store.has("stopped") && seconds_since(start) < 6) {
        try {
          sent.push_back(me.send(b, 0, static_cast<int>(sent.size() % 5)));
        } catch (const Error&) {
          break;
        }
        if (sent.size() > 500) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
      }
      me.mailbox.stop(); // what is pending refers to the buffer
    } else {
      std::this_thread::sleep_for(milliseconds(50));
      const auto start = Clock::now();
      me.mailbox.stop();
      CHECK(seconds_since(start) < 3);
      store.set("stopped", "");
    }
    store.meet("over", 2);
  });
}

// Threads post while others stop or abort: every post throws or completes.
TEST(mailbox_posts_race_with_the_end) {
  for (int turn = 0; turn < (kSanitized ? 6 : 20); ++turn) {
    on_threads(2, [&](int rank, Store& store) {
      Post me(rank, 2, store);
      const PlacedMemory b = me.buffer(3000);
      const PlacedMemory in = me.buffer(3000);
      std::atomic<int> done{0};
      std::atomic<int> posted{0};
      const Mailbox::Done count = [&](std::exception_ptr, int) { ++done; };
      std::vector<std::thread> threads;
      store.meet("begin", 2);
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < 100; ++i) {
            try {
              if ((i + t) % 2 == 0) {
                me.mailbox.send(b.data(), b.bytes(), 1 - rank, t, kLong, count);
              } else {
                me.mailbox.receive(
                    in.data(), in.bytes(), 1 - rank, t, kLong, count);
              }
              ++posted;
            } catch (const Error& error) {
              CHECK(error.kind() == ErrorKind::kAborted);
              const std::string text = error.what();
              CHECK(text.find("(3000 bytes, tag") != std::string::npos);
              return;
            }
          }
        });
      }
      std::this_thread::sleep_for(std::chrono::microseconds(turn * 50));
      if (turn % 3 == 1) {
        me.member.domain.request_abort();
      } else if (turn % 3 == 2) {
        me.member.domain.mark_failed(
            Error(ErrorKind::kSystem, "fused: broken"));
      }
      me.mailbox.stop();
      for (std::thread& thread : threads) {
        thread.join();
      }
      CHECK_EQ(done.load(), posted.load());
      store.meet("over", 2);
    });
  }
}
