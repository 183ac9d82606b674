#pragma once

#include <algorithm>
#include <chrono>

namespace fusedpg {

using Clock = std::chrono::steady_clock;

// The moment by which an operation must be done. Every wait takes one.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout),
        at_(Clock::now() + timeout) {}

  bool expired() const {
    return Clock::now() >= at_;
  }

  std::chrono::nanoseconds remaining() const {
    return std::max<std::chrono::nanoseconds>(
        at_ - Clock::now(), std::chrono::nanoseconds(0));
  }

  std::chrono::milliseconds timeout() const {
    return timeout_;
  }

 private:
  std::chrono::milliseconds timeout_;
  Clock::time_point at_;
};

} // namespace fusedpg
