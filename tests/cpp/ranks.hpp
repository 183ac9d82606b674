#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/options.hpp"
#include "check.hpp"
#include "collectives/shm_engine.hpp"
#include "collectives/way.hpp"
#include "host/bootstrap.hpp"
#include "host/domain.hpp"

// Runs the ranks of a group inside one test: as threads, which sanitizers can
// look into, or as forked processes, which can be killed and stopped.
namespace fusedpg::test {

using std::chrono::milliseconds;

// For operations that should succeed: a test that hangs fails in this time.
constexpr milliseconds kLong{20000};

// The store that ranks meet in, in memory that forked processes share.
class Store : public Rendezvous {
 public:
  Store() {
    void* p = mmap(
        nullptr,
        sizeof(Table),
        PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_ANONYMOUS,
        -1,
        0);
    if (p == MAP_FAILED) {
      fail_errno("mmap");
    }
    table_ = static_cast<Table*>(p);
  }
  Store(const Store&) = delete;
  ~Store() override {
    munmap(table_, sizeof(Table));
  }

  void set(const std::string& key, const std::string& value) override {
    const Lock lock(*table_);
    write(entry(key), value);
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    while (true) {
      {
        const Lock lock(*table_);
        const Entry& found = entry(key);
        if (found.written) {
          return {found.value, found.size};
        }
      }
      if (deadline.expired()) {
        fail(ErrorKind::kTimeout, "no {} in the store", key);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  bool has(const std::string& key) override {
    const Lock lock(*table_);
    return entry(key).written;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const Lock lock(*table_);
    Entry& found = entry(key);
    if (found.written) {
      amount += std::stoll(std::string(found.value, found.size));
    }
    write(found, std::to_string(amount));
    return amount;
  }

  // Kills or stops a child, and returns when it is. It is not hit in the middle
  // of the store, whose lock would then stay taken for all the others.
  void signal(pid_t child, int number) {
    const Lock lock(*table_);
    siginfo_t info;
    if (kill(child, number) != 0 ||
        waitid(P_PID, child, &info, WEXITED | WSTOPPED | WNOWAIT) != 0) {
      fail_errno("signal");
    }
  }

  // Returns when `count` ranks have called it with this name.
  void meet(const std::string& name, int count) {
    if (add(name, 1) == count) {
      set(name + "/all", "");
    }
    get(name + "/all", Deadline(kLong));
  }

 private:
  struct Entry {
    char key[64];
    char value[8192];
    size_t size;
    bool written;
  };
  struct Table {
    std::atomic<uint32_t> locked;
    Entry entries[256];
  };

  struct Lock {
    explicit Lock(Table& table) : locked(table.locked) {
      while (locked.exchange(1, std::memory_order_acquire) != 0) {
        std::this_thread::yield();
      }
    }
    ~Lock() {
      locked.store(0, std::memory_order_release);
    }
    std::atomic<uint32_t>& locked;
  };

  Entry& entry(const std::string& key) {
    for (Entry& e : table_->entries) {
      if (e.key[0] == '\0') {
        std::strncpy(e.key, key.c_str(), sizeof e.key - 1);
        return e;
      }
      if (key == e.key) {
        return e;
      }
    }
    fail(ErrorKind::kSystem, "the test's store is full");
  }

  static void write(Entry& entry, const std::string& value) {
    if (value.size() > sizeof entry.value) {
      fail(ErrorKind::kSystem, "too large for the test's store");
    }
    std::memcpy(entry.value, value.data(), value.size());
    entry.size = value.size();
    entry.written = true;
  }

  Table* table_;
};

using RankBody = std::function<void(int rank, Store& store)>;

inline void run_body(const RankBody& body, int rank, Store& store) {
  try {
    body(rank, store);
  } catch (const std::exception& error) {
    report_failure(
        "rank", rank, std::string("uncaught exception: ") + error.what());
  }
}

inline void on_threads(int size, const RankBody& body) {
  Store store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { run_body(body, rank, store); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Forked ranks. To be made while this process has one thread.
class Processes {
 public:
  Processes(int size, const RankBody& body) : pids_(size), done_(size) {
    for (int rank = 0; rank < size; ++rank) {
      pids_[rank] = fork();
      if (pids_[rank] == 0) {
        alarm(60); // a rank that hangs ends all the same
        run_body(body, rank, store_);
        std::cerr.flush();
        _exit(failure_count() == 0 ? 0 : 1);
      }
    }
  }
  Processes(const Processes&) = delete;
  ~Processes() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (!done_[rank]) {
        kill(pids_[rank], SIGKILL);
        wait(static_cast<int>(rank));
      }
    }
  }

  Store& store() {
    return store_;
  }
  void signal(int rank, int number) {
    store_.signal(pids_[rank], number);
  }
  // waitpid()'s status.
  int wait(int rank) {
    int status = 0;
    waitpid(pids_[rank], &status, 0);
    done_[rank] = true;
    return status;
  }
  // Waits for a rank, whose checks must all have passed.
  void check(int rank) {
    const int status = wait(rank);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      report_failure(
          "rank",
          rank,
          WIFSIGNALED(status)
              ? "ended by signal " + std::to_string(WTERMSIG(status))
              : "failed");
    }
  }
  void check_all() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      check(static_cast<int>(rank));
    }
  }

