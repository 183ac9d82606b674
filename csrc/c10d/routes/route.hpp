#pragma once

#include <optional>
#include <string>

#include "base/error.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/group.hpp"

namespace fusedpg {

// The operations of a group on one kind of memory: c10d's, with arguments as
// callers give them, and ours. CpuRoute has an engine, CudaRoute another one.
// ProcessGroupFused chooses by the tensors' device. What CudaRoute does not do
// itself it gives to its *delegate*, torch's NCCL.
class Route : public c10d::Backend {
 public:
  explicit Route(Group& group)
      : Backend(group.rank, group.size),
        group_(group) {}

  const std::string getBackendName() const override {
    return "fused";
  }

  // One operation: reduce-scatter(grads), update of the owned slices,
  // all-gather(params). Arguments have been checked.
  virtual WorkPtr fused_step_(StepArguments arguments, bool async_op) = 0;
  // Its first third: every gradient is reduced in place to its owners.
  virtual WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op) = 0;
  // A reduce-scatter, generated code, and all-gathers as one operation.
  virtual WorkPtr fused_program_(ProgramArguments arguments, bool async_op) = 0;
  // all_reduce() that skips blocks of zeros; see
  // base/call.hpp.
  virtual WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const SkipArguments& arguments,
      bool async_op) = 0;

  // A tensor in the arena, or an error; ordinary memory where there is none.
  // With `lives_long` its memory goes back to the system when it is freed;
  // otherwise the arena keeps it for the next one.
  virtual at::Tensor empty(
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      bool lives_long) = 0;
  // Collective: a tensor of which the ranks of the group hold one physical
  // copy.
  virtual at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) = 0;
  virtual bool in_arena(const at::Tensor& t) = 0;

  // The group's new default; that of `group_` has been set.
  void setTimeout(std::chrono::milliseconds /* timeout */) override {}

  virtual void describe(GroupInfo& info) = 0;
  // Why the group has failed, if it has.
  virtual std::optional<ErrorKind> failure() = 0;
  // Makes what runs or waits end, and waits for nothing. `how`: "aborted", or
  // "interrupted by KeyboardInterrupt".
  virtual void interrupt(const std::string& how) = 0;

 protected:
  Group& group_;
};

} // namespace fusedpg
