#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "c10d/routes/route.hpp"
#include "c10d/tensors.hpp"
#include "collectives/engine.hpp"

namespace fusedpg {

// CPU tensors: checks the arguments in the caller, makes tensors contiguous and
// keeps those apart that share memory, and has the collective done in its turn.
class CpuRoute : public Route {
 public:
  CpuRoute(Group& group, std::unique_ptr<Engine> engine)
      : Route(group),
        engine_(std::move(engine)) {}

  // --- cpu_reductions.cpp ----------------------------------------------------
  // Takes the place of an operation that this rank cannot begin, and tells its
  // peers there why. Returns at once: they may come later.
  void refuse(const std::string& reason);
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override;

  // --- cpu_moves.cpp ---------------------------------------------------------
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts)
      override;
  WorkPtr allgather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& opts) override;

  // --- cpu_messages.cpp ------------------------------------------------------
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // --- tensors in the arena (cpu_memory.cpp) ---------------------------------
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor empty(
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      bool lives_long) override;
  at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;
  bool in_arena(const at::Tensor& t) override;

  // --- cpu_fused.cpp ---------------------------------------------------------
  WorkPtr fused_step_(StepArguments arguments, bool async_op) override;
  WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op) override;
  WorkPtr fused_program_(ProgramArguments arguments, bool async_op) override;
  WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const SkipArguments& arguments,
      bool async_op) override;

  // --- how the group stands, and its end: the engine's -----------------------
  void describe(GroupInfo& info) override {
    engine_->describe(info);
  }
  std::optional<ErrorKind> failure() override {
    return engine_->failure();
  }
  bool spans_hosts() const {
    return engine_->spans_hosts();
  }
  void check_peers(const std::string& what) {
    engine_->check_peers(what);
  }
  void abort() override {
    engine_->abort();
  }
  void interrupt(const std::string& how) override {
    engine_->interrupt(how);
  }
  void shutdown() override {
    engine_->shutdown();
  }

 private:
  std::shared_ptr<Arena> arena() {
    return engine_->arena();
  }
  // Has a function of a Way done as the group's next operation: here, which gives
  // null, or asynchronously. `lists`: see Group::enqueue().
  template <typename Function>
  WorkPtr run(
      const CallInfo& info,
      const Tensors& inputs,
      const Tensors& outputs,
      Function operation,
      const TensorLists& lists = {}) {
    group_.check_open(info.title);
    if (info.async_op) {
      return group_.enqueue(
          info,
          inputs,
          outputs,
          [engine = engine_.get(),
           title = info.title,
           timeout = info.timeout,
           async_call = info.async_call,
           operation = std::move(operation)](uint64_t ticket) {
            engine->execute(operation, title, ticket, timeout, async_call);
          },
          lists);
    }
    Group::Watched watched(group_, info, inputs, outputs);
    const auto in_turn = [&](uint64_t ticket) {
      watched.start();
      try {
        engine_->execute(
            operation, info.title, ticket, info.timeout, info.async_call);
      } catch (...) {
        watched.failed();
      }
      watched.end();
    };
    if (const Executor::Turn turn(group_.executor()); turn) {
      in_turn(turn.ticket());
    } else {
      translate([&] { group_.executor().run(in_turn); });
    }
    watched.raise();
    return nullptr;
  }

  // Takes several tensors, too: see AllReduce.
  WorkPtr all_reduce_dense(
      const Tensors& tensors,
      const c10d::AllreduceOptions& opts,
      bool together);
  // How a call combines contributions. A group that serves "gloo" refuses means
  // of integers, as Gloo does.
  kernels::ReduceArgs reduction_of(
      const c10d::ReduceOp& op,
      at::ScalarType type) const;

  // Throws where the group has failed or ended.
  std::shared_ptr<Messages> messages();
  WorkPtr post(
      c10d::OpType type,
      const char* title,
      const Tensors& tensors,
      int peer,
      int tag);
  // outputs[i][p] receives rank p's inputs[i]; then every list of `copies`
  // receives what the outputs hold, rank after rank. `lists` are the outputs as
  // the caller gave them.
  WorkPtr gather_lists(
      const TensorLists& outputs,
      const Tensors& inputs,
      const c10d::AllgatherOptions& opts,
      const TensorLists& lists,
      const TensorLists& copies = {});
  Tensors list_of_root(
      const char* op,
      const Tensors& tensors,
      const TensorLists& lists,
      int64_t root);

  const std::unique_ptr<Engine> engine_;
};

} // namespace fusedpg
