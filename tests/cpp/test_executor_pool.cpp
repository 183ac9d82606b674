#include "host/executor.hpp"
#include "host/pool.hpp"

#include <future>
#include <numeric>
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
  executor.run(note); // has to wait its turn
  CHECK(where != me);
  opener.join();
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

TEST(executor_releases_captures_in_turn) {
  Executor executor;
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
