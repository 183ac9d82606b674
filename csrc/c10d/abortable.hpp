#pragma once

#include <atomic>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fusedpg {

// Gloo with an abort(), which torch's does not have: operations that wait
// raise, and so do all that come later. Gloo itself goes on with a collective
// that has begun until its timeout, on a thread of its own, which holds the
// tensors.
class AbortableBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
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

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return begin([&] { return inner_->broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return begin([&] { return inner_->allreduce(t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return begin([&] { return inner_->reduce(t, o); });
  }
  WorkPtr _allgather_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::AllgatherOptions& o) override {
    return begin([&] { return inner_->_allgather_base(to, from, o); });
  }
  WorkPtr gather(
      std::vector<Tensors>& to,
      Tensors& from,
      const c10d::GatherOptions& o) override {
    return begin([&] { return inner_->gather(to, from, o); });
  }
  WorkPtr scatter(
      Tensors& to,
      std::vector<Tensors>& from,
      const c10d::ScatterOptions& o) override {
    return begin([&] { return inner_->scatter(to, from, o); });
  }
  WorkPtr alltoall_base(
      at::Tensor& to,
      at::Tensor& from,
      std::vector<int64_t>& to_sizes,
      std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& o) override {
    return begin([&] {
      return inner_->alltoall_base(to, from, to_sizes, from_sizes, o);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return begin([&] { return inner_->barrier(o); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    check_aborted();
    inner_->monitoredBarrier(o, wait_all);
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    return begin([&] { return inner_->send(t, to, tag); }, true);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return begin([&] { return inner_->recv(t, from, tag); }, true);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return begin([&] { return inner_->recvAnysource(t, tag); }, true);
  }

 private:
  void check_aborted() const;
  WorkPtr wrap(WorkPtr work, bool message) const;
  template <typename Call>
  WorkPtr begin(const Call& call, bool message = false) const {
    check_aborted();
    return wrap(call(), message);
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Flights> flights_;
};

} // namespace fusedpg
