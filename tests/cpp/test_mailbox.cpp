#include <algorithm>
#include <csignal>
#include <deque>
#include <map>
#include <random>

#include "mailbox_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr size_t kMiB = size_t(1) << 20;

char content(uint64_t id, size_t i) {
  return static_cast<char>(id * 13 + i + (i >> 8) * 7 + (i >> 16) * 3);
}

void fill(const PlacedMemory& b, uint64_t id) {
  for (size_t i = 0; i < b.bytes(); ++i) {
    b.data()[i] = content(id, i);
  }
}

bool filled(const PlacedMemory& b, uint64_t id) {
  for (size_t i = 0; i < b.bytes(); ++i) {
    if (b.data()[i] != content(id, i)) {
      return false;
    }
  }
  return true;
}

struct Planned {
  uint64_t id;
  int from;
  int to;
  int tag;
  size_t bytes;
  bool in_arena;
};

std::vector<Planned> plan(uint64_t seed, int size, uint64_t messages) {
  std::mt19937_64 random(seed);
  std::vector<Planned> all;
  for (uint64_t id = 0; id < messages; ++id) {
    const int from = static_cast<int>(random() % size);
    const int to = (from + 1 + static_cast<int>(random() % (size - 1))) % size;
    const size_t limits[] = {1, 100, 5000, 70000, 70000, 1100000};
    size_t bytes = random() % limits[random() % 6];
    if (id % 40 == 7) {
      bytes = 5 * kMiB - random() % 3;
    }
    const int tag = static_cast<int>(random() % 4);
    all.push_back({id, from, to, tag, bytes, random() % 3 == 0});
  }
  return all;
}

// Every rank posts its sends in the plan's order and its receives in another
// one, some of them before the sends, and waits for all of it.
void random_messages(int rank, int size, Store& store) {
  Post me(rank, size, store);
  const auto all =
      plan(static_cast<uint64_t>(size), size, kSanitized ? 80 : 200);
  std::map<std::pair<int, int>, std::deque<Planned>> streams;
  std::vector<std::pair<int, int>> order;
  for (const Planned& m : all) {
    if (m.to == rank) {
      streams[{m.from, m.tag}].push_back(m);
      order.emplace_back(m.from, m.tag);
    }
  }
  std::mt19937_64 random(rank);
  std::shuffle(order.begin(), order.end(), random);
  struct Expected {
    Planned message;
    PlacedMemory buffer;
    Pending pending;
  };
  std::vector<Expected> received;
  std::vector<std::pair<PlacedMemory, Pending>> sent;
  const size_t early = rank % 2 == 0 ? order.size() / 2 : 0;
  const auto receive_until = [&](size_t end) {
    while (received.size() < end) {
      auto& stream = streams[order[received.size()]];
      const Planned m = stream.front();
      stream.pop_front();
      PlacedMemory b = me.buffer(m.bytes, random() % 2 == 0);
      Pending pending = me.receive(b, m.from, m.tag);
      received.push_back({m, std::move(b), std::move(pending)});
    }
  };
  receive_until(early);
  for (const Planned& m : all) {
    if (m.from == rank) {
      PlacedMemory b = me.buffer(m.bytes, m.in_arena);
      fill(b, m.id);
      Pending pending = me.send(b, m.to, m.tag);
      sent.emplace_back(std::move(b), std::move(pending));
    }
  }
  receive_until(order.size());
  for (Expected& e : received) {
    CHECK_EQ(e.pending.wait(), e.message.from);
    CHECK(filled(e.buffer, e.message.id));
  }
  for (auto& [buffer, pending] : sent) {
    pending.wait();
  }
  me.barrier();
  received.clear();
  sent.clear();
  CHECK_EQ(me.member.domain.arena()->used_bytes(), size_t{0});
}

} // namespace

TEST(mailbox_random_messages_between_threads) {
  for (int size : {2, 4}) {
    on_threads(size, [&](int rank, Store& store) {
      random_messages(rank, size, store);
    });
  }
}

TEST(mailbox_random_messages_between_processes) {
  on_processes(
      3, [&](int rank, Store& store) { random_messages(rank, 3, store); });
}

