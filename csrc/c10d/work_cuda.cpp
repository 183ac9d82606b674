#include "c10d/work_cuda.hpp"

#include <ATen/core/ivalue.h>

#include "c10d/errors.hpp"
#include "c10d/gil.hpp"

namespace fusedpg {

WorkCuda::WorkCuda(
    int rank,
    const char* title,
    std::shared_ptr<cuda::CudaEngine> engine,
    CudaStreams streams,
    Operations operations,
    std::vector<at::Tensor> outputs,
    std::function<void()> after_wait)
    : Work(rank, c10d::OpType::UNKNOWN, title),
      engine_(std::move(engine)),
      streams_(streams),
      operations_(std::move(operations)),
      outputs_(std::move(outputs)),
      after_wait_(std::move(after_wait)) {}

bool WorkCuda::isCompleted() {
  for (const auto& operation : operations_) {
    if (!operation->is_completed()) {
      return false;
    }
  }
  return true;
}

bool WorkCuda::isSuccess() const {
  for (const auto& operation : operations_) {
    if (!operation->is_completed() || operation->exception()) {
      return false;
    }
  }
  return true;
}

void WorkCuda::follow(std::chrono::milliseconds timeout) {
  const ReleaseGil release;
  translate([&] {
    const cuda::Stream current = streams_.current();
    for (const auto& operation : operations_) {
      engine_->wait(*operation, current);
    }
    if (streams_.pretend() || timeout != kNoTimeout) {
      // The host is about to read what it takes for its own memory, or wants to
      // know within a time.
      for (const auto& operation : operations_) {
        if (!operation->wait_for(
                timeout == kNoTimeout ? std::chrono::hours(24) : timeout)) {
          fail(
              ErrorKind::kTimeout,
              "fused: wait() gave up after {} ms",
              timeout.count());
        }
        if (auto error = operation->exception()) {
          std::rethrow_exception(error);
        }
      }
    }
    std::function<void()> after;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      after.swap(after_wait_);
    }
    if (after) {
      after();
    }
  });
}

bool WorkCuda::wait(std::chrono::milliseconds timeout) {
  follow(timeout);
  for (const auto& operation : operations_) {
    operation->release_tensors();
  }
  return true;
}

void WorkCuda::synchronize() {
  wait(kNoTimeout);
}

std::vector<at::Tensor> WorkCuda::result() {
  return outputs_;
}

uint64_t WorkCuda::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.back()->sequence;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkCuda::getFuture() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) {
      return future_;
    }
  }
  // Complete at once, as ProcessGroupNCCL's are: its callbacks run on streams
  // that wait for the event which markCompleted() records.
  const auto type = c10::ListType::create(c10::TensorType::get());
  auto future = streams_.pretend()
      ? c10::make_intrusive<c10::ivalue::Future>(type)
      : c10::make_intrusive<c10::ivalue::Future>(
            type, std::vector<c10::Device>{streams_.device()});
  const auto complete = [&] {
    follow(kNoTimeout); // and keep the tensors: their own stream has not waited
    future->markCompleted(c10::IValue(outputs_));
  };
  try {
    if (streams_.pretend()) {
      complete();
    } else {
      const CudaStreams::Scope scope(streams_, streams_.from_pool());
      complete();
    }
  } catch (...) {
    future->setError(std::current_exception());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = future;
  }
  return future_;
}

} // namespace fusedpg
