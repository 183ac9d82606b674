#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace fusedpg::fake {

// Becomes done once.
class Marker {
 public:
  void complete() {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  bool done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

// A thread that executes what is pushed, in order. The destructor waits for
// everything queued.
class Fifo {
 public:
  using Work = std::function<void()>;

  Fifo() : thread_([this] { serve(); }) {}
  Fifo(const Fifo&) = delete;
  ~Fifo() {
    close();
    thread_.join();
  }

  void push(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }
  // No more comes; the thread ends after what is queued.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_one();
  }
  // The destructor would not wait.
  bool finished() const {
    return finished_;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) {
        break;
      }
      Work work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      work = nullptr; // what it holds is not freed under the lock
      lock.lock();
    }
    finished_ = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool closed_ = false;
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

} // namespace fusedpg::fake
