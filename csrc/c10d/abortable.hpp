#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "c10d/forwarding.hpp"

namespace fusedpg {

// Gloo with an abort(), which torch's does not have: operations that wait
// raise, and so do all that come later, and connections are closed, so that
// peers hear of it. Gloo itself goes on with a collective that has begun until
// its timeout, on a thread of its own, which holds the tensors.
class AbortableBackend : public Forwarding<c10d::Backend> {
 public:
  struct Flights; // works that have begun

  // `timeout` is for operations that have none of their own, whatever `inner`
  // was connected with. `watch`, if any, is called now and then by who waits for a collective; what
  // it throws ends the wait.
  explicit AbortableBackend(
      c10::intrusive_ptr<c10d::Backend> inner,
      std::chrono::milliseconds timeout,
      std::function<void()> watch = nullptr);
  ~AbortableBackend() override;

  const std::string getBackendName() const override {
    return name_;
  }
  void abort() override;
  void shutdown() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // COMM_ERROR after an abort.
  c10d::ErrorType getError() override;

  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    inner()->monitoredBarrier(o, wait_all);
  }

 protected:
  WorkPtr forward(const at::Tensor* /* tensor */, Operation operation)
      override {
    return wrap(operation(*inner()), /*message=*/false);
  }
  WorkPtr forward_message(const at::Tensor* /* tensor */, Operation operation)
      override {
    return wrap(operation(*inner()), /*message=*/true);
  }

 private:
  // Throws after an abort.
  c10::intrusive_ptr<c10d::Backend> inner() const;
  WorkPtr wrap(WorkPtr work, bool message) const;

  const std::string name_;
  const std::shared_ptr<Flights> flights_;
  c10::intrusive_ptr<c10d::Backend> inner_; // guarded by the flights' mutex
};

} // namespace fusedpg
