#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fusedpg {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A backend whose collectives are those of another one: `Self` has
//
//   WorkPtr forward(const at::Tensor* one, method of c10d::Backend, arguments...)
//
// which says of which one, and what is around it. The tensor is one of those that
// the operation works on, or null. Sends and receives go to forward_message(), if
// Self has that. `Base` is c10d::Backend or made of it.
template <typename Base, typename Self>
class Forwarding : public Base {
 public:
  using Base::Base;

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return self().forward(sample(t), &c10d::Backend::allreduce, t, o);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o)
      override {
    return self().forward(sample(t), &c10d::Backend::allreduce_sparse, t, o);
  }
  WorkPtr allreduce_coalesced(
      Tensors& t,
      const c10d::AllreduceCoalescedOptions& o) override {
    return self().forward(sample(t), &c10d::Backend::allreduce_coalesced, t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return self().forward(sample(t), &c10d::Backend::reduce, t, o);
  }
  WorkPtr reduce_scatter(
      Tensors& to,
      TensorLists& from,
      const c10d::ReduceScatterOptions& o) override {
    return self().forward(
        sample(to), &c10d::Backend::reduce_scatter, to, from, o);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::ReduceScatterOptions& o) override {
    return self().forward(
        sample(to), &c10d::Backend::_reduce_scatter_base, to, from, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to,
      Tensors& from,
      const c10d::ReduceScatterOptions& o) override {
    return self().forward(
        sample(to),
        &c10d::Backend::reduce_scatter_tensor_coalesced,
        to,
        from,
        o);
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return self().forward(sample(t), &c10d::Backend::broadcast, t, o);
  }
  WorkPtr allgather(
      TensorLists& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return self().forward(sample(from), &c10d::Backend::allgather, to, from, o);
  }
  WorkPtr _allgather_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::AllgatherOptions& o) override {
    return self().forward(
        sample(to), &c10d::Backend::_allgather_base, to, from, o);
  }
  WorkPtr allgather_coalesced(
      TensorLists& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return self().forward(
        sample(from), &c10d::Backend::allgather_coalesced, to, from, o);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to,
      Tensors& from,
      const c10d::AllgatherOptions& o) override {
    return self().forward(
        sample(to),
        &c10d::Backend::allgather_into_tensor_coalesced,
        to,
        from,
        o);
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o)
      override {
    return self().forward(sample(from), &c10d::Backend::gather, to, from, o);
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o)
      override {
    return self().forward(sample(to), &c10d::Backend::scatter, to, from, o);
  }
  WorkPtr alltoall_base(
      at::Tensor& to,
      at::Tensor& from,
      std::vector<int64_t>& to_splits,
      std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return self().forward(
        sample(to),
        &c10d::Backend::alltoall_base,
        to,
        from,
        to_splits,
        from_splits,
        o);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o)
      override {
    return self().forward(sample(to), &c10d::Backend::alltoall, to, from, o);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return self().forward(nullptr, &c10d::Backend::barrier, o);
  }

  WorkPtr send(Tensors& t, int to, int tag) override {
    return self().forward_message(sample(t), &c10d::Backend::send, t, to, tag);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return self().forward_message(
        sample(t), &c10d::Backend::recv, t, from, tag);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return self().forward_message(
        sample(t), &c10d::Backend::recvAnysource, t, tag);
  }

 protected:
  template <typename... Arguments>
  WorkPtr forward_message(Arguments&&... arguments) {
    return self().forward(arguments...);
  }

 private:
  static const at::Tensor* sample(const at::Tensor& t) {
    return &t;
  }
  template <typename List>
  static const at::Tensor* sample(const List& list) {
    return list.empty() ? nullptr : sample(list[0]);
  }
  Self& self() {
    return static_cast<Self&>(*this);
  }
};

} // namespace fusedpg
