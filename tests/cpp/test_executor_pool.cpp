#include "host/executor.hpp"
#include "host/pool.hpp"

#include <future>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// An operation that holds the executor until it is opened.
class Gate {
 public:
  void operator()() {
    entered_.set_value();
    opened_.get_future().wait();
  }
  void wait_until_entered() {
    entered_.get_future().wait();
  }
  void open() {
    opened_.set_value();
  }

 private:
  std::promise<void> entered_;
  std::promise<void> opened_;
};

} // namespace

TEST(executor_runs_in_ticket_order) {
  constexpr int kThreads = 8;
  constexpr int kEach = 300;
  Executor executor;
  std::vector<uint64_t> order; // unguarded: operations exclude each other
  int unnumbered = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      uint64_t last = 0;
      for (int i = 0; i < kEach; ++i) {
        switch (random() % 3) {
          case 0: {
            const uint64_t ticket = executor.submit(
                [&](uint64_t ticket) { order.push_back(ticket); });
            CHECK(ticket > last);
            last = ticket;
            break;
          }
          case 1: {
            uint64_t seen = 0;
            executor.run([&](uint64_t ticket) {
              order.push_back(ticket);
              seen = ticket;
            });
            CHECK(seen > last); // it has run
            last = seen;
            break;
          }
          default:
            executor.run_unnumbered([&] { ++unnumbered; });
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(executor.drain(kLong));
  std::vector<uint64_t> expected(executor.tickets());
  std::iota(expected.begin(), expected.end(), uint64_t{1});
  CHECK(order == expected);
  CHECK_EQ(order.size() + unnumbered, size_t{kThreads * kEach});
  executor.stop();
}

TEST(executor_runs_inline_when_idle) {
  Executor executor;
  const auto me = std::this_thread::get_id();
  std::thread::id where;
  const auto note = [&](uint64_t) { where = std::this_thread::get_id(); };
  executor.run(note);
  CHECK(where == me);
  executor.run_unnumbered([&] { note(0); });
  CHECK(where == me);
  CHECK_EQ(executor.tickets(), uint64_t{1});
  CHECK_EQ(executor.submit(note), uint64_t{2});
  CHECK(executor.drain(kLong));
  CHECK(where != me);
  executor.run(note); // idle again
  CHECK(where == me);
  CHECK_EQ(executor.tickets(), uint64_t{3});

  Gate gate;
  executor.submit([&](uint64_t) { gate(); });
  gate.wait_until_entered();
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(30));
    gate.open();
  });
  where = {};
  executor.run(note); // has to wait its turn, here or there
  CHECK(where != std::thread::id());
  opener.join();
}

TEST(executor_turns_are_for_who_finds_it_idle) {
  Executor executor;
  std::vector<uint64_t> order;
  const auto note = [&](uint64_t ticket) { order.push_back(ticket); };
  {
    const Executor::Turn turn(executor);
    CHECK(static_cast<bool>(turn));
    CHECK_EQ(turn.ticket(), uint64_t{1});
    CHECK(executor.runs_here());
    const Executor::Turn within(executor);
    CHECK(!static_cast<bool>(within));
    CHECK_THROWS(executor.run(note), Error, "signal handler");
    CHECK_EQ(executor.submit(note), uint64_t{2}); // waits
    CHECK(!executor.drain(milliseconds(20)));
    CHECK(order.empty());
  }
  CHECK(!executor.runs_here());
  CHECK(executor.drain(kLong));
  CHECK(order == (std::vector<uint64_t>{2}));
  std::optional<Executor::Turn> turn(std::in_place, executor);
  std::thread caller([&] { executor.run(note); });
  while (executor.tickets() < 4) {
    std::this_thread::yield();
  }
  turn.reset();
  caller.join();
  CHECK(order == (std::vector<uint64_t>{2, 4}));
}

// A thread that waits runs what has not begun, up to what it waits for.
TEST(executor_waiters_run_the_queue) {
  Executor executor;
  const auto me = std::this_thread::get_id();
  Gate gate;
  executor.submit([&](uint64_t) { gate(); });
  gate.wait_until_entered();
  std::vector<std::thread::id> where(4);
  for (size_t i = 1; i < where.size(); ++i) {
    executor.submit([&, i](uint64_t) {
      where[i] = std::this_thread::get_id();
      // So that the progress thread comes for the next one only when the
      // waiter has had its turn.
      std::this_thread::sleep_for(std::chrono::milliseconds(i == 2 ? 20 : 0));
    });
  }
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(30));
    gate.open();
  });
  executor.finish(3);
  CHECK(where[1] != std::thread::id());
  CHECK(where[2] != std::thread::id());
  executor.finish(4);
  executor.finish(1); // long done
  opener.join();
  CHECK(executor.drain(kLong));

  // Nothing runs, and the wait comes at once: mostly it is this thread's turn.
  int here = 0;
  for (int i = 0; i < 200; ++i) {
    const uint64_t ticket = executor.submit(
        [&](uint64_t) { here += std::this_thread::get_id() == me; });
    executor.finish(ticket);
  }
  CHECK(here > 0);
}

