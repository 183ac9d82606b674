#include "c10d/completer.hpp"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/fork.hpp"

namespace fusedpg {
namespace {

constexpr auto kIdle = std::chrono::milliseconds(500);
// Callbacks that block, as for a lock or another future, have a thread each, up to
// so many. Those that wait for callbacks in the queue would wait for ever then: where
// none has ended for a while, one more thread is started at a time.
constexpr size_t kMostThreads = 64;
constexpr auto kStuck = std::chrono::milliseconds(250);

class Completer {
 public:
  void add(std::function<void()> fn) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (finished_) {
      lock.unlock();
      fn();
      return;
    }
    queue_.push_back(std::move(fn));
    if (queue_.size() > idle_) {
      if (live_ >= kMostThreads && looks_) {
        return; // one of them will come to it
      }
      try {
        const bool looks = live_ >= kMostThreads;
        std::thread([this, looks] { looks ? look() : work(); }).detach();
        ++live_;
        looks_ = looks_ || looks;
      } catch (const std::system_error&) {
        // No thread to be had: one that is busy now will come to it, and where
        // there is none a future must complete all the same.
        if (live_ == 0) {
          auto here = std::move(queue_.back());
          queue_.pop_back();
          lock.unlock();
          here();
        }
      }
    } else {
      wake_.notify_one();
    }
  }

  void finish(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait_for(lock, timeout, [&] { return queue_.empty() && busy_ == 0; });
    finished_ = true;
  }

 private:
  // The thread beyond the most: works once nothing else goes on, and leaves its
  // place to another one.
  void look() {
    std::unique_lock<std::mutex> lock(mutex_);
    bool stuck = false;
    while (!stuck && !queue_.empty()) {
      const uint64_t before = ended_;
      stuck = !done_.wait_for(lock, kStuck, [&] { return ended_ != before; });
    }
    if (queue_.empty()) {
      looks_ = false;
      --live_;
      return;
    }
    try {
      std::thread([this] { look(); }).detach();
      ++live_;
    } catch (const std::system_error&) {
      looks_ = false;
    }
    lock.unlock();
    work();
  }

  void work() {
    pthread_setname_np(pthread_self(), "fusedpg-future");
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      const bool found =
          wake_.wait_for(lock, kIdle, [&] { return !queue_.empty(); });
      --idle_;
      if (!found) {
        --live_;
        return;
      }
      auto fn = std::move(queue_.front());
      queue_.pop_front();
      ++busy_;
      lock.unlock();
      fn();
      fn = nullptr;
      lock.lock();
      --busy_;
      ++ended_;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_; // one has ended
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0; // threads in wait_for
  size_t live_ = 0; // threads
  size_t busy_ = 0; // threads that run one
  uint64_t ended_ = 0; // that have been run
  bool looks_ = false; // a thread is in look()
  bool finished_ = false;
};

PerProcess<Completer> completer;

} // namespace

void complete_elsewhere(std::function<void()> fn) {
  completer.get().add(std::move(fn));
}

void finish_completions(std::chrono::milliseconds timeout) {
  completer.get().finish(timeout);
}

} // namespace fusedpg
