#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/fork.hpp"
#include "c10d/errors.hpp"
#include "c10d/flight_recorder.hpp"
#include "c10d/forwarding.hpp"
#include "c10d/interruptible.hpp"
#include "collectives/engine.hpp"

namespace fusedpg {

struct CommonClient;

// Name and profiler facts of one call.
struct CallInfo {
  c10d::OpType type;
  const char* title; // "fused:all_reduce"
  std::chrono::milliseconds timeout;
  bool async_op;
  uint64_t async_call; // as in OpDescriptor
};

// pybind11 makes a negative number of timedelta.max, which means: ever.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest =
      std::chrono::hours(24 * 365 * 10);
  return timeout.count() < 0 ? kLongest : std::min(timeout, kLongest);
}

// How many errors of operations this thread has been given. All ranks of a group
// get those alike; an error that raises it by none is known here alone.
uint64_t& shared_errors();

// The parts of a group that its routes share. Thread-safe.
class Group : public GroupBase {
 public:
  Group(
      int rank,
      int size,
      const Settings& settings,
      std::chrono::milliseconds timeout,
      Dialect dialect);

  const Dialect dialect;
  c10::intrusive_ptr<c10d::Store> store; // of this group alone, once it has met
  std::shared_ptr<CommonClient> client; // of `store`, between hosts
  std::atomic<std::chrono::milliseconds> timeout;
  const std::shared_ptr<Interrupter> interrupter; // with every WorkFused
  const std::shared_ptr<RecordedGroup> recorded; // with the flight recorder
  std::atomic<int> refusals{0}; // that peers have not heard of yet

  // A synchronous operation on CPU tensors while it lives, as the profiler and the
  // flight recorder see it.
  class Watched {
   public:
    Watched(
        Group& group,
        const CallInfo& info,
        const Tensors& inputs,
        const Tensors& outputs);
    void start() {
      flight_.start(number_);
    }
    // Within the handler of what it has thrown.
    void failed();
    void end() {
      flight_.end(number_, !error_);
    }
    // Throws what it has thrown, in torch's types.
    void raise() const;

   private:
    const Group& group_;
    FlightRecorder& flight_ = FlightRecorder::get();
    const uint64_t number_;
    at::RecordFunction profiled_{at::RecordScope::USER_SCOPE};
    std::exception_ptr error_;
  };
  // An asynchronous one: takes a ticket, and is executed in its turn. `outputs`
  // become the result of the Work, and its future's value unless `lists` are
  // given for that.
  WorkPtr enqueue(
      const CallInfo& info,
      const Tensors& inputs,
      const Tensors& outputs,
      std::function<void(uint64_t)> operation,
      const TensorLists& lists);
  // --- works between startCoalescing and endCoalescing on this thread
  // ---------
  void start_coalescing();
  WorkPtr end_coalescing();
  bool is_coalescing() const;
  // Returns `work`, after noting it if this thread is coalescing.
  WorkPtr remember(WorkPtr work);

  // The title for profilers, if there is one: "gloo:all_reduce" if the group serves
  // "gloo".
  std::string shown(const char* title) const;

  // --- checks that raise in the caller ---------------------------------------
  void check_open(const char* op) const;
  void check_root(const char* op, int64_t root) const;
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds given) const {
    return given.count() == 0 || given == c10d::kUnsetTimeout ? timeout.load()
                                                              : bounded(given);
  }

  // The first takes a timeout from c10d's options, the second the group's own.
  template <typename CallOptions>
  CallInfo info(c10d::OpType type, const char* title, const CallOptions& opts)
      const {
    return {type, title, timeout_or(opts.timeout), opts.asyncOp, async_call()};
  }
  CallInfo info(c10d::OpType type, const char* title, bool async_op) const {
    return {type, title, timeout.load(), async_op, async_call()};
  }

  // Marks what this thread does on this group from now on as a part of an
  // asynchronous call of a fused function; see OpDescriptor. Another group's call
  // ends that.
  void set_async_call(uint64_t number) const;
  uint64_t async_call() const;

  // Whether this is a forked child, which has neither the threads nor the
  // shared memory of the group.
  bool forked() const {
    return origin_.forked();
  }
  bool close() { // false if it was closed before
    return !closed_.exchange(true);
  }
  bool closed() const {
    return closed_.load(std::memory_order_acquire);
  }

 private:
  const Origin origin_{};
  std::atomic<bool> closed_{false};
};

// Throws ValueError unless as many are there as expected.
void check_count(
    const char* op,
    const char* what,
    size_t found,
    size_t expected);

} // namespace fusedpg