TEST(mailbox_both_directions_at_once) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const int peer = 1 - rank;
    for (bool in_arena : {false, true}) {
      for (bool receive_first : {false, true}) {
        for (size_t bytes : {size_t{0}, size_t{10}, 5 * kMiB}) {
          const PlacedMemory out = me.buffer(bytes, in_arena);
          const PlacedMemory in = me.buffer(bytes, !in_arena);
          fill(out, rank);
          Pending r;
          if (receive_first) {
            r = me.receive(in, peer, 3);
          }
          Pending s = me.send(out, peer, 3);
          if (!receive_first) {
            r = me.receive(in, peer, 3);
          }
          CHECK_EQ(r.wait(), peer);
          CHECK_EQ(s.wait(), peer);
          CHECK(filled(in, peer));
        }
      }
    }
  });
}

TEST(mailbox_any_source) {
  on_threads(4, [](int rank, Store& store) {
    Post me(rank, 4, store);
    constexpr int kEach = 20;
    std::vector<PlacedMemory> buffers;
    std::vector<Pending> pending;
    if (rank == 0) {
      for (int i = 0; i < 3 * kEach; ++i) {
        buffers.push_back(me.buffer(3000));
        pending.push_back(me.receive(buffers.back(), Mailbox::kAnySource, 5));
      }
      std::map<int, uint64_t> next;
      for (int i = 0; i < 3 * kEach; ++i) {
        const int from = pending[i].wait();
        // In the order in which that rank sent them.
        CHECK(filled(buffers[i], next[from]++ * 10 + from));
      }
      CHECK_EQ(next.size(), size_t{3});
    } else {
      for (uint64_t i = 0; i < kEach; ++i) {
        buffers.push_back(me.buffer(3000));
        fill(buffers.back(), i * 10 + rank);
        pending.push_back(me.send(buffers.back(), 0, 5));
      }
      for (Pending& p : pending) {
        CHECK_EQ(p.wait(), 0);
      }
    }
    me.barrier();
  });
}

// A first receive from one rank is not served by another.
TEST(mailbox_matches_source_and_tag) {
  on_threads(3, [](int rank, Store& store) {
    Post me(rank, 3, store);
    const PlacedMemory a = me.buffer(10);
    const PlacedMemory b = me.buffer(10);
    const PlacedMemory c = me.buffer(10);
    if (rank == 0) {
      Pending from_two = me.receive(a, 2, 1);
      Pending tag_two = me.receive(b, 1, 2);
      Pending any = me.receive(c, Mailbox::kAnySource, 1);
      CHECK_EQ(any.wait(), 1); // rank 2 waits for this
      store.set("go", "");
      CHECK_EQ(from_two.wait(), 2);
      CHECK_EQ(tag_two.wait(), 1);
      CHECK(filled(a, 21) && filled(b, 12) && filled(c, 11));
    } else if (rank == 1) {
      fill(a, 11);
      fill(b, 12);
      me.send(a, 0, 1).wait();
      me.send(b, 0, 2).wait();
    } else {
      store.get("go", Deadline(kLong));
      fill(a, 21);
      me.send(a, 0, 1).wait();
    }
    me.barrier();
  });
}

TEST(mailbox_more_messages_than_slots) {
  constexpr size_t kMessages = 10 * kInboxSlots;
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    std::vector<PlacedMemory> buffers;
    std::vector<Pending> pending;
    // One slot, several, or more than a message gets. Those of one tag are
    // received first, so slots become free in another order.
    const auto bytes = [](size_t i) {
      return i % 4 != 3 ? i % 50
                        : (i * 7919) % (kMailSmall + 2 * kMailSlotBytes);
    };
    for (size_t i = 0; i < kMessages; ++i) {
      buffers.push_back(me.buffer(bytes(i), i % 3 == 0));
    }
    if (rank == 0) {
      for (size_t i = 0; i < kMessages; ++i) {
        fill(buffers[i], i);
        pending.push_back(me.send(buffers[i], 1, static_cast<int>(i % 2)));
      }
      store.meet("sent", 2);
    } else {
      store.meet("sent", 2);
      pending.resize(kMessages);
      for (const size_t tag : {size_t{1}, size_t{0}}) {
        for (size_t i = tag; i < kMessages; i += 2) {
          pending[i] = me.receive(buffers[i], 0, static_cast<int>(tag));
        }
      }
    }
    for (size_t i = 0; i < kMessages; ++i) {
      pending[i].wait();
      CHECK(filled(buffers[i], i));
    }
    me.barrier();
  });
}