 private:
  Store store_;
  std::vector<pid_t> pids_;
  std::vector<bool> done_;
};

inline void on_processes(int size, const RankBody& body) {
  Processes processes(size, body);
  processes.check_all();
}

// --- what ranks are made of --------------------------------------------------

inline Settings test_settings(int threads = 1) {
  Settings s{};
  s.arena_bytes = size_t(96) << 20;
  s.threads = threads;
  s.spin_us = -1;
  return s;
}

inline Bootstrap met(int rank, int size, Store& store, const Settings& s) {
  Bootstrap bootstrap(rank, size, s);
  bootstrap.meet(store, Deadline(kLong));
  return bootstrap;
}

// One rank of a domain.
struct Member {
  Member(int rank, int size, Store& store, Settings s = test_settings())
      : bootstrap(met(rank, size, store, s)),
        domain(rank, bootstrap, s, Deadline(kLong)) {}

  Bootstrap bootstrap;
  Domain domain;
};

inline Error as_error(const std::exception& error) {
  return {ErrorKind::kSystem, error.what()};
}

// One rank of a group whose ranks share this machine.
struct Group : GroupBase {
  using Operation = std::function<void(Context&)>;

  Group(int rank, int size, Store& store, const Settings& s = test_settings())
      : GroupBase(rank, size, s, select_kernels(s), as_error),
        bootstrap(met(rank, size, store, s)),
        engine(*this, bootstrap, Deadline(kLong)) {}

  void run(const Operation& op, milliseconds timeout = kLong) {
    execute(op, ++sequence, timeout);
  }
  void execute(const Operation& op, uint64_t ticket, milliseconds timeout) {
    engine.execute(
        [&](Way& way) { op(static_cast<ShmWay&>(way).context()); },
        "fused:test",
        ticket,
        timeout);
  }

  Bootstrap bootstrap;
  ShmEngine engine;
  uint64_t sequence = 0;
};

// Memory for a tensor, in the arena or not. Never aligned to more than 64
// bytes, and with a canary behind it.
class PlacedMemory {
 public:
  PlacedMemory(Domain& domain, size_t bytes, bool in_arena)
      : arena_(in_arena ? domain.arena() : nullptr),
        bytes_(bytes) {
    if (in_arena) {
      data_ = static_cast<char*>(arena_->allocate(bytes + kCanary));
    } else {
      heap_.resize(bytes + kCanary + 64);
      data_ = heap_.data();
      data_ += 64 - reinterpret_cast<uintptr_t>(data_) % 64;
    }
    std::memset(data_, 0x5a, bytes + kCanary);
  }
  PlacedMemory(PlacedMemory&& other) noexcept
      : arena_(std::move(other.arena_)),
        heap_(std::move(other.heap_)),
        data_(other.data_),
        bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  ~PlacedMemory() {
    if (data_ == nullptr) {
      return;
    }
    for (size_t i = 0; i < kCanary; ++i) {
      if (data_[bytes_ + i] != 0x5a) {
        report_failure(__FILE__, __LINE__, "written behind a buffer's end");
        break;
      }
    }
    if (arena_) {
      arena_->deallocate(data_);
    }
  }

  char* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  void assign(const void* from) {
    if (bytes_ != 0) {
      std::memcpy(data_, from, bytes_);
    }
  }
  bool holds(const void* expected) const {
    return bytes_ == 0 || std::memcmp(data_, expected, bytes_) == 0;
  }

 private:
  static constexpr size_t kCanary = 32;
  std::shared_ptr<Arena> arena_;
  std::vector<char> heap_;
  char* data_;
  size_t bytes_;
};

// Runs `fn`, which must throw Error of this kind with all `parts` in its text.
template <typename Fn>
void expect_error(
    ErrorKind kind,
    const std::vector<std::string>& parts,
    Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    const std::string text = error.what();
    bool good = error.kind() == kind && text.rfind("fused: ", 0) == 0;
    for (const std::string& part : parts) {
      good = good && text.find(part) != std::string::npos;
    }
    if (!good) {
      report_failure(
          "expected an error of kind",
          static_cast<int>(kind),
          "got kind " + std::to_string(static_cast<int>(error.kind())) + ": " +
              text);
    }
    return;
  }
  report_failure("expected an error of kind", static_cast<int>(kind), "none");
}

inline size_t open_files() {
  size_t n = 0;
  for (int fd = 0; fd < 4096; ++fd) {
    n += fcntl(fd, F_GETFD) >= 0;
  }
  return n;
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

} // namespace fusedpg::test
