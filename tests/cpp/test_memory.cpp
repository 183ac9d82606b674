#include "host/memory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host/arena.hpp"
#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr size_t kMiB = size_t(1) << 20;

// Processes that commit at once, where `limit` bytes are to be had; how many
// did not get theirs. Checks that they never take more.
int commit_at_once(size_t limit, size_t bytes, int count) {
  std::vector<int> files; // not Fd, which a child closes
  for (int i = 0; i < count; ++i) {
    files.push_back(dup(create_memory_file("fusedpg-test", bytes).get()));
  }
  const auto taken = [&] {
    size_t sum = 0;
    for (const int file : files) {
      struct stat status{};
      fstat(file, &status);
      sum += static_cast<size_t>(status.st_blocks) * 512;
    }
    return sum;
  };
  int refused = 0;
  {
    Processes ranks(count, [&](int rank, Store& store) {
      store.meet("start", count);
      try {
        commit_range(files[rank], 0, bytes, [&] {
          const size_t now = taken();
          // What is seen is old by the time it is used.
          std::this_thread::sleep_for(milliseconds(20));
          return limit > now ? limit - now : 0;
        });
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kOutOfMemory);
        store.add("refused", 1);
      }
    });
    for (int i = 0; i < count; ++i) {
      ranks.check(i);
    }
    refused = static_cast<int>(ranks.store().add("refused", 0));
  }
  CHECK(taken() <= limit);
  CHECK_EQ(taken(), bytes * static_cast<size_t>(count - refused));
  for (const int file : files) {
    close(file);
  }
  return refused;
}

} // namespace

TEST(memory_is_not_promised_twice) {
  if (kOnlyThreads) {
    return;
  }
  CHECK_EQ(commit_at_once(100 * kMiB, 20 * kMiB, 5), 0); // nobody in vain
  CHECK_EQ(commit_at_once(50 * kMiB, 20 * kMiB, 5), 3);
  CHECK_EQ(commit_at_once(10 * kMiB, 20 * kMiB, 2), 2);
}

TEST(memory_room_waits_for_others_only_so_long) {
  const auto free = [] { return 10 * kMiB; };
  const auto first = std::make_unique<Room>(6 * kMiB, free);
  const Room second(4 * kMiB, free);
  expect_error(
      ErrorKind::kOutOfMemory,
      {"needs 1 MiB", "only 10 MiB are free", "other ranks are taking 10 MiB"},
      [&] { Room(kMiB, free, milliseconds(500)); });
  const auto start = Clock::now();
  expect_error(ErrorKind::kOutOfMemory, {"needs 11 MiB"}, [&] {
    Room(11 * kMiB, free); // never: no wait
  });
  CHECK(seconds_since(start) < 5);
}

// Whose turn it is may be stopped.
TEST(memory_rooms_count_without_a_turn) {
  const auto free = [] { return 10 * kMiB; };
  const Room first(6 * kMiB, free);
  const Fd stopped =
      Fd::opened([] { return ::open("/proc/meminfo", O_RDONLY | O_CLOEXEC); });
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  while (flock(stopped.get(), LOCK_EX | LOCK_NB) != 0 &&
         Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  const Room second(4 * kMiB, free, milliseconds(20));
  expect_error(
      ErrorKind::kOutOfMemory,
      {"needs 1 MiB", "other ranks are taking 10 MiB"},
      [&] { Room(kMiB, free, milliseconds(20)); });
}
