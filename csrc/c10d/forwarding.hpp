#pragma once

#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fusedpg {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A backend whose collectives are those of another one: forward() says of which
// one, and what is around it. `Base` is c10d::Backend or made of it.
template <typename Base>
class Forwarding : public Base {
 public:
  using Base::Base;

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return pass(t, [&](auto& b) { return b.allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o)
      override {
    return pass(t, [&](auto& b) { return b.allreduce_sparse(t, o); });
  }
  WorkPtr allreduce_coalesced(
      Tensors& t,
      const c10d::AllreduceCoalescedOptions& o) override {
    return pass(t, [&](auto& b) { return b.allreduce_coalesced(t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return pass(t, [&](auto& b) { return b.reduce(t, o); });
  }
  WorkPtr reduce_scatter(
      Tensors& to,
      TensorLists& from,
      const c10d::ReduceScatterOptions& o) override {
    return pass(to, [&](auto& b) { return b.reduce_scatter(to, from, o); });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::ReduceScatterOptions& o) override {
    return pass(
        to, [&](auto& b) { return b._reduce_scatter_base(to, from, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to,
      Tensors& from,
      const c10d::ReduceScatterOptions& o) override {
    return pass(to, [&](auto& b) {
      return b.reduce_scatter_tensor_coalesced(to, from, o);
    });
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return pass(t, [&](auto& b) { return b.broadcast(t, o); });
  }
  WorkPtr allgather(
      TensorLists& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return pass(from, [&](auto& b) { return b.allgather(to, from, o); });
  }
  WorkPtr _allgather_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::AllgatherOptions& o) override {
    return pass(to, [&](auto& b) { return b._allgather_base(to, from, o); });
  }
  WorkPtr allgather_coalesced(
      TensorLists& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return pass(
        from, [&](auto& b) { return b.allgather_coalesced(to, from, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return pass(to, [&](auto& b) {
      return b.allgather_into_tensor_coalesced(to, from, o);
    });
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o)
      override {
    return pass(from, [&](auto& b) { return b.gather(to, from, o); });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o)
      override {
    return pass(to, [&](auto& b) { return b.scatter(to, from, o); });
  }
  WorkPtr alltoall_base(
      at::Tensor& to,
      at::Tensor& from,
      std::vector<int64_t>& to_splits,
      std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return pass(to, [&](auto& b) {
      return b.alltoall_base(to, from, to_splits, from_splits, o);
    });
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o)
      override {
    return pass(to, [&](auto& b) { return b.alltoall(to, from, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return forward(nullptr, [&](auto& b) { return b.barrier(o); });
  }

  WorkPtr send(Tensors& t, int to, int tag) override {
    return forward_message(
        sample(t), [&](auto& b) { return b.send(t, to, tag); });
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return forward_message(
        sample(t), [&](auto& b) { return b.recv(t, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return forward_message(
        sample(t), [&](auto& b) { return b.recvAnysource(t, tag); });
  }

 protected:
  using Operation = c10::function_ref<WorkPtr(c10d::Backend&)>;
  // `tensor` is one of those that the operation works on; null if it has none.
  virtual WorkPtr forward(const at::Tensor* tensor, Operation operation) = 0;
  virtual WorkPtr forward_message(
      const at::Tensor* tensor,
      Operation operation) {
    return forward(tensor, operation);
  }

 private:
  static const at::Tensor* sample(const at::Tensor& t) {
    return &t;
  }
  template <typename List>
  static const at::Tensor* sample(const List& list) {
    return list.empty() ? nullptr : sample(list[0]);
  }
  template <typename T, typename Call>
  WorkPtr pass(const T& tensors, const Call& call) {
    return forward(sample(tensors), call);
  }
};

} // namespace fusedpg
