#include "host/arena.hpp"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr size_t kMiB = size_t(1) << 20;

char pattern(size_t seed, size_t i) {
  return static_cast<char>(seed * 37 + i * 11 + (i >> 8));
}

void fill(char* p, size_t bytes, size_t seed) {
  for (size_t i = 0; i < bytes; ++i) {
    p[i] = pattern(seed, i);
  }
}

bool filled(const char* p, size_t bytes, size_t seed) {
  for (size_t i = 0; i < bytes; ++i) {
    if (p[i] != pattern(seed, i)) {
      return false;
    }
  }
  return true;
}

struct Block {
  size_t bytes;
  size_t seed;
};

} // namespace

TEST(arena_follows_a_model) {
  std::mt19937_64 random(1);
  const auto arena = Arena::create(5000, 6 * kMiB);
  CHECK_EQ(arena->heap_bytes(), 6 * kMiB);
  std::map<char*, Block> live;
  size_t used = 0;
  const auto rounded = [](size_t n) {
    return (std::max<size_t>(n, 1) + 127) / 128 * 128;
  };
  const auto release = [&](std::map<char*, Block>::iterator it) {
    CHECK(filled(it->first, it->second.bytes, it->second.seed));
    arena->deallocate(
        it->first,
        random() % 2 ? Arena::Freed::kReturned : Arena::Freed::kKept);
    used -= rounded(it->second.bytes);
    live.erase(it);
  };
  size_t full = 0;
  for (size_t step = 0; step < (kSanitized ? 1000u : 4000u); ++step) {
    // Phases that grow and phases that shrink.
    if (random() % 8 < (step / 200 % 2 == 0 ? 6u : 2u)) {
      const size_t bytes = random() % (random() % 4 ? 5000 : 600000);
      char* p = nullptr;
      try {
        p = static_cast<char*>(arena->allocate(bytes));
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kOutOfMemory);
        ++full;
        continue;
      }
      CHECK_EQ(reinterpret_cast<uintptr_t>(p) % 128, uintptr_t{0});
      const auto next = live.upper_bound(p);
      CHECK(next == live.end() || p + bytes <= next->first);
      CHECK(
          next == live.begin() ||
          std::prev(next)->first + std::prev(next)->second.bytes <= p);
      fill(p, bytes, step);
      live[p] = {bytes, step};
      used += rounded(bytes);
      const size_t offset = static_cast<size_t>(p - arena->base());
      CHECK(arena->locate(p, bytes) == offset);
      CHECK(arena->locate(p + bytes / 2, bytes / 4) == offset + bytes / 2);
      CHECK(!arena->locate(p, rounded(bytes) + 1));
    } else if (!live.empty()) {
      auto it = live.begin();
      std::advance(it, random() % live.size());
      release(it);
    }
    CHECK_EQ(arena->used_bytes(), used);
  }
  CHECK(full > 0); // the arena was too small for some of it
  while (!live.empty()) {
    auto it = live.begin();
    std::advance(it, random() % live.size());
    release(it);
  }
  CHECK_EQ(arena->used_bytes(), size_t{0});
  // All free blocks are one again.
  void* all = arena->allocate(6 * kMiB);
  CHECK_EQ(arena->used_bytes(), arena->heap_bytes());
  arena->deallocate(all);
}

TEST(arena_reuses_freed_blocks) {
  const auto arena = Arena::create(1, 64 * kMiB);
  void* a = arena->allocate(3 * kMiB);
  void* b = arena->allocate(3 * kMiB);
  void* c = arena->allocate(3 * kMiB);
  const size_t committed = arena->committed_bytes();
  for (int i = 0; i < 20; ++i) {
    arena->deallocate(b);
    CHECK_EQ(arena->allocate(3 * kMiB), b);
  }
  CHECK_EQ(arena->committed_bytes(), committed);
  CHECK(committed < arena->size()); // not more than needed
  // The smallest block that fits is taken.
  arena->deallocate(b);
  CHECK_EQ(arena->allocate(kMiB), b);
  arena->deallocate(a);
  arena->deallocate(c);
}

