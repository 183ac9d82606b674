#include "host/executor.hpp"

#include <pthread.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

// A wait that follows a submission so soon leaves nothing to overlap. While
// that is so the progress thread leaves operations alone for kProgressPatience, which
// is what the first one is late by that nobody waits for.
constexpr std::chrono::microseconds kSoon{200};
constexpr std::chrono::microseconds kProgressPatience{400};

} // namespace

Executor::Executor() : patience_(kProgressPatience) {}

Executor::~Executor() {
  stop();
}

void Executor::check_open() const {
  if (stop_) {
    fail(ErrorKind::kAborted, "fused: this group was shut down");
  }
}

void Executor::check_not_inside() const {
  if (runs_here()) {
    fail(
        ErrorKind::kSystem,
        "fused: a signal handler waits for a group while an operation of that "
        "group is under way on the same thread; have the handler set a flag, "
        "and "
        "act on it after the operation");
  }
}

Executor::Item Executor::item(Operation operation, uint64_t ticket) {
  return {std::move(operation), ++positions_, ticket, Clock::now()};
}

uint64_t Executor::submit(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  check_open();
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { progress(); });
  }
  const uint64_t ticket = ++tickets_;
  queue_.push_back(item(std::move(operation), ticket));
  // Unless it sleeps for a moment, after which it looks by itself.
  if (asleep_ || patience_ == Clock::duration::zero()) {
    wake();
  }
  return ticket;
}

void Executor::run(FunctionRef<void(uint64_t)> operation) {
  Lock lock(mutex_);
  if (!idle()) {
    check_not_inside();
    check_open(); // before a ticket is taken
  }
  run_in_turn(item(operation, ++tickets_), lock);
}

Executor::Turn::Turn(Executor& executor) {
  const std::lock_guard<std::mutex> lock(executor.mutex_);
  if (executor.idle()) {
    executor_ = &executor;
    ticket_ = ++executor.tickets_;
    position_ = ++executor.positions_;
    executor.begin();
  }
}

Executor::Turn::~Turn() {
  if (executor_ != nullptr) {
    const std::lock_guard<std::mutex> lock(executor_->mutex_);
    executor_->end(position_, ticket_);
    executor_->wake_for_rest();
  }
}

void Executor::run_unnumbered(FunctionRef<void()> fn) {
  Lock lock(mutex_);
  run_in_turn(item([fn](uint64_t) { fn(); }, 0), lock);
}

void Executor::finish(uint64_t ticket) {
  origin_.check_operation();
  Lock lock(mutex_);
  if (finished_tickets_ >= ticket) {
    return;
  }
  check_not_inside();
  const auto it =
      std::find_if(queue_.begin(), queue_.end(), [&](const Item& i) {
        return i.ticket == ticket;
      });
  if (it != queue_.end()) {
    learn(it->since);
    finish_position(it->position, lock);
    return;
  }
  learn(running_since_);
  watch(lock, [&] { return finished_tickets_ >= ticket; });
}

void Executor::wake_now() {
  std::lock_guard<std::mutex> lock(mutex_);
  urgent_ = positions_;
  if (!queue_.empty()) {
    wake();
  }
}

bool Executor::drain(std::chrono::milliseconds timeout) {
  wake_now();
  Lock lock(mutex_);
  ++watchers_;
  const bool done = changed_.wait_for(lock, timeout, [&] { return idle(); });
  --watchers_;
  return done;
}

uint64_t Executor::tickets() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return tickets_;
}

void Executor::stop() {
  {
    Lock lock(mutex_);
    stop_ = true;
    wake();
    // A caller may be executing an operation itself.
    watch(lock, [&] { return idle(); });
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

// --- in turn -----------------------------------------------------------------

void Executor::begin() {
  busy_ = true;
  runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

void Executor::end(uint64_t position, uint64_t ticket) {
  runner_.store({}, std::memory_order_relaxed);
  busy_ = false;
  finished_ = position;
  finished_tickets_ = std::max(finished_tickets_, ticket);
  if (watchers_ != 0) {
    changed_.notify_all();
  }
}

void Executor::execute(Item item, Lock& lock) {
  begin();
  running_since_ = item.since;
  lock.unlock();
  item.run(item.ticket);
  item.run = nullptr; // what it captured goes before the next one starts
  lock.lock();
  end(item.position, item.ticket);
}

void Executor::execute_next(Lock& lock) {
  Item next = std::move(queue_.front());
  queue_.pop_front();
  execute(std::move(next), lock);
}

void Executor::run_in_turn(Item item, Lock& lock) {
  if (idle()) {
    execute(std::move(item), lock);
    wake_for_rest();
    return;
  }
  const uint64_t position = item.position;
  queue_.push_back(std::move(item));
  finish_position(position, lock);
}

void Executor::finish_position(uint64_t position, Lock& lock) {
  while (finished_ < position) {
    if (busy_) {
      watch(lock, [&] { return finished_ >= position || !busy_; });
    } else {
      execute_next(lock); // the queue holds it
    }
  }
  wake_for_rest();
}

// The progress thread takes over the operations that were queued meanwhile.
void Executor::wake_for_rest() {
  if (!queue_.empty()) {
    wake();
  }
}

template <typename Condition>
void Executor::watch(Lock& lock, Condition condition) {
  ++watchers_;
  if (!has_wait_hook()) {
    changed_.wait(lock, condition);
  } else {
    while (!changed_.wait_for(lock, WaitHook::kInterval, condition)) {
      lock.unlock();
      while_waiting();
      lock.lock();
    }
  }
  --watchers_;
}

// Whether the progress thread is needed shows in how soon waits come.
void Executor::learn(Clock::time_point submitted) {
  const bool soon = Clock::now() - submitted < kSoon;
  patience_ =
      soon ? Clock::duration(kProgressPatience) : Clock::duration::zero();
}

// --- the progress thread -----------------------------------------------------

void Executor::wake() {
  asleep_ = false;
  wake_.notify_one();
}

// When the thread is to begin with what is queued.
Clock::time_point Executor::due() const {
  const Item& first = queue_.front();
  return stop_ || first.position <= urgent_ ? Clock::time_point::min()
                                            : first.since + patience_;
}

void Executor::progress() {
  pthread_setname_np(pthread_self(), "fusedpg");
  Lock lock(mutex_);
  while (true) {
    if (queue_.empty() && stop_) {
      return;
    }
    if (busy_) {
      watch(lock, [&] { return !busy_; });
      continue;
    }
    if (!queue_.empty()) {
      const auto when = due();
      if (Clock::now() >= when) {
        execute_next(lock);
      } else {
        wake_.wait_until(lock, when);
      }
      continue;
    }
    // While submissions go on it looks by itself now and then, which spares
    // them waking it.
    const uint64_t seen = positions_;
    wake_.wait_for(lock, kProgressPatience);
    if (positions_ == seen && !stop_) {
      asleep_ = true;
      wake_.wait(lock, [&] { return !asleep_; });
    }
  }
}

} // namespace fusedpg
