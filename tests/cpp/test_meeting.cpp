#include "host/meeting.hpp"

#include <csignal>
#include <mutex>
#include <random>
#include <set>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

PeerInfo somebody() {
  PeerInfo info;
  info.host_id = "host";
  info.token = random_token();
  info.pid = getpid();
  return info;
}

// One rank's meeting; its id and everybody's tokens.
std::string meet(
    Store& store,
    int rank,
    int size,
    milliseconds timeout = kLong,
    std::string* mine = nullptr) {
  const PeerInfo self = somebody();
  if (mine != nullptr) {
    *mine = self.token;
  }
  Meeting meeting(store, rank, size, self);
  const auto all = meeting.run(self, Deadline(timeout));
  CHECK_EQ(all.size(), static_cast<size_t>(size));
  CHECK(all[rank].token == self.token);
  std::string seen = meeting.id();
  for (const PeerInfo& info : all) {
    seen += info.token;
  }
  return seen;
}

// As a rank that is killed while it meets: it takes nothing back.
void leave_behind(Store& store, int rank, int size) {
  CHECK_THROWS(meet(store, rank, size, milliseconds(20)), Error, "timed out");
}

// All ranks meet, as threads; they must have seen the same.
std::string all_meet(
    Store& store,
    int size,
    const std::function<void(int)>& before = [](int) {}) {
  std::mutex mutex;
  std::set<std::string> seen;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        before(rank);
        const std::string mine = meet(store, rank, size);
        const std::lock_guard<std::mutex> lock(mutex);
        seen.insert(mine);
      } catch (const std::exception& error) {
        report_failure("rank", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(seen.size(), size_t{1});
  return seen.empty() ? "" : *seen.begin();
}

} // namespace

TEST(meeting_of_changing_size) {
  Store store;
  std::set<std::string> all;
  const std::vector<int> sizes{3, 2, 3, 2, 1, 3, 5, 2, 5, 3, 3};
  for (int size : sizes) {
    all.insert(all_meet(store, size));
  }
  CHECK_EQ(all.size(), sizes.size());
}

TEST(meeting_ignores_what_was_left_behind) {
  for (int lost : {0, 1, 2}) {
    for (int size : {2, 3, 4}) {
      Store store;
      leave_behind(store, lost, 3);
      all_meet(store, 3);
      leave_behind(store, lost, std::max(size, lost + 1));
      // The others see it for a while before its successor comes.
      all_meet(store, size, [&](int rank) {
        if (rank == lost) {
          std::this_thread::sleep_for(milliseconds(60));
        }
      });
      all_meet(store, 3);
    }
  }
}

TEST(meeting_of_killed_and_restarted_processes) {
  if (kOnlyThreads) {
    return;
  }
  Processes ranks(3, [](int rank, Store& store) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int round = 0; round < 9; ++round) {
      const int lost = round % 3;
      const int late = (round + 1) % 3; // so that nobody meets the lost one
      if (rank == lost) {
        const pid_t first = fork();
        if (first == 0) {
          try {
            meet(store, rank, 3);
          } catch (const std::exception&) {
          }
          pause();
        }
        std::this_thread::sleep_for(milliseconds(5 + random() % 30));
        store.signal(first, SIGKILL);
        waitpid(first, nullptr, 0);
        store.set(formatted("killed {}", round), "");
      }
      if (rank == late) {
        store.get(formatted("killed {}", round), Deadline(kLong));
      }
      const std::string seen = meet(store, rank, 3);
      store.set(formatted("seen {}", rank), seen);
      store.meet(formatted("round {}", round), 3);
      for (int p = 0; p < 3; ++p) {
        CHECK(store.get(formatted("seen {}", p), Deadline(kLong)) == seen);
      }
      store.meet(formatted("compared {}", round), 3);
    }
  });
  ranks.check_all();
}

TEST(meeting_tells_who_gave_up) {
  for (bool before : {false, true}) {
    Store store;
    std::vector<std::thread> threads;
    const auto refuse = [&] {
      const PeerInfo self = somebody();
      Meeting meeting(store, 2, 3, self);
      meeting.withdraw("fused: out of luck");
    };
    if (before) {
      refuse();
    }
    const auto start = Clock::now();
    for (int rank : {0, 1}) {
      threads.emplace_back([&, rank] {
        const PeerInfo self = somebody();
        Meeting meeting(store, rank, 3, self);
        expect_error(
            ErrorKind::kPeerFailed,
            {formatted("rank {} failed while", rank == 0 ? 2 : 0),
             "rank 2 failed while the group was being created: fused: out of "
             "luck"},
            [&] {
              try {
                meeting.run(self, Deadline(kLong));
              } catch (const Error& error) {
                meeting.withdraw(error.what());
                throw;
              }
            });
      });
    }
    if (!before) {
      std::this_thread::sleep_for(milliseconds(50));
      refuse();
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    // What is there already is believed after a while only.
    CHECK(seconds_since(start) < (before ? 8 : 2));
    // It fails one attempt, not those that follow.
    all_meet(store, 3, [](int rank) {
      std::this_thread::sleep_for(milliseconds(rank == 1 ? 0 : 50));
    });
  }
}