TEST(arena_gives_back_what_lived_long) {
  const auto arena = Arena::create(1, 64 * kMiB);
  const auto blocks = [&] {
    struct stat file{};
    CHECK_EQ(fstat(arena->fd(), &file), 0);
    return static_cast<size_t>(file.st_blocks) * 512;
  };
  const size_t before = blocks();
  const auto make = [&](size_t bytes, size_t seed) {
    char* p = static_cast<char*>(arena->allocate(bytes));
    fill(p, bytes, seed);
    return p;
  };
  char* a = make(3 * kMiB, 1);
  char* b = make(5 * kMiB + 1000, 2);
  char* c = make(3 * kMiB, 3);
  const size_t committed = arena->committed_bytes();
  const size_t held = blocks();
  arena->deallocate(b, Arena::Freed::kReturned);
  CHECK(blocks() <= held - 5 * kMiB);
  CHECK_EQ(arena->committed_bytes(), committed - (held - blocks()));
  // Neighbours are as they were, and so is what takes its place.
  CHECK(filled(a, 3 * kMiB, 1));
  CHECK(filled(c, 3 * kMiB, 3));
  char* d = make(kMiB + 12345, 4);
  CHECK_EQ(d, b);
  char* e = make(2 * kMiB, 5);
  CHECK_EQ(arena->committed_bytes(), committed - (held - blocks()));
  CHECK(blocks() >= held - 2 * kMiB - 4096);
  CHECK(filled(a, 3 * kMiB, 1) && filled(c, 3 * kMiB, 3));
  CHECK(filled(d, kMiB + 12345, 4) && filled(e, 2 * kMiB, 5));
  for (char* p : {a, c, d, e}) {
    arena->deallocate(p, Arena::Freed::kReturned);
  }
  CHECK(blocks() < before + 2 * kMiB);
  // Many small ones are given back together.
  std::vector<char*> small;
  for (size_t i = 0; i < 200; ++i) {
    small.push_back(make(20000, i));
  }
  for (size_t i = 0; i < small.size(); ++i) {
    CHECK(filled(small[i], 20000, i));
    arena->deallocate(small[i], Arena::Freed::kReturned);
  }
  CHECK(blocks() < before + 2 * kMiB);
}

TEST(arena_locates_only_live_blocks) {
  const auto arena = Arena::create(4096, 4 * kMiB);
  char* a = static_cast<char*>(arena->allocate(1000));
  char* b = static_cast<char*>(arena->allocate(1000));
  const char local = 0;
  CHECK(!arena->locate(&local, 1));
  CHECK(!arena->locate(nullptr, 0));
  CHECK(!arena->locate(arena->base(), 16)); // the control part
  CHECK(arena->locate(a, 1000).has_value());
  CHECK(!arena->locate(a, static_cast<size_t>(b - a) + 1)); // two blocks
  CHECK(!arena->locate(b + 1024, 1));
  CHECK(!arena->locate(arena->base() + arena->size() - 8, 16));
  arena->deallocate(a);
  CHECK(!arena->locate(a, 1000));
  CHECK(arena->locate(b, 1000).has_value());
  arena->deallocate(b);
}

TEST(arena_full_is_an_error) {
  const auto arena = Arena::create(1, 2 * kMiB);
  for (size_t bytes :
       {2 * kMiB + 1,
        size_t(1) << 40,
        std::numeric_limits<size_t>::max() - 200,
        std::numeric_limits<size_t>::max()}) {
    expect_error(
        ErrorKind::kOutOfMemory,
        {"arena is full", std::to_string(bytes), "FUSEDPG_ARENA_BYTES"},
        [&] { arena->allocate(bytes); });
    CHECK_EQ(arena->used_bytes(), size_t{0});
  }
  void* p = arena->allocate(2 * kMiB);
  expect_error(ErrorKind::kOutOfMemory, {"2097152 of 2097152"}, [&] {
    arena->allocate(0);
  });
  arena->deallocate(p);
}

