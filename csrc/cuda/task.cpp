#include "cuda/task.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/ownership.hpp"

namespace fusedpg::cuda {
namespace {

// Facts that need not be the same where replicas would still stay equal are
// left out: addresses, and what lies on the device (learning rates, counters).
uint64_t facts_hash(const Task& task, uint64_t layout_hash) {
  Hash hash;
  hash.add(uint64_t(task.op)).add(uint64_t(task.grad_type));
  hash.add(uint64_t(task.param_type)).add(layout_hash);
  hash.add(uint64_t(task.reduction.mean)).add(uint64_t(task.reduces));
  hash.add(uint64_t(task.reduction.weight.has_value()));
  hash.add(uint64_t(task.used != nullptr));
  for (size_t t = 0; t < task.tensors.size(); ++t) {
    hash.add(uint64_t(task.counts[t]));
    hash.add(uint64_t(task.tensors[t].hyper));
  }
  if (task.step != nullptr) {
    hash.add(uint64_t(task.step->state_type));
    hash.add(uint64_t(task.step->has_masters));
    hash.add(task.step->call_hash);
    for (const StepHyper& h : task.step->hypers) {
      hash.add(hyper_hash(h));
    }
  }
  return hash.value();
}

std::string describe(const StepCall& step) {
  const StepHyper& h = step.hypers[0];
  const bool lr_on_device = !step.lrs.empty() && step.lrs[0].data != nullptr;
  std::string text = lr_on_device ? ", lr on the GPU" : str(", lr {}", h.lr);
  text += str(", weight_decay {}", h.weight_decay);
  text += step.op == OpCode::kFusedSgd
      ? str(", momentum {}", h.momentum)
      : str(", betas {} {}, eps {}", h.beta1, h.beta2, h.eps);
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
  reduction = call.reduction;
  reduces = !call.reduced;
  used = call.used;
  found_inf = call.found_inf;
  step = &call;
  Hash layouts;
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
    layouts.add(t.layout_hash);
  }
  hash = facts_hash(*this, layouts.value());
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
  hash = facts_hash(*this, call.layout_hash);
}

std::string Task::summary() const {
  size_t elements = 0;
  for (const size_t count : counts) {
    elements += count;
  }
  return str(
      "{} of {} tensors, {} elements, gradients {}{}{}{}{}",
      op_name(op),
      counts.size(),
      elements,
      dtype_name(grad_type),
      updates ? str(", parameters {}", dtype_name(param_type)) : "",
      reduction.weight ? ", weighted" : "",
      used != nullptr ? ", with used flags" : "",
      step != nullptr ? describe(*step) : "");
}

} // namespace fusedpg::cuda
