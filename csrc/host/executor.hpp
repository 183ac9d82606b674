#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "base/deadline.hpp"
#include "base/fork.hpp"
#include "base/function_ref.hpp"

namespace fusedpg {

// Runs the operations of one group one after another in the order in which they
// took their tickets, whoever called. They run on these threads:
//
// - a synchronous call runs its own on the calling thread, after what is
// queued;
// - a thread that waits for a queued operation runs the queue up to it;
// - the progress thread runs what nobody has come for in time. Waking it costs
//   more than a small collective, so while waits keep following submissions at
//   once it is not woken, but looks by itself; else it is woken at once.
//
// Thread-safe. Operations must not throw.
class Executor {
 public:
  // The argument is the operation's ticket: 1, 2, 3, ...
  using Operation = std::function<void(uint64_t)>;

  Executor();
  ~Executor();

  // Queues the operation; returns its ticket. Throws Error(kAborted) after
  // stop(), as run() does when it would have to queue.
  uint64_t submit(Operation operation);

  // Runs the operation before returning.
  void run(FunctionRef<void(uint64_t)> operation);

  // The turn of a synchronous operation before which nothing is queued or runs:
  // while it lives, the operation of this ticket is what its thread executes.
  // If something is before it, there is no turn, and the caller takes run().
  class Turn {
   public:
    explicit Turn(Executor& executor);
    ~Turn();
    Turn(const Turn&) = delete;
    explicit operator bool() const {
      return executor_ != nullptr;
    }
    uint64_t ticket() const {
      return ticket_;
    }

   private:
    Executor* executor_ = nullptr;
    uint64_t ticket_ = 0;
    uint64_t position_ = 0;
  };

  // Runs `fn` in turn, but takes no ticket; also after stop().
  void run_unnumbered(FunctionRef<void()> fn);

  // Returns when the submitted operation of this ticket has ended, having run
  // it and those before it here if they had not begun. In a forked child, which
  // cannot run them, throws Error(kInvalid).
  void finish(uint64_t ticket);

  // Has the progress thread begin now, for a thread that waits and cannot help.
  void wake_now();

  // Waits until nothing is queued or running, at most so long. Returns whether
  // that is so.
  bool drain(std::chrono::milliseconds timeout);

  // Tickets given out so far.
  uint64_t tickets() const;

  // Runs what is queued and ends the progress thread.
  void stop();

  // Whether this thread executes an operation: one called from below it, as from
  // a signal handler, would wait for itself.
  bool runs_here() const {
    return runner_.load(std::memory_order_relaxed) ==
        std::this_thread::get_id();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Item {
    Operation run;
    uint64_t position; // among all items, from 1 on
    uint64_t ticket; // 0: none
    Clock::time_point since; // when it was given
  };

  void check_open() const;
  void check_not_inside() const;
  Item item(Operation operation, uint64_t ticket);
  void begin();
  void end(uint64_t position, uint64_t ticket);
  void execute(Item item, Lock& lock);
  void execute_next(Lock& lock);
  void run_in_turn(Item item, Lock& lock);
  void finish_position(uint64_t position, Lock& lock);
  template <typename Condition>
  void watch(Lock& lock, Condition condition);
  void learn(Clock::time_point submitted);
  void wake();
  void wake_for_rest();
  Clock::time_point due() const;
  void progress();
  bool idle() const {
    return !busy_ && queue_.empty();
  }

  const Origin origin_{};
  mutable std::mutex mutex_;
  std::condition_variable wake_; // of the progress thread
  std::condition_variable changed_; // an item has ended
  int watchers_ = 0; // threads that wait for it
  std::deque<Item> queue_;
  std::thread thread_;
  uint64_t tickets_ = 0;
  uint64_t positions_ = 0; // given
  // Items end in the order of their positions.
  uint64_t finished_ = 0;
  uint64_t finished_tickets_ = 0;
  uint64_t urgent_ = 0; // positions up to this one are to begin at once
  Clock::time_point running_since_; // when what runs was given
  // How long the progress thread leaves an operation to those who wait.
  Clock::duration patience_;
  bool asleep_ = false; // the progress thread, until it is woken
  bool busy_ = false;
  std::atomic<std::thread::id>
      runner_{}; // the thread that executes an operation
  bool stop_ = false;
};

} // namespace fusedpg