TEST(mailbox_size_mismatch_is_an_error_on_both_sides) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const std::pair<size_t, size_t> sizes[] = {
        {100, 200}, {4 * kMiB, 100}, {0, 1}, {100, 0}, {3 * kMiB, 4 * kMiB}};
    for (const auto& [sent, expected] : sizes) {
      for (bool in_arena : {false, true}) {
        for (bool late : {false, true}) {
          const PlacedMemory b =
              me.buffer(rank == 0 ? sent : expected, in_arena);
          const std::vector<std::string> parts{
              std::to_string(sent), std::to_string(expected), "tag 6"};
          if (rank == 0) {
            expect_error(
                ErrorKind::kMismatch, parts, [&] { me.send(b, 1, 6).wait(); });
          } else {
            if (late) {
              std::this_thread::sleep_for(milliseconds(5));
            }
            expect_error(ErrorKind::kMismatch, parts, [&] {
              me.receive(b, 0, 6).wait();
            });
          }
        }
      }
      // The group goes on.
      const PlacedMemory good = me.buffer(2 * kMiB);
      if (rank == 0) {
        fill(good, sent);
        me.send(good, 1, 6).wait();
      } else {
        me.receive(good, 0, 6).wait();
        CHECK(filled(good, sent));
      }
    }
    CHECK(!me.member.domain.failed());
    me.barrier();
    CHECK_EQ(me.member.domain.arena()->used_bytes(), size_t{0});
  });
}

TEST(mailbox_needs_no_room_in_the_arena) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const auto& arena = me.member.domain.arena();
    void* all = arena->allocate(arena->heap_bytes());
    std::vector<PlacedMemory> buffers;
    std::vector<Pending> pending;
    for (int i = 0; i < 4; ++i) {
      buffers.push_back(me.buffer(2 * kMiB + 5));
      buffers.push_back(me.buffer(2 * kMiB + 5));
      fill(buffers[2 * i], 10 * i + rank);
      pending.push_back(me.send(buffers[2 * i], 1 - rank));
      pending.push_back(me.receive(buffers[2 * i + 1], 1 - rank));
    }
    for (int i = 0; i < 4; ++i) {
      pending[2 * i].wait();
      pending[2 * i + 1].wait();
      CHECK(filled(buffers[2 * i + 1], 10 * i + 1 - rank));
    }
    me.barrier();
    arena->deallocate(all);
  });
}

TEST(mailbox_stop_fails_what_is_pending) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const PlacedMemory b = me.buffer(100);
    if (rank == 0) {
      Pending r = me.receive(b, 1);
      Pending any = me.receive(b, Mailbox::kAnySource, 9);
      Pending s = me.send(b, 1);
      store.meet("posted", 2);
      me.mailbox.stop();
      for (Pending* p : {&r, &any, &s}) {
        expect_error(
            ErrorKind::kAborted, {"shut down on rank 0", "pending"}, [&] {
              p->wait();
            });
      }
      CHECK(!me.member.domain.failed());
      me.mailbox.stop(); // again does nothing
    } else {
      store.meet("posted", 2);
    }
    store.meet("over", 2);
  });
}

