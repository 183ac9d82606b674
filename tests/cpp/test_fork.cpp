// What a forked child has of its parent: no descriptors, no locks, nothing that
// belongs to the parent's threads.
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/fork.hpp"
#include "check.hpp"

namespace fusedpg::test {
namespace {

std::set<int> open_descriptors() {
  std::set<int> all;
  DIR* dir = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(dir)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != dirfd(dir)) {
      all.insert(fd);
    }
  }
  closedir(dir);
  return all;
}

Fd null_device() {
  return Fd::opened([] { return open("/dev/null", O_RDONLY | O_CLOEXEC); });
}

// The exit status of a child that does this.
template <typename Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20); // ends one that hangs
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Counter {
  std::mutex mutex;
  int count = 0;
};
PerProcess<Counter> counter;

} // namespace

TEST(fork_closes_descriptors) {
  Fd first = null_device();
  std::vector<Fd> several;
  for (int i = 0; i < 5; ++i) {
    several.push_back(null_device()); // they move as it grows
  }
  several.erase(several.begin() + 1);
  Fd moved = std::move(first);
  first = null_device();
  first = Fd();
  const int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int status = in_child([&] {
    bool right = fcntl(other, F_GETFD) >= 0 && !moved;
    const int before = moved.get();
    for (const Fd& one : several) {
      right = right && !one;
    }
    const std::set<int> open_now = open_descriptors();
    // A new one may get a number that the parent's had.
    Fd fresh = null_device();
    right = right && fresh && before == -1 && open_now.count(other) == 1;
    several.clear();
    return right && fcntl(fresh.get(), F_GETFD) >= 0 ? 0 : 1;
  });
  CHECK_EQ(status, 0);
  CHECK(moved && fcntl(moved.get(), F_GETFD) >= 0);
  close(other);
}

TEST(fork_begins_anew) {
  if (kOnlyThreads) {
    return;
  }
  Counter& here = counter.get();
  CHECK(&counter.get() == &here);
  here.count = 7;
  const Origin origin;
  int deleted = 0;
  struct Told {
    int& count;
    ~Told() {
      ++count;
    }
  };
  const std::lock_guard<std::mutex> held(here.mutex);
  const int status = in_child([&] {
    Counter& fresh = counter.get();
    const bool free = fresh.mutex.try_lock();
    bool raised = false;
    try {
      origin.check_operation();
    } catch (const Error& error) {
      raised = error.kind() == ErrorKind::kInvalid;
    }
    const bool anew = &fresh != &here && fresh.count == 0 && free;
    return anew && origin.forked() && raised && !Origin().forked() ? 0 : 1;
  });
  CHECK_EQ(status, 0);
  CHECK(!origin.forked());
  CHECK(&counter.get() == &here);
  {
    std::unique_ptr<Told, DeleteAtOrigin> one(new Told{deleted});
    CHECK_EQ(
        in_child([&] {
          one.reset();
          return deleted;
        }),
        0);
  }
  CHECK_EQ(deleted, 1);
}

// Threads that open and close descriptors all the time: none is left in a child,
// whenever it was forked.
TEST(fork_beside_threads) {
  if (kOnlyThreads) {
    return;
  }
  const std::set<int> before = open_descriptors();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      std::vector<Fd> some;
      while (!stop) {
        some.push_back(Fd::opened([] {
          return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        }));
        Fd other = std::move(some.front());
        some.front() = null_device();
        if (some.size() > 4) {
          some.clear();
        }
        counter.get();
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    const int status =
        in_child([&] { return open_descriptors() == before ? 0 : 1; });
    CHECK_EQ(status, 0);
    if (status != 0) {
      break;
    }
  }
  stop = true;
  for (std::thread& one : threads) {
    one.join();
  }
}

} // namespace fusedpg::test
