#include "cuda/operation.hpp"

#include <thread>

#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

// Between looks of who waits for an operation.
constexpr std::chrono::microseconds kWaitPause{50};

} // namespace

bool Operation::is_completed() const {
  if (!done_.load(std::memory_order_acquire)) {
    engine_.look();
  }
  return done_.load(std::memory_order_acquire);
}

std::exception_ptr Operation::exception() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

OpDescriptor Operation::facts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return facts_;
}

void Operation::set_facts(const OpDescriptor& facts) {
  std::lock_guard<std::mutex> lock(mutex_);
  facts_ = facts;
}

bool Operation::wait_for(std::chrono::milliseconds timeout) const {
  const Deadline deadline(timeout);
  while (!is_completed()) {
    if (deadline.expired()) {
      return false;
    }
    std::this_thread::sleep_for(kWaitPause);
  }
  return true;
}

void Operation::release_tensors() {
  std::shared_ptr<void> last;
  std::lock_guard<std::mutex> lock(mutex_);
  last.swap(tensors_);
}

void Operation::complete(std::exception_ptr error) {
  // Captured work is still to run, and what has failed may still be running.
  if (!error && !captured_) {
    release_tensors();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!done_.load(std::memory_order_acquire)) {
    error_ = std::move(error);
    if (!error_) {
      slot_.reset();
    }
    done_.store(true, std::memory_order_release);
  }
}

} // namespace fusedpg::cuda