TEST(arena_commit_beyond_memory_is_an_error) {
  const size_t available = available_memory();
  CHECK(available > 0);
  const auto arena = Arena::create(1, available + (size_t(4) << 30));
  const size_t committed = arena->committed_bytes();
  expect_error(
      ErrorKind::kOutOfMemory,
      {"the arena needs ", " MiB more shared memory, but only ", " are free"},
      [&] { arena->allocate(available + (size_t(2) << 30)); });
  CHECK_EQ(arena->committed_bytes(), committed);
  CHECK_EQ(arena->used_bytes(), size_t{0});
  char* p = static_cast<char*>(arena->allocate(kMiB)); // usable all the same
  fill(p, kMiB, 1);
  arena->deallocate(p);
}

TEST(arena_allocates_from_many_threads) {
  const auto arena = Arena::create(1, 32 * kMiB);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<std::pair<char*, size_t>> mine;
      for (int i = 0; i < 500; ++i) {
        const size_t bytes = random() % 4000;
        char* p = static_cast<char*>(arena->allocate(bytes));
        fill(p, bytes, t);
        mine.emplace_back(p, bytes);
        if (random() % 3 != 0) {
          std::swap(mine.back(), mine[random() % mine.size()]);
          CHECK(filled(mine.back().first, mine.back().second, t));
          CHECK(arena->locate(mine.back().first, 1).has_value());
          arena->deallocate(mine.back().first);
          mine.pop_back();
        }
      }
      for (const auto& [p, bytes] : mine) {
        CHECK(filled(p, bytes, t));
        arena->deallocate(p);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(arena->used_bytes(), size_t{0});
}

TEST(arena_detach_keeps_contents_and_hides_peers) {
  const auto arena = Arena::create(4096, 32 * kMiB);
  // A peer's view of the same memory.
  const Mapping peer(arena->fd(), arena->size());
  std::vector<std::pair<char*, size_t>> blocks;
  for (size_t bytes : {size_t{100}, 3 * kMiB, size_t{5000}, 9 * kMiB, kMiB}) {
    char* p = static_cast<char*>(arena->allocate(bytes));
    fill(p, bytes, blocks.size());
    blocks.emplace_back(p, bytes);
  }
  arena->deallocate(blocks[1].first); // a hole
  blocks.erase(blocks.begin() + 1);
  const size_t offset = static_cast<size_t>(blocks[0].first - arena->base());
  CHECK_EQ(peer.data()[offset], blocks[0].first[0]);
  std::memcpy(arena->base(), "control", 8);

  arena->detach();
  arena->detach(); // once is enough
  const auto intact = [&] {
    size_t seed = 0;
    for (const auto& [p, bytes] : blocks) {
      CHECK(filled(p, bytes, seed));
      seed += seed == 0 ? 2 : 1;
    }
  };
  intact();
  std::memset(peer.data() + 2 * kMiB, 0x77, peer.size() - 2 * kMiB);
  intact();
  // Nor does the peer see what is written here.
  blocks[0].first[0] = 0x12;
  CHECK_EQ(peer.data()[offset], 0x77);
  // The control part stays shared: it carries the reason.
  CHECK_EQ(std::string(peer.data()), std::string("control"));
  std::memcpy(peer.data(), "answer", 7);
  CHECK_EQ(std::string(arena->base()), std::string("answer"));

  CHECK(!arena->locate(blocks[0].first, 1));
  char* p = static_cast<char*>(arena->allocate(12 * kMiB));
  fill(p, 12 * kMiB, 9);
  CHECK(filled(p, 12 * kMiB, 9));
  arena->deallocate(p);
  for (const auto& block : blocks) {
    arena->deallocate(block.first);
  }
  CHECK_EQ(arena->used_bytes(), size_t{0});
}

// Threads add one to elements of their own on every page all the time.
TEST(arena_detach_loses_no_write) {
  constexpr size_t kBytes = 24 * kMiB;
  constexpr size_t kThreads = 2;
  constexpr size_t kStride = 512; // of one thread's elements
  for (int round = 0; round < (kSanitized ? 1 : 4); ++round) {
    const auto arena = Arena::create(4096, 64 * kMiB);
    Mapping peer(arena->fd(), arena->size());
    auto* p = static_cast<char*>(arena->allocate(kBytes));
    std::memset(p, 0, kBytes);
    std::atomic<bool> stop{false};
    std::atomic<int> ready{0};
    std::vector<uint64_t> added(kThreads);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        do {
          for (size_t i = t * 8; i < kBytes; i += kStride) {
            volatile auto* element = reinterpret_cast<uint64_t*>(p + i);
            *element = *element + 1;
          }
          ready += ++added[t] == 1 ? 1 : 0;
        } while (!stop.load());
      });
    }
    while (ready < static_cast<int>(kThreads)) {
      std::this_thread::yield();
    }
    arena->detach();
    std::memset(peer.data() + arena->heap_begin(), 0x55, kBytes);
    stop = true;
    size_t wrong = 0;
    for (size_t t = 0; t < kThreads; ++t) {
      threads[t].join();
      for (size_t i = t * 8; i < kBytes; i += kStride) {
        wrong += *reinterpret_cast<uint64_t*>(p + i) != added[t] ? 1 : 0;
      }
    }
    CHECK_EQ(wrong, size_t{0});
    arena->deallocate(p);
  }
}