// Many threads that submit, wait and run at random: all in order, nothing lost.
TEST(executor_waiters_and_the_thread_share_the_queue) {
  constexpr int kThreads = 6;
  constexpr int kEach = 400;
  Executor executor;
  std::vector<uint64_t> order;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t + 100);
      std::vector<std::pair<uint64_t, std::shared_ptr<std::atomic<bool>>>> open;
      for (int i = 0; i < kEach; ++i) {
        auto done = std::make_shared<std::atomic<bool>>(false);
        const uint64_t ticket = executor.submit([&, done](uint64_t mine) {
          order.push_back(mine);
          *done = true;
        });
        open.emplace_back(ticket, done);
        switch (random() % 8) {
          case 0:
            std::this_thread::sleep_for(
                std::chrono::microseconds(random() % 1000));
            break;
          case 1:
            executor.run([&](uint64_t mine) { order.push_back(mine); });
            break;
          case 2:
            executor.wake_now();
            break;
          default:
            break;
        }
        while (!open.empty() && random() % 2) {
          const size_t which = random() % open.size();
          executor.finish(open[which].first);
          CHECK(*open[which].second);
          open.erase(open.begin() + static_cast<ptrdiff_t>(which));
        }
      }
      for (const auto& [ticket, done] : open) {
        executor.finish(ticket);
        CHECK(*done);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::vector<uint64_t> expected(executor.tickets());
  std::iota(expected.begin(), expected.end(), uint64_t{1});
  CHECK(order == expected);
}

// What nobody waits for begins by itself, whatever came before.
TEST(executor_needs_no_waiter) {
  Executor executor;
  for (int i = 0; i < 30; ++i) {
    std::promise<void> ran;
    const uint64_t ticket = executor.submit([&](uint64_t) { ran.set_value(); });
    CHECK(ran.get_future().wait_for(kLong) == std::future_status::ready);
    if (i % 3 == 0) {
      executor.finish(ticket);
    }
    if (i % 5 == 0) {
      const uint64_t waited = executor.submit([](uint64_t) {});
      executor.finish(waited);
      std::this_thread::sleep_for(milliseconds(i % 2));
    }
  }
}

// A waiter behind an operation that never ends by itself leaves with it.
TEST(executor_refuses_after_stop) {
  Executor executor;
  executor.stop();
  CHECK_THROWS(executor.submit([](uint64_t) {}), Error, "shut down");
  bool ran = false;
  executor.run_unnumbered([&] { ran = true; });
  CHECK(ran);
}

TEST(executor_queues_behind_an_inline_operation) {
  Executor executor;
  Gate gate;
  std::thread caller([&] { executor.run([&](uint64_t) { gate(); }); });
  gate.wait_until_entered();
  std::atomic<bool> ran{false};
  executor.submit([&](uint64_t ticket) {
    CHECK_EQ(ticket, uint64_t{2});
    ran = true;
  });
  CHECK(!executor.drain(milliseconds(30)));
  CHECK(!ran);
  gate.open();
  CHECK(executor.drain(kLong));
  CHECK(ran);
  caller.join();
}

TEST(executor_drain_waits) {
  Executor executor;
  CHECK(executor.drain(milliseconds(0)));
  Gate gate;
  executor.submit([&](uint64_t) { gate(); });
  gate.wait_until_entered();
  const auto start = Clock::now();
  CHECK(!executor.drain(milliseconds(50)));
  CHECK(seconds_since(start) >= 0.045);
  gate.open();
  CHECK(executor.drain(kLong));
}

