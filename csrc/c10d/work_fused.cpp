#include "c10d/work_fused.hpp"

#include <ATen/core/ivalue.h>

#include "c10d/completer.hpp"
#include "c10d/errors.hpp"
#include "c10d/gil.hpp"
#include "c10d/group.hpp"

namespace fusedpg {
namespace {

constexpr std::chrono::hours kNever{24 * 365};

c10::TypePtr tensors_type() {
  return c10::ListType::create(c10::TensorType::get());
}

void finish_future(
    c10::ivalue::Future& future,
    const std::exception_ptr& error,
    c10::IValue value) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(std::move(value));
  }
}

// Appends the tensors of a list of them, or of a list of lists.
void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
    return;
  }
  for (const c10::IValue& one : value.toListRef()) {
    flatten(one, tensors);
  }
}

} // namespace

WorkFused::WorkFused(
    std::shared_ptr<Interrupter> interrupter,
    int rank,
    c10d::OpType op_type,
    const std::string& title,
    const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> outputs,
    TensorLists lists)
    : Work(rank, op_type, title.empty() ? nullptr : title.c_str(), inputs),
      interrupter_(std::move(interrupter)),
      outputs_(std::move(outputs)),
      lists_(std::move(lists)) {}

c10::IValue WorkFused::value() const {
  return lists_.empty() ? c10::IValue(outputs_) : c10::IValue(lists_);
}

c10::TypePtr WorkFused::type() const {
  return lists_.empty() ? tensors_type()
                        : c10::ListType::create(tensors_type());
}

void WorkFused::complete(std::exception_ptr error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    finish(error);
    future = future_;
  }
  if (future) {
    complete_elsewhere([future, error, value = value()] {
      finish_future(*future, error, value);
    });
  }
}

bool WorkFused::isCompleted() {
  if (Work::isCompleted()) {
    return true;
  }
  const auto messages = messages_.lock();
  return messages && messages->poll() && Work::isCompleted();
}

// In a forked child nothing goes on that its parent has begun.
void WorkFused::check_ended() {
  if (!Work::isCompleted()) {
    translate([&] { origin_.check_operation(); });
  }
}

bool WorkFused::wait(std::chrono::milliseconds timeout) {
  const ReleaseGil release;
  if (origin_.forked()) {
    check_ended();
    return Work::wait(timeout);
  }
  return interruptible(interrupter_.get(), [&] { return await(timeout); });
}

bool WorkFused::await(std::chrono::milliseconds timeout) {
  timeout = bounded(timeout); // kNoTimeout is 0
  // Also where the operation's error is raised.
  struct Settle {
    WorkFused& work;
    ~Settle() {
      work.wait_for_future();
    }
  } settle{*this};
  if (executor_ && !Work::isCompleted()) {
    if (timeout == kNoTimeout) {
      translate([&] { executor_->finish(sequence_); });
    } else {
      executor_->wake_now();
    }
  }
  if (const auto box = messages_.lock(); box && !Work::isCompleted()) {
    const Deadline deadline(timeout == kNoTimeout ? kNever : timeout);
    // Not isCompleted(), which moves messages, too.
    const auto done = [this] { return Work::isCompleted(); };
    translate([&] { box->move_until(done, deadline); });
    if (timeout != kNoTimeout) {
      timeout = deadline.left();
    }
  }
  if (!Work::isCompleted()) {
    // The operation itself has a deadline, so waiting without one ends too.
    const Deadline deadline(timeout == kNoTimeout ? kNever : timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!completed_ && !deadline.expired()) {
      cv_.wait_for(lock, std::min(WaitHook::kInterval, deadline.left()));
      lock.unlock();
      while_waiting();
      lock.lock();
    }
    if (timeout != kNoTimeout) {
      timeout = deadline.left();
    }
  }
  try {
    return Work::wait(timeout);
  } catch (...) {
    if (executor_) { // not a message, of which one rank hears
      ++shared_errors();
    }
    throw;
  }
}

void WorkFused::wait_for_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    future = future_;
  }
  if (future && Work::isCompleted()) {
    future->wait(); // another thread is about to complete it
  }
}

std::vector<at::Tensor> WorkFused::result() {
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFused::getFuture() {
  if (origin_.forked()) {
    check_ended();
    auto future = c10::make_intrusive<c10::ivalue::Future>(type());
    finish_future(*future, exception(), value());
    return future;
  }
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) {
      return future_;
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(type());
    if (Work::isCompleted()) {
      // complete() will not look again.
      finish_future(*future_, exception(), value());
      return future_;
    }
  }
  // A thread that waits for a future cannot help. (This may complete it here.)
  if (executor_) {
    executor_->wake_now();
  } else if (const auto messages = messages_.lock()) {
    messages->move_promptly();
  }
  return future_;
}

bool WorkGroup::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) {
    return work->isCompleted();
  });
}

bool WorkGroup::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) {
    return work->isSuccess();
  });
}

bool WorkGroup::wait(std::chrono::milliseconds timeout) {
  const ReleaseGil release;
  for (const auto& work : works_) {
    work->wait(timeout);
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    future = future_;
  }
  if (future) {
    future->wait(); // whoever completes the last one's is about to
  }
  return true;
}

std::vector<at::Tensor> WorkGroup::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto some = work->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkGroup::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) {
    return future_;
  }
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(tensors_type()));
  for (const auto& work : works_) {
    auto future = work->getFuture();
    TORCH_CHECK(
        future,
        "fused: NCCL's coalesced operations have no future; use wait()");
    futures.push_back(std::move(future));
  }
  // collectAll's value is a list of futures; users of a Work expect tensors.
  future_ = c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) {
        std::vector<at::Tensor> tensors;
        for (const c10::IValue& one : all.value().toListRef()) {
          flatten(one.toFuture()->value(), tensors);
        }
        return c10::IValue(tensors);
      },
      tensors_type());
  return future_;
}

} // namespace fusedpg
