// Groups of ranks that know each other from an earlier one.

#include "host/reunion.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <optional>
#include <random>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// A rank of a later group, whose ranks are these of the first.
struct Again {
  Again(
      const std::shared_ptr<Links>& links,
      const std::vector<int>& ranks,
      const std::string& name,
      milliseconds timeout = kLong,
      const Settings& s = test_settings())
      : rank(
            static_cast<int>(
                std::find(ranks.begin(), ranks.end(), links->self()) -
                ranks.begin())),
        bootstrap(rank, static_cast<int>(ranks.size()), s) {
    CHECK(links->know(ranks, s.host_id));
    bootstrap.meet_again(links, name, ranks);
    domain.emplace(rank, bootstrap, s, Deadline(timeout));
  }
  void barrier() {
    domain->barrier(OpDescriptor(), Deadline(kLong));
  }

  const int rank;
  Bootstrap bootstrap;
  std::optional<Domain> domain;
};

TEST(reunion_of_some_ranks_and_of_all) {
  on_threads(4, [](int rank, Store& store) {
    const Member all(rank, 4, store);
    const auto links = all.bootstrap.links();
    std::vector<std::string> ids;
    for (int turn = 0; turn < 20; ++turn) {
      // The same names again and again, as for ranks that are the same ones.
      const std::vector<int> some =
          rank % 2 == 0 ? std::vector{2, 0} : std::vector{1, 3};
      for (const auto& ranks : {some, std::vector{0, 1, 2, 3}}) {
        Again group(links, ranks, "name");
        group.domain->control(group.rank).reason[0] =
            static_cast<char>('a' + rank);
        group.barrier();
        for (size_t p = 0; p < ranks.size(); ++p) {
          CHECK_EQ(
              group.domain->control(static_cast<int>(p)).reason[0],
              static_cast<char>('a' + ranks[p]));
        }
        const std::string id = group.bootstrap.id();
        CHECK(std::count(ids.begin(), ids.end(), id) == 0);
        ids.push_back(id);
        const auto key = formatted("{} {} {}", turn, ranks.size(), ranks[0]);
        if (group.rank == 0) {
          store.set(key, id);
        }
        CHECK_EQ(store.get(key, Deadline(kLong)), id);
        group.barrier(); // the store's room is short
      }
    }
    CHECK(!links->know({0, 4}, ""));
    CHECK(!links->know({0, 1}, "another host"));
  });
}

// Each rank makes both at once, on threads of its own.
TEST(reunions_side_by_side) {
  on_threads(3, [](int rank, Store& store) {
    const Member all(rank, 3, store);
    const auto links = all.bootstrap.links();
    const auto make = [&](const std::string& name) {
      for (int turn = 0; turn < 20; ++turn) {
        Again(links, {0, 1, 2}, name).barrier();
      }
    };
    std::thread other([&] { make("one"); });
    make("other");
    other.join();
  });
}

// A rank that comes late meets those that try again, and not what their first
// attempt has left behind.
TEST(reunion_after_an_attempt_that_failed) {
  on_threads(3, [](int rank, Store& store) {
    const Member all(rank, 3, store);
    const auto links = all.bootstrap.links();
    if (rank != 2) {
      // The second one may hear of the first one's.
      CHECK_THROWS(
          Again(links, {0, 1, 2}, "name", milliseconds(100)),
          Error,
          "creating the group of 3 timed out");
    }
    store.meet("tried", 3);
    Again group(links, {0, 1, 2}, "name");
    group.barrier();
  });
}

TEST(reunion_tells_why_a_rank_gave_up) {
  on_threads(2, [](int rank, Store& store) {
    const Member all(rank, 2, store);
    const auto links = all.bootstrap.links();
    if (rank == 1) {
      Bootstrap b(1, 2, test_settings());
      b.meet_again(links, "name", {0, 1});
      store.meet("begun", 2);
      b.withdraw("no memory here");
    } else {
      Bootstrap b(0, 2, test_settings());
      b.meet_again(links, "name", {0, 1});
      store.meet("begun", 2);
      const Fd memory = create_memory_file("test", 4096);
      expect_error(ErrorKind::kPeerFailed, {"rank 1", "no memory here"}, [&] {
        b.exchange_memory(memory.get(), Deadline(kLong));
      });
    }
    store.meet("failed", 2);
    // What was said before a rank came is not about this attempt.
    if (rank == 1) {
      Bootstrap b(1, 2, test_settings());
      b.meet_again(links, "name", {0, 1});
      b.withdraw("not now");
    }
    store.meet("withdrawn", 2);
    Again(links, {0, 1}, "name").barrier();
  });
}

TEST(reunion_compares_settings) {
  on_threads(3, [](int rank, Store& store) {
    const Member all(rank, 3, store);
    const auto links = all.bootstrap.links();
    Settings s = test_settings();
    s.block_size = rank == 1 ? 64 : 128;
    expect_error(ErrorKind::kMismatch, {"different settings", "=64"}, [&] {
      Again(links, {0, 1, 2}, "name", kLong, s);
    });
    Again(links, {0, 1, 2}, "name").barrier();
  });
}

