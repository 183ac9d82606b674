#include "c10d/completer.hpp"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace fusedpg {
namespace {

constexpr auto kIdle = std::chrono::milliseconds(500);

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
      try {
        std::thread([this] { work(); }).detach();
        ++live_;
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
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_; // for finish()
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0; // threads in wait_for
  size_t live_ = 0; // threads
  size_t busy_ = 0; // threads that run one
  bool finished_ = false;
};

// Never destroyed: a detached thread may look at it while the process ends.
Completer& completer() {
  static auto* one = new Completer();
  return *one;
}

} // namespace

void complete_elsewhere(std::function<void()> fn) {
  completer().add(std::move(fn));
}

void finish_completions(std::chrono::milliseconds timeout) {
  completer().finish(timeout);
}

} // namespace fusedpg
