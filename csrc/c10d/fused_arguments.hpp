#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collectives/fused_program.hpp"
#include "collectives/fused_step.hpp"
#include "collectives/skip.hpp"
#include "cuda/loaded_program.hpp"

namespace fusedpg {

// How gradients are combined, as callers say it; see GradReduction.
struct ReductionArguments {
  bool mean = true;
  std::optional<double> weight;
  // uint8, one element a tensor of the list: in, whether this rank used it;
  // out, whether any rank did.
  std::optional<at::Tensor> used;
};

struct HyperArguments {
  std::variant<double, at::Tensor> lr = 0.0; // read when the step executes
  StepHyper rest;
};

// One call of a fused optimizer step. Lists are parallel to `params`.
struct StepArguments {
  OpCode op = OpCode::kFusedAdamW;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads; // slices when `reduced`
  std::vector<at::Tensor> masters; // slices, or empty
  // Masters that do not round to their parameters take over their values.
  bool masters_follow = false;
  // SGD: [momentum buffers] or none. Adam: [exp_avgs, exp_avg_sqs] and with
  // amsgrad max_exp_avg_sqs. LAMB: [exp_avgs, exp_avg_sqs].
  std::vector<std::vector<at::Tensor>> states;
  std::vector<at::Tensor> steps; // empty for SGD
  std::vector<HyperArguments> hypers;
  std::vector<int64_t> hyper_index; // empty: all use hypers[0]
  ReductionArguments reduction;
  bool reduced = false;
  bool shared_params = false;
  bool block_skip = false; // by the group's block size; see StepCall
  // A hash of what all ranks must have done alike since the step before: loaded
  // a state dict, multiplied gradients. 0: none of it.
  uint64_t done_before = 0;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
};

struct ShardsArguments {
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> outputs; // like grads; empty: in place
  ReductionArguments reduction;
};

// One call of a compiled program; see collectives/fused_program.hpp.
struct ProgramArguments {
  // What this rank has of it; null: nothing. For a CPU its address.
  ProgramFunction function = nullptr;
  std::shared_ptr<cuda::LoadedProgram> kernel; // for a GPU
  uint64_t program = 0;
  std::string op; // "sum", "min" or "max"
  at::Tensor source;
  std::vector<at::Tensor> operands;
  std::vector<int64_t> kinds; // of the operands: ProgramCall::Operand
  std::vector<int64_t> reads; // of the operands: elements that are read of them
  std::vector<at::Tensor> outputs;
  std::vector<bool> gathered; // of the outputs
  std::vector<double> numbers;
  std::vector<uint64_t> seeds;
  // One byte: whether it has been executed. On a GPU one float: in, 1 if this
  // rank has no function; out, 1 if any rank has none, and nothing is written.
  // Empty there: all ranks are known to have one.
  at::Tensor done;
  // As in ProgramCall. Results of as many elements as rows have one number a
  // row.
  struct Layout {
    Layout(const std::array<uint64_t, 5>& of)
        : first(of[0]),
          runs(of[1]),
          spacing(of[2]),
          row(of[3]),
          scratch(of[4]) {}
    uint64_t first;
    size_t runs;
    uint64_t spacing;
    size_t row;
    size_t scratch;
  } layout;
  // As in ProgramCall: how ranks combine numbers after each phase; bytes of an
  // element of what is kept; of each output the phase that writes it, and
  // whether it is a single number. Empty: one phase.
  using Phases = std::tuple<
      std::vector<std::vector<std::string>>,
      std::vector<size_t>,
      std::vector<size_t>,
      std::vector<bool>>;
  Phases phases;
};

// One call of sparse_all_reduce; see base/call.hpp.
struct SkipArguments {
  c10d::ReduceOp op;
  int64_t block_size; // elements
  double threshold;
  std::optional<at::Tensor> residual;
  std::optional<at::Tensor> bitmap;
};

// What the engines' kernels do for `masters_follow` on the CPU.
void follow_params(const StepArguments& a, int rank, int size);

// What an optimizer step takes besides parameters and gradients: its operator
// (ops.cpp) and the checks of its arguments follow from this.
struct StepInputs {
  // A list with each rank's slices; of calls for which `needed` is false it is
  // empty. Where that depends on nothing, there is no `needed`.
  struct State {
    const char* name;
    bool (*needed)(const StepHyper&) = nullptr;
  };

  OpCode op;
  const char* title; // in torch's profiler
  std::vector<State> states;
  bool counts; // has a counter of steps for each parameter
  const char* hypers; // of the schema; $lr stands for a number or a tensor
  // Two passes over a slice: states are of the compute type, and no blocks of
  // zeros are looked for.
  bool two_passes = false;
};
const std::vector<StepInputs>& all_step_inputs();
const StepInputs& step_inputs(OpCode op);
// By name, "fused_adamw_"; ValueError for what is no optimizer step.
const StepInputs& step_inputs(std::string_view name);

// Says why a step would lose a tensor's derivative; empty if it would not. A leaf
// among the parameters may require grad, as a model's do.
std::string lost_derivative(const char* op, const at::Tensor& t, bool is_param);

// Throws ValueError for what a rank can find wrong alone, RuntimeError where a
// derivative would get lost.
void check_arguments(const StepArguments& a, int rank, int size);
void check_arguments(const ShardsArguments& a);

// The engines' options, checked against the tensor. Throws ValueError.
SkipOptions skip_options(const at::Tensor& tensor, const SkipArguments& a);

ShardsCall to_engine(const ShardsArguments& a);
// Into operations of a limited number of tensors.
std::vector<ShardsCall> split_shards(const ShardsCall& whole);

// The call cut into operations that one engine call can do: of one combination
// of types, and of a limited number of tensors. Owns what the calls point to.
class StepPlan {
 public:
  // `block` for gradients' blocks of zeros, if the arguments ask for it.
  explicit StepPlan(
      std::shared_ptr<const StepArguments> arguments,
      size_t block = 0);
  StepPlan(const StepPlan&) = delete;

  std::vector<StepCall>& calls() {
    return calls_;
  }
  bool has_used() const {
    return arguments_->reduction.used.has_value();
  }
  // The flags that calls()[i] left, into the caller's tensor.
  void take_used(size_t i);

 private:
  // The flags of the tensors of calls()[i]: views of all flags, one for each run
  // of neighbours. Positions would have to come from the host, which graphs do
  // not capture.
  std::vector<at::Tensor> flags_of(size_t i) const;

  std::shared_ptr<const StepArguments> arguments_;
  std::vector<at::Tensor> grads_; // laid out as their parameters
  std::vector<StepCall> calls_;
  std::vector<std::vector<int64_t>> members_; // tensors of each call
  std::vector<at::Tensor> used_;
};

// The elements of a dense tensor in memory order.
at::Tensor memory_order(const at::Tensor& t);

// Checked, but for the function and `done`; the tensors stay the arguments'.
ProgramCall to_engine(const ProgramArguments& a, int rank, int size);

} // namespace fusedpg
