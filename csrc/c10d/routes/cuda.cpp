#include "c10d/routes/cuda.hpp"

#include "c10d/errors.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

// Whether we multiply by the factor of a PREMUL_SUM, and NCCL only adds.
// torch's ProcessGroupNCCL gives NCCL the factor of bfloat16 as a float, of
// which NCCL reads two bytes: 0.5 becomes 0 (PyTorch issue 190745; torch 2.11
// does so). A group of one rank copies, without the factor. torch refuses
// integers.
bool multiplies(const c10d::ReduceOp& op, const at::Tensor& t, int size) {
  return op.op_ == c10d::ReduceOp::PREMUL_SUM && t.is_floating_point() &&
      (size == 1 || t.scalar_type() == at::kBFloat16);
}

bool multiplies(const c10d::ReduceOp& op, const Tensors& tensors, int size) {
  return !tensors.empty() && multiplies(op, tensors[0], size);
}

template <typename Options>
Options sum_of(Options options) {
  options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

// In fp32, rounded once.
at::Tensor product(const at::Tensor& t, const c10d::ReduceOp& op) {
  const c10::NoGradGuard no_grad;
  const auto& premul = premul_of(op);
  return premul.tensor_factor.defined()
      ? t.mul(premul.tensor_factor.view({})) // a scalar: t's type stays
      : t.mul(premul.double_factor);
}

Tensors product(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors products;
  for (const at::Tensor& t : tensors) {
    products.push_back(product(t, op));
  }
  return products;
}

void multiply(Tensors& tensors, const c10d::ReduceOp& op) {
  const c10::NoGradGuard no_grad;
  for (at::Tensor& t : tensors) {
    t.copy_(product(t, op));
  }
}

} // namespace

// --- c10d's collectives ------------------------------------------------------

WorkPtr CudaRoute::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  if (multiplies(opts.reduceOp, tensors, size_)) {
    multiply(tensors, opts.reduceOp);
    return Forwarding::allreduce(tensors, sum_of(opts));
  }
  return Forwarding::allreduce(tensors, opts);
}

WorkPtr CudaRoute::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  if (multiplies(opts.reduceOp, tensors, size_)) {
    multiply(tensors, opts.reduceOp);
    return Forwarding::allreduce_coalesced(tensors, sum_of(opts));
  }
  return Forwarding::allreduce_coalesced(tensors, opts);
}

WorkPtr CudaRoute::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  if (multiplies(opts.reduceOp, tensors, size_)) {
    if (opts.rootRank == rank_) {
      multiply(tensors, opts.reduceOp);
      return Forwarding::reduce(tensors, sum_of(opts));
    }
    Tensors products = product(tensors, opts.reduceOp);
    return Forwarding::reduce(products, sum_of(opts));
  }
  return Forwarding::reduce(tensors, opts);
}

WorkPtr CudaRoute::reduce_scatter(
    Tensors& to,
    TensorLists& from,
    const c10d::ReduceScatterOptions& opts) {
  if (multiplies(opts.reduceOp, to, size_)) {
    TensorLists products;
    for (const Tensors& tensors : from) {
      products.push_back(product(tensors, opts.reduceOp));
    }
    return Forwarding::reduce_scatter(to, products, sum_of(opts));
  }
  return Forwarding::reduce_scatter(to, from, opts);
}

WorkPtr CudaRoute::_reduce_scatter_base(
    at::Tensor& to,
    at::Tensor& from,
    const c10d::ReduceScatterOptions& opts) {
  if (multiplies(opts.reduceOp, to, size_)) {
    at::Tensor products = product(from, opts.reduceOp);
    return Forwarding::_reduce_scatter_base(to, products, sum_of(opts));
  }
  return Forwarding::_reduce_scatter_base(to, from, opts);
}

WorkPtr CudaRoute::reduce_scatter_tensor_coalesced(
    Tensors& to,
    Tensors& from,
    const c10d::ReduceScatterOptions& opts) {
  if (multiplies(opts.reduceOp, to, size_)) {
    Tensors products = product(from, opts.reduceOp);
    return Forwarding::reduce_scatter_tensor_coalesced(
        to, products, sum_of(opts));
  }
  return Forwarding::reduce_scatter_tensor_coalesced(to, from, opts);
}

