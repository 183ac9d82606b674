#pragma once

#include <algorithm>
#include <chrono>

namespace fusedpg {

using Clock = std::chrono::steady_clock;

// The moment by which an operation must be done. Every wait takes one.
class Deadline {
 public:
  // Timeouts beyond ten years, such as timedelta.max, mean ten years.
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout),
        at_(Clock::now() +
            std::min<std::chrono::milliseconds>(
                timeout,
                std::chrono::hours(24 * 365 * 10))) {}

  bool expired() const {
    return Clock::now() >= at_;
  }

  std::chrono::nanoseconds remaining() const {
    return std::max<std::chrono::nanoseconds>(
        at_ - Clock::now(), std::chrono::nanoseconds(0));
  }

  // For other libraries: at least 1 ms, since 0 means their default or no limit.
  std::chrono::milliseconds left() const {
    return std::max(
        std::chrono::ceil<std::chrono::milliseconds>(remaining()),
        std::chrono::milliseconds(1));
  }

  std::chrono::milliseconds timeout() const {
    return timeout_;
  }

 private:
  std::chrono::milliseconds timeout_;
  Clock::time_point at_;
};

} // namespace fusedpg