TEST(executor_stop_runs_the_queue) {
  std::vector<uint64_t> order;
  {
    Executor executor;
    Gate gate;
    executor.submit([&](uint64_t) { gate(); });
    gate.wait_until_entered();
    for (int i = 0; i < 100; ++i) {
      executor.submit([&](uint64_t ticket) { order.push_back(ticket); });
    }
    std::thread opener([&] {
      std::this_thread::sleep_for(milliseconds(30));
      gate.open();
    });
    executor.stop();
    CHECK_EQ(order.size(), size_t{100});
    opener.join();
    executor.stop(); // again does nothing
    // The calling thread still can.
    executor.run([&](uint64_t ticket) { order.push_back(ticket); });
    CHECK_EQ(order.back(), uint64_t{102});
  }
  // Also while a caller's thread holds the executor.
  Executor executor;
  Gate gate;
  std::atomic<bool> ran{false};
  std::thread caller([&] { executor.run([&](uint64_t) { gate(); }); });
  gate.wait_until_entered();
  executor.submit([&](uint64_t) { ran = true; });
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(30));
    gate.open();
  });
  executor.stop();
  CHECK(ran);
  caller.join();
  opener.join();
}

TEST(executor_stop_waits_for_a_caller) {
  Executor executor;
  Gate gate;
  std::thread caller([&] { executor.run([&](uint64_t) { gate(); }); });
  gate.wait_until_entered();
  std::atomic<bool> stopped{false};
  std::thread stopping([&] {
    executor.stop();
    stopped = true;
  });
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(!stopped);
  // Behind the caller nothing is queued any more, and nothing takes a ticket.
  bool open = true;
  while (open) {
    try {
      executor.submit([](uint64_t) {});
    } catch (const Error&) {
      open = false;
    }
  }
  const uint64_t tickets = executor.tickets();
  CHECK_THROWS(executor.run([](uint64_t) {}), Error, "shut down");
  CHECK_EQ(executor.tickets(), tickets);
  gate.open();
  caller.join();
  stopping.join();
}

TEST(executor_remembers_what_has_ended) {
  Executor executor;
  executor.run([](uint64_t) {});
  executor.run_unnumbered([] {}); // has no ticket
  executor.finish(1);
  CHECK_EQ(executor.tickets(), uint64_t{1});
}

TEST(executor_releases_captures_in_turn) {
  Executor executor;
  // What goes may ask the executor, which must not be locked then.
  struct Asks {
    Executor& executor;
    ~Asks() {
      CHECK(executor.tickets() > 0);
    }
  };
  std::shared_ptr<Asks> asks(new Asks{executor});
  executor.submit([asks = std::move(asks)](uint64_t) {});
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  executor.submit([held = std::move(held)](uint64_t) {});
  bool gone = false;
  executor.submit([&](uint64_t) { gone = watch.expired(); });
  CHECK(executor.drain(kLong));
  CHECK(gone);
}

TEST(executor_operations_may_submit) {
  Executor executor;
  std::vector<uint64_t> order;
  executor.submit([&](uint64_t first) {
    order.push_back(first);
    executor.submit([&](uint64_t second) { order.push_back(second); });
  });
  CHECK(executor.drain(kLong));
  CHECK((order == std::vector<uint64_t>{1, 2}));
}

TEST(pool_covers_each_index_once) {
  std::mt19937_64 random(7);
  for (int threads : {1, 2, 3, 5}) {
    Pool pool(threads);
    CHECK_EQ(pool.threads(), threads);
    for (int round = 0; round < (kSanitized ? 200 : 1000); ++round) {
      const size_t align = size_t{1} << random() % 8;
      const size_t grain = 1 + random() % 2000;
      const size_t n = random() % 8 ? random() % 10000 : random() % 3;
      std::vector<uint8_t> hits(n);
      pool.run(n, align, grain, [&](size_t begin, size_t end) {
        CHECK(begin <= end && end <= n);
        CHECK_EQ(begin % align, size_t{0});
        for (size_t i = begin; i < end; ++i) {
          ++hits[i];
        }
      });
      CHECK(std::all_of(hits.begin(), hits.end(), [](uint8_t h) {
        return h == 1;
      }));
    }
  }
  CHECK_EQ(Pool(0).threads(), 1);
  CHECK_EQ(Pool(-3).threads(), 1);
}

TEST(pool_uses_all_its_threads) {
  Pool pool(4);
  const auto users = [&](size_t n) {
    std::mutex mutex;
    std::set<std::thread::id> ids;
    pool.run(n, 64, 1000, [&](size_t, size_t) {
      const std::lock_guard<std::mutex> lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
    return ids;
  };
  const std::set<std::thread::id> all = users(100000);
  CHECK_EQ(all.size(), size_t{4});
  CHECK(all.count(std::this_thread::get_id()) == 1);
  CHECK(users(100000) == all); // the same threads again
  CHECK_EQ(users(2500).size(), size_t{2}); // parts are worth their while
  const std::set<std::thread::id> small = users(1999);
  CHECK_EQ(small.size(), size_t{1});
  CHECK(*small.begin() == std::this_thread::get_id());
}
