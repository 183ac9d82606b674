#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace fusedpg {

// Wakes a thread that polls, from any other.
class WakeSignal {
 public:
  WakeSignal() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
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
  }
  void reset() const {
    uint64_t set = 0;
    [[maybe_unused]] const auto got = read(fd(), &set, sizeof set);
  }

 private:
  Fd fd_;
};

} // namespace fusedpg
