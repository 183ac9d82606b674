#include "host/domain.hpp"

#include <csignal>
#include <random>

#include "collectives/monitored_barrier.hpp"
#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

OpDescriptor barrier_op(uint64_t sequence) {
  OpDescriptor d;
  d.op = OpCode::kBarrier;
  d.sequence = sequence;
  return d;
}

void barrier(Domain& domain, uint64_t sequence, milliseconds timeout = kLong) {
  domain.barrier(barrier_op(sequence), Deadline(timeout));
}

// Barriers with delays; what a rank wrote before one is read by all after it
// and overwritten only after the next.
void barriers(int rank, int size, Store& store) {
  Member me(rank, size, store);
  Domain& domain = me.domain;
  CHECK_EQ(domain.rank(), rank);
  CHECK_EQ(domain.size(), size);
  std::mt19937_64 random(rank);
  for (uint64_t i = 1; i <= (kSanitized ? 100 : 300); ++i) {
    if (random() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
    const int half = domain.next_half();
    domain.table(rank, half)[3] = 1000 * i + static_cast<uint64_t>(rank);
    domain.descriptor(rank, half) = barrier_op(i);
    std::memset(domain.stage_in(rank, half), static_cast<int>(i + rank), 200);
    barrier(domain, i);
    CHECK_EQ(half, domain.half());
    for (int p = 0; p < size; ++p) {
      CHECK_EQ(domain.table(p, half)[3], 1000 * i + static_cast<uint64_t>(p));
      CHECK_EQ(domain.descriptor(p, half).sequence, i);
      CHECK_EQ(
          domain.stage_in(p, half)[199],
          static_cast<char>(i + static_cast<uint64_t>(p)));
    }
  }
  barrier(domain, 0);
}

} // namespace

TEST(domain_barriers_with_threads) {
  for (int size = 1; size <= 8; ++size) {
    on_threads(
        size, [&](int rank, Store& store) { barriers(rank, size, store); });
  }
}

TEST(domain_barriers_with_processes) {
  for (int size : {2, 5}) {
    on_processes(
        size, [&](int rank, Store& store) { barriers(rank, size, store); });
  }
}

TEST(domain_buffers_do_not_overlap) {
  on_threads(3, [](int rank, Store& store) {
    Member me(rank, 3, store);
    Domain& domain = me.domain;
    for (int half : {0, 1}) {
      std::memset(domain.stage_in(rank, half), 1 + half, kStageBytes);
      std::memset(domain.stage_out(rank, half), 3 + half, kStageBytes);
      for (size_t i = 0; i < kTableEntries; ++i) {
        domain.table(rank, half)[i] = i + 77 * half;
      }
    }
    barrier(domain, 1);
    for (int p = 0; p < 3; ++p) {
      for (int half : {0, 1}) {
        for (size_t i : {size_t{0}, kStageBytes - 1}) {
          CHECK_EQ(domain.stage_in(p, half)[i], 1 + half);
          CHECK_EQ(domain.stage_out(p, half)[i], 3 + half);
        }
        CHECK_EQ(domain.table(p, half)[0], uint64_t(77 * half));
        CHECK_EQ(
            domain.table(p, half)[kTableEntries - 1],
            kTableEntries - 1 + 77 * half);
      }
      for (int from = 0; from < 3; ++from) {
        CHECK_EQ(domain.inbox(p, from).written.load(), uint64_t{0});
      }
      CHECK_EQ(domain.control(p).state.load(), uint32_t{0});
      CHECK(domain.control(p).phase.load() >= 1);
    }
    barrier(domain, 2);
    // Heap blocks lie where peers are told.
    auto* p = static_cast<char*>(domain.arena()->allocate(100));
    p[5] = static_cast<char>(rank);
    domain.table(rank, domain.next_half())[0] = *domain.arena()->locate(p, 100);
    barrier(domain, 3);
    for (int q = 0; q < 3; ++q) {
      CHECK_EQ(domain.address(q, domain.table(q, domain.half())[0])[5], q);
    }
    barrier(domain, 4);
    domain.arena()->deallocate(p);
  });
}

TEST(domain_timeout_names_missing_ranks) {
  on_threads(4, [](int rank, Store& store) {
    Member me(rank, 4, store);
    if (rank < 2) {
      const auto start = Clock::now();
      expect_error(
          ErrorKind::kTimeout,
          {"barrier",
           "sequence number 7",
           "on rank " + std::to_string(rank),
           "300 ms",
           "ranks 2, 3"},
          [&] { barrier(me.domain, 7, milliseconds(300)); });
      CHECK(seconds_since(start) >= 0.29);
      CHECK(seconds_since(start) < 2);
    }
    store.meet("all have seen it", 4);
  });
}