TEST(mailbox_times_out) {
  for (const bool sends : {false, true}) {
    for (const size_t bytes : {size_t{100}, 4 * kMiB}) {
      on_threads(2, [&](int rank, Store& store) {
        Post me(rank, 2, store);
        const PlacedMemory b = me.buffer(bytes);
        const std::string name = formatted(
            "{}({} bytes, tag 4, {} rank 1)",
            sends ? "send" : "recv",
            bytes,
            sends ? "to" : "from");
        if (rank == 0) {
          const auto start = Clock::now();
          Pending late = sends ? me.send(b, 1, 4, milliseconds(200))
                               : me.receive(b, 1, 4, milliseconds(200));
          Pending other = sends ? me.receive(b, 1, 5) : me.send(b, 1, 5);
          expect_error(ErrorKind::kTimeout, {name, "on rank 0", "200 ms"}, [&] {
            late.wait();
          });
          CHECK(seconds_since(start) < 2);
          // It was the group's failure.
          expect_error(ErrorKind::kTimeout, {name}, [&] { other.wait(); });
          CHECK(me.member.domain.failed());
          expect_error(
              ErrorKind::kTimeout, {name}, [&] { me.receive(b, 1).wait(); });
          store.set("failed", "");
        } else {
          store.get("failed", Deadline(kLong));
          expect_error(
              ErrorKind::kPeerFailed, {"rank 0 reported: fused: " + name}, [&] {
                me.receive(b, 0, 1).wait();
              });
        }
        store.meet("over", 2);
      });
    }
  }
}

// A failure in the middle of a message gives back its parts, which the receiver
// has asked for and not acknowledged.
TEST(mailbox_failure_leaks_no_parts) {
  on_threads(2, [](int rank, Store& store) {
    if (rank == 0) {
      Post me(rank, 2, store);
      const auto& arena = me.member.domain.arena();
      const PlacedMemory b = me.buffer(5 * kMiB);
      const PlacedMemory small = me.buffer(100);
      Pending sent = me.send(b, 1, 3);
      Pending other = me.send(small, 1, 4);
      store.get("taken", Deadline(kLong));
      const Deadline deadline(kLong);
      while (arena->used_bytes() < 2 * kMiB && !deadline.expired()) {
        std::this_thread::yield();
      }
      CHECK_EQ(arena->used_bytes(), 2 * kMiB); // no more than two parts
      me.mailbox.stop();
      for (Pending* p : {&sent, &other}) {
        expect_error(ErrorKind::kAborted, {"pending"}, [&] { p->wait(); });
      }
      CHECK_EQ(arena->used_bytes(), size_t{0});
      store.meet("over", 2);
    } else {
      // A receiver that asks for the message and then does nothing more.
      Member me(rank, 2, store);
      Inbox& inbox = me.domain.inbox(1, 0);
      const Deadline deadline(kLong);
      while (inbox.written.load() < 2 && !deadline.expired()) {
        std::this_thread::yield();
      }
      const Message offer = inbox.slots[0];
      CHECK_EQ(offer.kind, uint32_t{Mailbox::kOffer});
      CHECK_EQ(offer.bytes, uint64_t{0}); // nothing is held for it
      CHECK_EQ(inbox.slots[1].bytes, uint64_t{100});
      Inbox& back = me.domain.inbox(0, 1);
      back.slots[0] = {
          offer.id, Mailbox::kTake, offer.tag, offer.total, 0, 0, 0};
      back.written.store(1);
      me.domain.control(0).mail_bell.ring();
      store.set("taken", "");
      store.meet("over", 2);
    }
  });
}

// Messages that nobody receives hold nothing that others need, with any arena.
TEST(mailbox_unreceived_messages_hold_nothing) {
  for (const size_t arena_bytes : {size_t{0}, size_t{2} << 20}) {
    on_threads(3, [&](int rank, Store& store) {
      Settings settings = test_settings();
      settings.arena_bytes = arena_bytes;
      Post me(rank, 3, store, settings);
      std::vector<PlacedMemory> buffers;
      std::vector<Pending> pending;
      // More than there are slots, and large ones.
      const auto bytes = [](int i) {
        return i < 2 * static_cast<int>(kMailSlots) ? size_t{1000} : 3 * kMiB;
      };
      constexpr int kMessages = 2 * static_cast<int>(kMailSlots) + 3;
      for (int i = 0; i < kMessages; ++i) {
        buffers.push_back(me.buffer(bytes(i)));
      }
      const PlacedMemory last = me.buffer(3 * kMiB + 1);
      if (rank == 0) {
        for (int i = 0; i < kMessages; ++i) {
          fill(buffers[i], i);
          pending.push_back(me.send(buffers[i], 1, i));
        }
        fill(last, 100);
        me.send(last, 2).wait(); // while rank 1 receives nothing
        me.send(last, 1, kMessages).wait(); // nor anything else
      } else if (rank == 1) {
        me.receive(last, 0, kMessages).wait();
        CHECK(filled(last, 100));
        for (int i = kMessages - 1; i >= 0; --i) {
          me.receive(buffers[i], 0, i).wait();
          CHECK(filled(buffers[i], i));
        }
      } else {
        me.receive(last, 0).wait();
        CHECK(filled(last, 100));
      }
      for (Pending& p : pending) {
        p.wait();
      }
      me.barrier();
      CHECK_EQ(me.member.domain.arena()->used_bytes(), size_t{0});
    });
  }
}

