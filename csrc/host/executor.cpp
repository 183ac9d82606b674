#include "host/executor.hpp"

#include <pthread.h>

#include "base/error.hpp"

namespace fusedpg {

Executor::~Executor() {
  stop();
}

void Executor::ensure_thread() {
  if (stop_) {
    fail(ErrorKind::kAborted, "fused: this group was shut down");
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { progress(); });
  }
}

void Executor::enqueue(std::function<void()> fn) {
  ensure_thread();
  queue_.push_back(std::move(fn));
  wake_.notify_one();
}

uint64_t Executor::submit(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  ensure_thread();
  const uint64_t ticket = ++tickets_;
  enqueue([operation = std::move(operation), ticket] { operation(ticket); });
  return ticket;
}

void Executor::run_here(
    const std::function<void()>& fn,
    std::unique_lock<std::mutex>& lock) {
  if (idle()) {
    busy_ = true;
    lock.unlock();
    fn();
    lock.lock();
    busy_ = false;
    if (queue_.empty()) {
      idle_changed_.notify_all();
    } else {
      wake_.notify_one();
    }
    return;
  }
  bool done = false;
  std::condition_variable finished;
  enqueue([&] {
    fn();
    std::lock_guard<std::mutex> done_lock(mutex_);
    done = true;
    finished.notify_one();
  });
  finished.wait(lock, [&] { return done; });
}

void Executor::run(const Operation& operation) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!idle()) {
    ensure_thread(); // may throw: before a ticket is taken
  }
  const uint64_t ticket = ++tickets_;
  run_here([&] { operation(ticket); }, lock);
}

void Executor::run_unnumbered(const std::function<void()>& fn) {
  std::unique_lock<std::mutex> lock(mutex_);
  run_here(fn, lock);
}

bool Executor::drain(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_changed_.wait_for(lock, timeout, [&] { return idle(); });
}

uint64_t Executor::tickets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return tickets_;
}

void Executor::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  // A caller may be executing an operation itself.
  std::unique_lock<std::mutex> lock(mutex_);
  idle_changed_.wait(lock, [&] { return !busy_; });
}

void Executor::progress() {
  pthread_setname_np(pthread_self(), "fusedpg");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return (!queue_.empty() && !busy_) || stop_; });
    if (queue_.empty()) {
      return; // stopped, and nothing left to run
    }
    if (busy_) {
      // Stopping while a caller runs an operation: it will wake this thread.
      wake_.wait(lock, [&] { return !busy_; });
      continue;
    }
    auto fn = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    fn();
    fn = nullptr; // what it captured goes before the next operation starts
    lock.lock();
    busy_ = false;
    if (queue_.empty()) {
      idle_changed_.notify_all();
    }
  }
}

} // namespace fusedpg