TEST(reunion_names_a_dead_rank) {
  Processes ranks(3, [](int rank, Store& store) {
    const Member all(rank, 3, store);
    const auto links = all.bootstrap.links();
    if (rank == 2) {
      // A child has the connections, too: they do not end with the rank.
      if (fork() == 0) {
        alarm(3);
        pause();
      }
      store.meet("made", 4);
      pause();
    }
    store.meet("made", 4);
    const auto begin = Clock::now();
    expect_error(ErrorKind::kPeerDead, {"rank 1 (pid"}, [&] {
      Again(links, rank == 0 ? std::vector{0, 2} : std::vector{1, 2}, "name");
    });
    CHECK(Clock::now() - begin < std::chrono::seconds(10));
    Again(links, {0, 1}, "name").barrier();
  });
  ranks.store().meet("made", 4);
  ranks.signal(2, SIGKILL);
  ranks.check(0);
  ranks.check(1);
}

// A rank whose FUSEDPG_HOST_ID was changed meets by the store, so all do.
TEST(reunion_ends_where_a_rank_has_parted) {
  on_threads(3, [](int rank, Store& store) {
    const Member all(rank, 3, store);
    const auto links = all.bootstrap.links();
    for (int turn = 0; turn < 2; ++turn) {
      if (rank == 1) {
        links->decline("name", {0, 1, 2}, Deadline(kLong));
      } else {
        CHECK_THROWS(
            Again(links, {0, 1, 2}, "name"), MeetByStore, "meet by the store");
      }
      store.meet(formatted("parted {}", turn), 3);
    }
    Again(links, {0, 1, 2}, "name").barrier();
  });
}

// A rank that has met everybody may leave before the others have.
TEST(reunion_lets_ranks_leave) {
  for (int turn = 0; turn < 20; ++turn) {
    on_processes(3, [](int rank, Store& store) {
      std::optional<Member> all(std::in_place, rank, 3, store);
      Again(all->bootstrap.links(), {0, 1, 2}, "name");
    });
  }
}

// Many groups at a time in any order, by threads of their own, after attempts that
// may have failed on some ranks; then a rank is killed in the middle.
TEST(reunions_at_random) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 24;
  constexpr int kEnd = 18; // in this round the victim dies
  constexpr int kVictim = 2;
  std::random_device seeds;
  const unsigned seed = seeds();
  std::cerr << "seed " << seed << "\n";
  Processes ranks(kRanks, [&](int rank, Store& store) {
    const Member all(rank, kRanks, store);
    const auto links = all.bootstrap.links();
    std::mt19937 common(seed);
    std::mt19937 own(seed + 1 + rank);
    for (int round = 0; round < kRounds; ++round) {
      const bool hurried = common() % 2 == 0;
      std::vector<std::vector<int>> groups;
      std::vector<std::string> names;
      for (int g = 0; g < 4; ++g) {
        std::vector<int> members;
        for (int r = 0; r < kRanks; ++r) {
          if (common() % 3 != 0 && (round <= kEnd || r != kVictim)) {
            members.push_back(r);
          }
        }
        std::shuffle(members.begin(), members.end(), common);
        if (members.size() > 1) {
          groups.push_back(members);
          names.push_back(formatted("{}", g)); // the same in each round
        }
      }
      const auto make = [&](milliseconds timeout, unsigned pause, size_t g) {
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
        Again group(links, groups[g], names[g], timeout);
        group.barrier();
      };
      const auto each = [&](const std::function<void(unsigned, size_t)>& body) {
        std::vector<std::thread> threads;
        for (size_t g = 0; g < groups.size(); ++g) {
          if (std::count(groups[g].begin(), groups[g].end(), rank) != 0) {
            threads.emplace_back(body, own() % 2000, g);
          }
        }
        for (std::thread& thread : threads) {
          thread.join();
        }
      };
      const auto meet = [&](const char* when) {
        // The store's room is short.
        const int alive = round <= kEnd ? kRanks : kRanks - 1;
        store.meet(formatted("{} {}", when, round), alive);
      };
      if (hurried && round != kEnd) {
        each([&](unsigned pause, size_t g) {
          try {
            const milliseconds little(1 + pause % 4);
            Again(links, groups[g], names[g], little);
          } catch (const Error&) {
            // on some ranks, or on all
          }
        });
      }
      meet("begin");
      each([&](unsigned pause, size_t g) {
        const auto& members = groups[g];
        const bool doomed = round == kEnd &&
            std::count(members.begin(), members.end(), kVictim) != 0;
        try {
          if (doomed && rank == kVictim) {
            std::this_thread::sleep_for(std::chrono::microseconds(pause));
            raise(SIGKILL);
          }
          make(kLong, pause, g);
          CHECK(!doomed);
        } catch (const Error& error) {
          const std::string text = error.what();
          if (!doomed || text.find("timed out") != std::string::npos) {
            report_failure("reunions_at_random", round, text);
          }
        }
      });
      if (round == kEnd && rank == kVictim) {
        raise(SIGKILL); // it was in no group
      }
    }
  });
  for (int r = 0; r < kRanks; ++r) {
    if (r == kVictim) {
      CHECK_EQ(WTERMSIG(ranks.wait(r)), SIGKILL);
    } else {
      ranks.check(r);
    }
  }
}

// What a group commits before it is used.
TEST(reunion_commits_little) {
  on_threads(2, [](int rank, Store& store) {
    Member all(rank, 2, store);
    Again group(all.bootstrap.links(), {0, 1}, "name");
    const auto committed = [&] {
      struct stat file{};
      CHECK(fstat(group.domain->arena()->fd(), &file) == 0);
      return static_cast<size_t>(file.st_blocks) * 512;
    };
    CHECK(committed() <= size_t(64) << 10);
    group.barrier();
    CHECK(committed() <= size_t(64) << 10);
    group.domain->prepare();
    CHECK(committed() > 4 * kStageBytes);
    group.barrier();
  });
}

} // namespace
