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
      lock.unlock();
      fn();
      fn = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0; // threads in wait_for
  size_t live_ = 0; // threads
};

} // namespace

void complete_elsewhere(std::function<void()> fn) {
  // Never destroyed: a detached thread may look at it while the process ends.
  static Completer* completer = new Completer();
  completer->add(std::move(fn));
}

} // namespace fusedpg