WorkPtr CudaRoute::barrier(const c10d::BarrierOptions& opts) {
  const at::Tensor there =
      at::empty({0}, at::TensorOptions().device(*opts.device));
  return forward(&there, &c10d::Backend::barrier, opts);
}

// --- ours --------------------------------------------------------------------

void CudaRoute::check_fused(const char* title) const {
  group_.check_open(title);
  TORCH_CHECK_VALUE(
      !group_.is_coalescing(),
      formatted(
          "{} of tensors on a GPU cannot be coalesced with other operations; "
          "call it before or after them",
          title));
}

WorkPtr CudaRoute::fused_step_(StepArguments arguments, bool async_op) {
  TORCH_CHECK_VALUE(
      !arguments.shared_params,
      "fused: parameters on a GPU cannot be shared between ranks");
  const char* title = step_inputs(arguments.op).title;
  check_fused(title);
  if (arguments.masters_follow) {
    follow_params(arguments, rank_, size_);
  }
  const at::Tensor first = arguments.params[0];
  const std::vector<at::Tensor> outputs = arguments.params;
  c10::NoGradGuard no_grad;
  const auto plan = std::make_shared<StepPlan>(
      std::make_shared<const StepArguments>(std::move(arguments)),
      group_.settings.block_size);
  return submit(
      first,
      title,
      async_op,
      outputs,
      plan,
      [plan](auto& engine, const auto& submission) {
        Operations operations;
        for (const StepCall& call : plan->calls()) {
          operations.push_back(engine.fused_step(call, submission));
        }
        return operations;
      },
      plan->has_used() ? std::function<void()>([plan] {
        for (size_t i = 0; i < plan->calls().size(); ++i) {
          plan->take_used(i);
        }
      })
                       : nullptr);
}

WorkPtr CudaRoute::reduce_shards_(ShardsArguments arguments, bool async_op) {
  constexpr const char* title = "fused:reduce_shards";
  check_fused(title);
  const auto a = std::make_shared<const ShardsArguments>(std::move(arguments));
  const auto calls =
      std::make_shared<std::vector<ShardsCall>>(split_shards(to_engine(*a)));
  return submit(
      a->grads[0],
      title,
      async_op,
      a->outputs.empty() ? a->grads : a->outputs,
      std::make_shared<std::shared_ptr<const ShardsArguments>>(a),
      [calls](auto& engine, const auto& submission) {
        Operations operations;
        for (const ShardsCall& call : *calls) {
          operations.push_back(engine.reduce_shards(call, submission));
        }
        return operations;
      },
      nullptr);
}

WorkPtr CudaRoute::sparse_all_reduce(
    const at::Tensor& /* tensor */,
    const SkipArguments& /* arguments */,
    bool /* async_op */) {
  TORCH_CHECK_VALUE(
      false,
      "fused: sparse_all_reduce takes tensors on the CPU, found one on a GPU, "
      "where no kernel skips zeros; call all_reduce, or move it to the CPU");
}

// --- memory ------------------------------------------------------------------

at::Tensor CudaRoute::allocateTensor(long size, at::TensorOptions options) {
  const auto t = allocate({size}, options);
  return t ? *t : at::empty({size}, options);
}

at::Tensor CudaRoute::empty(
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    bool /* lives_long */) {
  group_.check_open("fused:empty");
  const auto t = allocate(sizes, options);
  return t ? *t : at::empty(sizes, options);
}

at::Tensor CudaRoute::empty_shared(
    at::IntArrayRef /* sizes */,
    const at::TensorOptions& /* options */) {
  TORCH_CHECK_VALUE(
      false, "fused: parameters on a GPU cannot be shared between ranks");
}

bool CudaRoute::in_arena(const at::Tensor& t) {
  const auto engine = this->engine();
  return engine && engine->in_arena(t.const_data_ptr(), 1);
}

// --- state ----------------------------------------------------------------

void CudaRoute::describe(GroupInfo& info) {
  info.cuda_arena = group_.settings.cuda_arena_bytes;
  if (const auto engine = this->engine()) {
    info.nccl_version = engine->nccl().version;
    info.cuda_path = engine->path_of_last_step();
  }
}

std::optional<ErrorKind> CudaRoute::failure() {
  const auto engine = this->engine();
  return engine && engine->failed() ? std::optional(engine->failure_kind())
                                    : std::nullopt;
}

} // namespace fusedpg
