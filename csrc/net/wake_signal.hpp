#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace fusedpg {

// Wakes a thread that polls, from any other.
class WakeSignal {
 public:
  WakeSignal()
      : fd_(Fd::opened([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
    if (!fd_) {
      fail_errno("fused: eventfd");
    }
  }
  int fd() const {
    return fd_.get();
  }
  void set() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(fd(), &one, sizeof one);
    // After the write: a reset() in between reads nothing, and what it leaves
    // ends the next poll.
    set_.store(true, std::memory_order_release);
  }
  // A system call only if there is something to read: polling threads call this
  // all the time.
  void reset() const {
    if (set_.load(std::memory_order_acquire) && set_.exchange(false)) {
      uint64_t set = 0;
      [[maybe_unused]] const auto got = read(fd(), &set, sizeof set);
    }
  }

 private:
  Fd fd_;
  mutable std::atomic<bool> set_{false};
};

} // namespace fusedpg