TEST(arena_is_usable_while_it_is_detached) {
  const auto arena = Arena::create(4096, 64 * kMiB);
  const Mapping peer(arena->fd(), arena->size());
  auto* p = static_cast<char*>(arena->allocate(20 * kMiB));
  fill(p, 20 * kMiB, 1);
  std::vector<char*> more;
  size_t calls = 0;
  arena->detach([&] {
    ++calls;
    CHECK(!arena->locate(p, 1)); // nobody is sent here any more
    CHECK(arena->used_bytes() >= 20 * kMiB);
    if (calls <= 9) {
      char* q = static_cast<char*>(arena->allocate(3 * kMiB));
      fill(q, 3 * kMiB, calls);
      more.push_back(q);
      if (calls % 3 == 0) {
        arena->deallocate(more.front());
        more.erase(more.begin());
      }
    }
    return false;
  });
  CHECK_EQ(more.size(), size_t{6}); // calls 4 to 9
  std::memset(peer.data() + 2 * kMiB, 0x66, peer.size() - 2 * kMiB);
  CHECK(filled(p, 20 * kMiB, 1));
  for (size_t i = 0; i < more.size(); ++i) {
    CHECK(filled(more[i], 3 * kMiB, 4 + i));
    arena->deallocate(more[i]);
  }
  arena->deallocate(p);
}

TEST(arena_that_nobody_else_writes_to_stays) {
  const auto arena = Arena::create(4096, 64 * kMiB);
  const Mapping peer(arena->fd(), arena->size());
  auto* p = static_cast<char*>(arena->allocate(10 * kMiB));
  fill(p, 10 * kMiB, 1);
  int looks = 0;
  arena->detach([&] { return ++looks > 2; }); // after two windows
  CHECK(filled(p, 10 * kMiB, 1));
  p[0] = 5; // private
  p[9 * kMiB] = 6; // still in the file
  CHECK(peer.data()[arena->heap_begin()] != 5);
  CHECK_EQ(peer.data()[arena->heap_begin() + 9 * kMiB], 6);
  CHECK(!arena->locate(p, 1));
  auto* q = static_cast<char*>(arena->allocate(40 * kMiB)); // commits
  fill(q, 40 * kMiB, 2);
  CHECK(filled(q, 40 * kMiB, 2));
  CHECK_EQ(p[1], pattern(1, 1));
  arena->deallocate(q);
  arena->deallocate(p);
}

