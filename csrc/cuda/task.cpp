#include "cuda/task.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/ownership.hpp"

namespace fusedpg::cuda {
namespace {

std::string describe(const StepCall& step) {
  const StepHyper& h = step.hypers[0];
  const bool lr_on_device = !step.lrs.empty() && step.lrs[0].data != nullptr;
  std::string text =
      lr_on_device ? ", lr on the GPU" : formatted(", lr {}", h.lr);
  text += formatted(", weight_decay {}", h.weight_decay);
  text += step.op == OpCode::kFusedSgd
      ? formatted(", momentum {}", h.momentum)
      : formatted(", betas {} {}, eps {}", h.beta1, h.beta2, h.eps);
  return text + (step.hypers.size() > 1 ? ", and other groups" : "");
}

TensorInfo info_of(size_t count, int size) {
  TensorInfo info{};
  info.count = count;
  info.shard =
      static_cast<uint64_t>(shard_size(static_cast<int64_t>(count), size));
  return info;
}

} // namespace

Task::Task(const StepCall& call, int world_size) {
  op = call.op;
  grad_type = call.grad_type;
  param_type = call.param_type;
  results = {param_type};
  reduction = call.reduction;
  reduces = !call.reduced;
  used = call.used;
  found_inf = call.found_inf;
  step = &call;
  for (const StepTensor& t : call.tensors) {
    TensorInfo info = info_of(t.count, world_size);
    info.param = t.param;
    info.grad = t.grad;
    info.master = t.master;
    std::copy(std::begin(t.state), std::end(t.state), std::begin(info.state));
    info.step = t.step;
    info.hyper = static_cast<uint32_t>(t.hyper);
    tensors.push_back(info);
    counts.push_back(t.count);
  }
  facts = fusedpg::facts(call, /*on_device=*/true);
}

Task::Task(const ShardsCall& call, int world_size) {
  op = OpCode::kReduceShards;
  grad_type = call.dtype;
  param_type = call.dtype;
  reduction = call.reduction;
  updates = false;
  used = call.used;
  for (size_t t = 0; t < call.grads.size(); ++t) {
    TensorInfo info = info_of(call.counts[t], world_size);
    info.grad = call.grads[t];
    info.output = call.outputs[t];
    tensors.push_back(info);
    counts.push_back(call.counts[t]);
  }
  facts = fusedpg::facts(call);
}

Task::Task(const ProgramCall& call, int world_size) {
  op = OpCode::kFusedProgram;
  grad_type = wide_type(call.dtype, call.op);
  widens = grad_type != call.dtype;
  red_op = call.op;
  reduction.mean = false; // the kernel divides
  found_inf = call.missing;
  program = &call;
  counts = {call.count};
  size_t widest = 0;
  for (const ProgramCall::Output& output : call.outputs) {
    if (output.gathered) {
      // Their bits are moved, whatever they are.
      results.push_back(
          output.element == 2       ? DType::kFloat16
              : output.element == 4 ? DType::kFloat32
                                    : DType::kFloat64);
      widest = std::max(widest, output.element);
      param_type = output.element == widest ? results.back() : param_type;
      tensors.push_back(info_of(call.count, world_size));
      tensors.back().param = output.data;
    }
  }
  if (tensors.empty()) {
    tensors.push_back(info_of(call.count, world_size));
    param_type = call.dtype;
  }
  tensors[0].grad = call.source;
  facts = fusedpg::facts(call);
}

std::string Task::details() const {
  return step != nullptr ? describe(*step) : std::string();
}

} // namespace fusedpg::cuda