TEST(domain_killed_peer_is_noticed) {
  Processes ranks(3, [](int rank, Store& store) {
    Member me(rank, 3, store);
    barrier(me.domain, 1);
    store.meet("ready", 4);
    if (rank == 2) {
      pause();
    }
    expect_error(
        ErrorKind::kPeerDead,
        {"barrier, sequence number 2",
         "failed on rank " + std::to_string(rank),
         "the process of rank 2 (pid "},
        [&] { barrier(me.domain, 2); });
  });
  ranks.store().meet("ready", 4);
  std::this_thread::sleep_for(milliseconds(50)); // the others sleep
  const auto start = Clock::now();
  ranks.signal(2, SIGKILL);
  ranks.check(0);
  ranks.check(1);
  CHECK(seconds_since(start) < 2);
  CHECK(WIFSIGNALED(ranks.wait(2)));
}

TEST(domain_stopped_peer_times_out) {
  Processes ranks(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    barrier(me.domain, 1);
    store.meet("ready", 3);
    if (rank == 1) {
      pause();
    }
    store.get("stopped", Deadline(kLong));
    const auto start = Clock::now();
    expect_error(ErrorKind::kTimeout, {"500 ms", "rank 1, which"}, [&] {
      barrier(me.domain, 2, milliseconds(500));
    });
    CHECK(seconds_since(start) < 2.5);
  });
  ranks.store().meet("ready", 3);
  ranks.signal(1, SIGSTOP);
  ranks.store().set("stopped", "");
  ranks.check(0);
}

// Who arrived at a barrier and then ended does no harm.
TEST(domain_peer_may_end_after_its_part) {
  Processes ranks(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 1) {
      expect_error(ErrorKind::kTimeout, {"rank 0"}, [&] {
        barrier(me.domain, 1, milliseconds(50));
      });
      store.set("arrived", "");
      _exit(failure_count() == 0 ? 0 : 1); // without leaving the group
    }
    store.get("arrived", Deadline(kLong));
    barrier(me.domain, 1);
    expect_error(
        ErrorKind::kPeerDead, {"rank 1"}, [&] { barrier(me.domain, 2); });
  });
  ranks.check(1);
  ranks.check(0);
}

// What a rank needs may come between two looks at who has ended.
TEST(domain_part_may_come_while_peers_are_checked) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 1) {
      me.domain.leave();
    }
    store.meet("left", 2);
    if (rank == 0) {
      bool asked = false;
      const auto missing = [&](int) {
        asked = true;
        return true;
      };
      me.domain.wait(
          me.domain.control(0).bell,
          OpDescriptor{},
          Deadline(kLong),
          [&] { return asked; },
          missing);
      CHECK(asked);
      expect_error(ErrorKind::kPeerFailed, {"rank 1 has left"}, [&] {
        me.domain.check_peers("it", missing);
      });
    }
    store.meet("over", 2);
  });
}

TEST(domain_part_may_come_just_before_the_end) {
  Processes ranks(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    store.meet("ready", 3);
    if (rank == 1) {
      pause();
    }
    store.get("dead", Deadline(kLong));
    int looks = 0;
    me.domain.check_peers("it", [&](int) { return ++looks == 1; });
    CHECK_EQ(looks, 3); // before and after the look at the process; the state
    expect_error(ErrorKind::kPeerDead, {"it, failed on rank 0", "rank 1"}, [&] {
      me.domain.check_peers("it", [](int) { return true; });
    });
  });
  ranks.store().meet("ready", 3);
  ranks.signal(1, SIGKILL);
  ranks.wait(1);
  ranks.store().set("dead", "");
  ranks.check(0);
}

// A rank that fails after a barrier does not make those fail that are still in it.
TEST(domain_peer_may_fail_after_the_barrier) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 0) {
      me.domain.set_idle([&] {
        store.set("waits", "");
        store.get("failed", Deadline(kLong));
        return false;
      });
      barrier(me.domain, 1);
      me.domain.set_idle(nullptr);
      expect_error(ErrorKind::kPeerFailed, {"rank 1 reported", "broken"}, [&] {
        barrier(me.domain, 2);
      });
    } else {
      store.get("waits", Deadline(kLong));
      barrier(me.domain, 1);
      me.domain.mark_failed(Error(ErrorKind::kSystem, "fused: broken"));
      store.set("failed", "");
    }
    store.meet("over", 2);
  });
}

// It has arrived, but takes its memory away while others may pass and read it.
TEST(domain_peer_may_fail_at_the_barrier) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 1) {
      expect_error(ErrorKind::kTimeout, {"rank 0"}, [&] {
        barrier(me.domain, 1, milliseconds(50));
      });
      me.domain.mark_failed(Error(ErrorKind::kTimeout, "fused: gave up"));
    }
    store.meet("failed", 2);
    if (rank == 0) {
      expect_error(ErrorKind::kPeerFailed, {"rank 1", "gave up"}, [&] {
        barrier(me.domain, 1);
      });
    }
    store.meet("end", 2);
  });
}

TEST(domain_says_how_a_peer_ended) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 1) {
      me.domain.leave("its interpreter exited, after ValueError: x");
    }
    store.meet("left", 2);
    if (rank == 0) {
      expect_error(
          ErrorKind::kPeerDead,
          {"barrier", "the process of rank 1 (pid ", "after ValueError: x"},
          [&] { barrier(me.domain, 1); });
    }
    store.meet("over", 2);
  });
}

