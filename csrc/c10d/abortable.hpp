#pragma once

#include <atomic>
#include <memory>

#include "c10d/forwarding.hpp"

namespace fusedpg {

// Gloo with an abort(), which torch's does not have: operations that wait
// raise, and so do all that come later. Gloo itself goes on with a collective
// that has begun until its timeout, on a thread of its own, which holds the
// tensors.
class AbortableBackend : public Forwarding<c10d::Backend> {
 public:
  struct Flights; // works that have begun

  explicit AbortableBackend(c10::intrusive_ptr<c10d::Backend> inner);
  ~AbortableBackend() override;

  const std::string getBackendName() const override {
    return inner_->getBackendName();
  }
  void abort() override;
  void shutdown() override {
    inner_->shutdown();
  }
  // COMM_ERROR after an abort.
  c10d::ErrorType getError() override;

  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    check_aborted();
    inner_->monitoredBarrier(o, wait_all);
  }

 protected:
  WorkPtr forward(const at::Tensor* /* tensor */, Operation operation)
      override {
    check_aborted();
    return wrap(operation(*inner_), /*message=*/false);
  }
  WorkPtr forward_message(const at::Tensor* /* tensor */, Operation operation)
      override {
    check_aborted();
    return wrap(operation(*inner_), /*message=*/true);
  }

 private:
  void check_aborted() const;
  WorkPtr wrap(WorkPtr work, bool message) const;

  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Flights> flights_;
};

} // namespace fusedpg
