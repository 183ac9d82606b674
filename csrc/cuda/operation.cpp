#include "cuda/operation.hpp"

namespace fusedpg::cuda {

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
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(
      lock, deadline.remaining(), [this] { return is_completed(); });
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
  if (!is_completed()) {
    error_ = std::move(error);
    if (!error_) {
      slot_.reset();
    }
    done_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
}

} // namespace fusedpg::cuda
