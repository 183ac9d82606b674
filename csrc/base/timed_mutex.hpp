#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace fusedpg {

// Like std::timed_mutex, whose pthread_mutex_clocklock ThreadSanitizer of GCC
// 13 and before does not know: it would report what such a lock protects.
class TimedMutex {
 public:
  void lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    freed_.wait(lock, [this] { return !held_; });
    held_ = true;
  }
  bool try_lock() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !std::exchange(held_, true);
  }
  bool try_lock_for(std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!freed_.wait_for(lock, most, [this] { return !held_; })) {
      return false;
    }
    held_ = true;
    return true;
  }
  void unlock() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      held_ = false;
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  bool held_ = false;
};

} // namespace fusedpg
