#pragma once

#include <mutex>
#include <thread>

#include "base/deadline.hpp"

namespace fusedpg {

// Takes a lock that somebody who hangs may hold; false when time is up.
inline bool lock_within(
    std::unique_lock<std::mutex>& lock,
    const Deadline& deadline) {
  while (!lock.try_lock()) {
    if (deadline.expired()) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

} // namespace fusedpg
