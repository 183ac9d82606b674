#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace fusedpg {

// Runs the operations of one group one after another in the order in which
// they took their tickets, whoever called: on a progress thread, or on the
// calling thread when nothing is queued or running.
//
// Thread-safe. Operations must not throw.
class Executor {
 public:
  // The argument is the operation's ticket: 1, 2, 3, ...
  using Operation = std::function<void(uint64_t)>;

  Executor() = default;
  ~Executor();

  // Queues the operation; returns its ticket. Throws Error(kAborted) after
  // stop(), as run() does when it would have to queue.
  uint64_t submit(Operation operation);

  // Runs the operation before returning.
  void run(const Operation& operation);

  // Runs `fn` in turn, but takes no ticket.
  void run_unnumbered(const std::function<void()>& fn);

  // Waits until nothing is queued or running, at most so long. Returns whether
  // that is so.
  bool drain(std::chrono::milliseconds timeout);

  // Tickets given out so far.
  uint64_t tickets() const;

  // Runs what is queued and ends the progress thread.
  void stop();

 private:
  void ensure_thread();
  void enqueue(std::function<void()> fn);
  void progress();
  bool idle() const {
    return !busy_ && queue_.empty();
  }
  void run_here(
      const std::function<void()>& fn,
      std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
  uint64_t tickets_ = 0;
  bool busy_ = false;
  bool stop_ = false;
};

} // namespace fusedpg