TEST(domain_abort_ends_a_wait) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 0) {
      std::atomic<bool> waiting{false};
      std::thread other([&] {
        while (!waiting) {
          std::this_thread::yield();
        }
        std::this_thread::sleep_for(milliseconds(60));
        me.domain.request_abort();
      });
      const auto start = Clock::now();
      waiting = true;
      expect_error(ErrorKind::kAborted, {"barrier", "aborted on rank 0"}, [&] {
        barrier(me.domain, 1);
      });
      CHECK(seconds_since(start) < 2);
      other.join();
      CHECK(me.domain.abort_requested());
      expect_error(
          ErrorKind::kAborted, {"aborted"}, [&] { barrier(me.domain, 2); });
    }
    store.meet("done", 2);
  });
}

TEST(domain_failure_reaches_peers) {
  on_threads(3, [](int rank, Store& store) {
    Member me(rank, 3, store);
    Domain& domain = me.domain;
    const std::string reason = "fused: disk on fire" + std::string(600, '!');
    auto* block = static_cast<char*>(domain.arena()->allocate(100));
    std::memset(block, 9, 100);
    if (rank == 1) {
      CHECK(!domain.failed());
      std::this_thread::sleep_for(milliseconds(40));
      domain.mark_failed(Error(ErrorKind::kSystem, reason));
      domain.mark_failed(Error(ErrorKind::kTimeout, "fused: later"));
      CHECK(domain.failed());
      CHECK(domain.failure_kind() == ErrorKind::kSystem);
      CHECK_EQ(domain.failure_reason(), reason);
      // Peers have lost sight of the tensors, which keep their values.
      CHECK(!domain.arena()->locate(block, 100));
      CHECK_EQ(block[99], 9);
      domain.leave(); // does not hide the failure
    } else {
      const auto start = Clock::now();
      expect_error(
          ErrorKind::kPeerFailed,
          {"barrier", "rank 1 reported: fused: disk on fire!!!"},
          [&] { barrier(domain, 1); });
      CHECK(seconds_since(start) < 2);
      CHECK(!domain.failed()); // that is for the caller to say
      CHECK(domain.arena()->locate(block, 100).has_value());
    }
    store.meet("done", 3);
    domain.arena()->deallocate(block);
  });
}

TEST(domain_leaving_reaches_peers) {
  on_threads(2, [](int rank, Store& store) {
    Member me(rank, 2, store);
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(40));
      me.domain.leave();
    } else {
      expect_error(ErrorKind::kPeerFailed, {"rank 1 has left the group"}, [&] {
        barrier(me.domain, 1);
      });
    }
    store.meet("done", 2);
  });
}

TEST(domain_peers_may_leave_behind_a_barrier) {
  for (int round = 0; round < 10; ++round) {
    on_threads(3, [&](int rank, Store& store) {
      Settings s = test_settings();
      s.arena_bytes = 1 << 20;
      Member me(rank, 3, store, s);
      if (rank == round % 3) {
        std::this_thread::sleep_for(milliseconds(round));
      }
      barrier(me.domain, 1); // and the domain's end
    });
  }
}

TEST(domain_memory_outlives_it) {
  on_threads(2, [](int rank, Store& store) {
    std::shared_ptr<Arena> arena;
    char* p = nullptr;
    {
      Member me(rank, 2, store);
      arena = me.domain.arena();
      p = static_cast<char*>(arena->allocate(5000));
      std::memset(p, rank + 1, 5000);
      barrier(me.domain, 1);
    }
    store.meet("both are gone", 2);
    CHECK_EQ(p[4999], rank + 1);
    std::memset(p, 7, 5000);
    arena->deallocate(p);
    CHECK_EQ(arena->used_bytes(), size_t{0});
  });
}

TEST(monitored_barrier_passes) {
  on_threads(4, [](int rank, Store& store) {
    Member me(rank, 4, store);
    std::mt19937_64 random(rank);
    for (int i = 0; i < 30; ++i) {
      if (random() % 3 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      }
      store.add("round " + std::to_string(i), 1);
      monitored_barrier(me.domain, kLong, i % 2 == 0);
      CHECK_EQ(store.add("round " + std::to_string(i), 0), int64_t{4});
    }
    barrier(me.domain, 1);
  });
}

TEST(monitored_barrier_names_the_missing) {
  for (bool all : {false, true}) {
    on_threads(4, [&](int rank, Store& store) {
      Member me(rank, 4, store);
      const auto pass = [&] {
        monitored_barrier(me.domain, milliseconds(300), all);
      };
      if (rank == 0) {
        store.get("two comes", Deadline(kLong));
        expect_error(
            ErrorKind::kTimeout,
            {all ? "[Rank 0]: Ranks 1, 3 failed to pass"
                 : "[Rank 0]: Rank 1 failed to pass",
             "300 ms"},
            pass);
      } else if (rank == 2) {
        store.set("two comes", "");
        expect_error(
            ErrorKind::kTimeout, {"Rank 2 successfully reached"}, pass);
      }
      store.meet("over", 4);
      CHECK(!me.domain.failed());
      barrier(me.domain, 1); // the group is as good as before
    });
  }
}