TEST(mailbox_notices_a_killed_peer) {
  Processes ranks(3, [](int rank, Store& store) {
    Post me(rank, 3, store);
    const PlacedMemory b = me.buffer(100);
    const PlacedMemory c = me.buffer(100);
    const PlacedMemory d = me.buffer(100);
    const PlacedMemory in_arena = me.buffer(10000, true);
    const PlacedMemory large = me.buffer(kMailSmall + 1);
    if (rank == 1) {
      fill(b, 1);
      fill(in_arena, 2);
      me.send(b, 0, 1).wait();
      me.send(b, 0, 2); // its last
      me.send(in_arena, 0, 4);
      me.send(large, 0, 5);
    }
    if (rank == 0) {
      me.receive(b, 1, 1).wait();
    }
    me.barrier();
    store.meet("ready", 4);
    if (rank == 1) {
      pause();
    }
    if (rank == 0) {
      store.get("dead", Deadline(kLong));
      // What it had sent still arrives if it was small or lies in the arena.
      me.receive(b, 1, 2).wait();
      CHECK(filled(b, 1));
      me.receive(in_arena, 1, 4).wait();
      CHECK(filled(in_arena, 2));
      const auto start = Clock::now();
      Pending rest = me.receive(large, 1, 5);
      expect_error(ErrorKind::kPeerDead, {"recv(", "of rank 1 (pid"}, [&] {
        me.receive(c, 1, 3).wait();
      });
      expect_error(
          ErrorKind::kPeerDead, {"recv(65537 bytes"}, [&] { rest.wait(); });
      CHECK(seconds_since(start) < 2);
    } else {
      // One that could come from others waits for them.
      Pending any = me.receive(d, Mailbox::kAnySource, 8, milliseconds(600));
      const auto start = Clock::now();
      CHECK_THROWS(any.wait(), Error, "fused: recv(100 bytes, tag 8");
      CHECK(seconds_since(start) > 0.15 && seconds_since(start) < 2);
    }
  });
  ranks.store().meet("ready", 4);
  std::this_thread::sleep_for(milliseconds(200));
  ranks.signal(1, SIGKILL);
  CHECK(WIFSIGNALED(ranks.wait(1)));
  ranks.store().set("dead", "");
  ranks.check(0);
  ranks.check(2);
}

// The data of a rank that has failed lie in memory that nobody sees any more:
// they must not be taken for a message.
TEST(mailbox_takes_nothing_from_a_failed_peer) {
  on_threads(2, [](int rank, Store& store) {
    Post me(rank, 2, store);
    const PlacedMemory b = me.buffer(3000, true);
    if (rank == 0) {
      fill(b, 5);
      me.send(b, 1);
      store.meet("sent", 2);
      std::this_thread::sleep_for(milliseconds(50));
      me.member.domain.mark_failed(Error(ErrorKind::kSystem, "fused: broken"));
      store.set("failed", "");
    } else {
      store.meet("sent", 2);
      store.get("failed", Deadline(kLong));
      expect_error(ErrorKind::kPeerFailed, {"rank 0 reported", "broken"}, [&] {
        me.receive(b, 0).wait();
      });
    }
    store.meet("over", 2);
  });
}