TEST(arena_detach_keeps_pages_for_the_peers) {
  const auto arena = Arena::create(4096, 64 * kMiB);
  const Mapping peer(arena->fd(), arena->size());
  auto* p = static_cast<char*>(arena->allocate(20 * kMiB));
  fill(p, 20 * kMiB, 1);
  const size_t begin = arena->heap_begin();
  const std::vector<Arena::Pages> keep{
      {begin + 4096, begin + 3 * 4096},
      {begin + 3 * kMiB, begin + 9 * kMiB},
      {begin + 10 * kMiB, begin + 20 * kMiB}};
  for (const Arena::Pages& pages : keep) {
    CHECK(arena->copy_on_write(pages));
  }
  p[5 * kMiB] = 0x11; // private at once
  arena->detach([] { return false; }, keep);
  for (size_t i = 0; i < 20 * kMiB; i += 64) {
    const bool kept = std::any_of(keep.begin(), keep.end(), [&](auto pages) {
      return begin + i >= pages.first && begin + i < pages.second;
    });
    const char expected = kept ? pattern(1, i) : char{0}; // given back
    if (!CHECK_EQ(peer.data()[begin + i], expected) ||
        !CHECK_EQ(p[i], i == 5 * kMiB ? char{0x11} : pattern(1, i))) {
      break;
    }
  }
  arena->deallocate(p);
}

TEST(memory_pages_are_owned_by_touching_too) {
  constexpr size_t kBytes = 8 * kMiB;
  for (const auto own :
       {+[](char* p) { CHECK(own_pages(p, kBytes)); },
        +[](char* p) { touch_pages(p, kBytes); }}) {
    const Fd file = create_memory_file("fusedpg-test", kBytes);
    Mapping mine(file.get(), kBytes);
    const Mapping peer(file.get(), kBytes);
    fill(peer.data(), kBytes, 3);
    CHECK(mine.replace(0, kBytes, file.get()));
    CHECK(filled(mine.data(), kBytes, 3));
    peer.data()[70000] = 9;
    CHECK_EQ(mine.data()[70000], 9); // not yet
    peer.data()[70000] = pattern(3, 70000);
    own(mine.data());
    std::memset(peer.data(), 1, kBytes);
    CHECK(filled(mine.data(), kBytes, 3));
  }
}

TEST(arena_detach_of_an_empty_arena) {
  for (size_t heap : {size_t{0}, 4 * kMiB}) {
    const auto arena = Arena::create(1, heap);
    arena->detach();
    if (heap != 0) {
      char* p = static_cast<char*>(arena->allocate(heap));
      fill(p, heap, 3);
      CHECK(filled(p, heap, 3));
      arena->deallocate(p);
    }
  }
}

TEST(arena_is_nothing_to_a_forked_child) {
  if (kOnlyThreads) {
    return; // its runtime has memory there in the child
  }
  auto arena = Arena::create(1, 4 * kMiB);
  char* p = static_cast<char*>(arena->allocate(5000));
  fill(p, 5000, 4);
  char* const base = arena->base();
  const size_t size = arena->size();
  const pid_t child = fork();
  if (child == 0) {
    // Its addresses are free, so that something else may come to lie there,
    // which must survive the arena's end.
    void* own = mmap(
        base,
        size,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
        -1,
        0);
    if (own != base) {
      _exit(2);
    }
    std::memset(own, 0x21, size);
    arena->detach();
    arena->deallocate(p);
    arena.reset();
    bool good = true;
    for (size_t i = 0; i < size; i += 512) {
      good = good && base[i] == 0x21;
    }
    _exit(good ? 0 : 3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK(filled(p, 5000, 4));
  CHECK(arena->locate(p, 5000).has_value());
  arena->deallocate(p);
}
