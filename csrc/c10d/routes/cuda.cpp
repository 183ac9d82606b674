#include "c10d/routes/cuda.hpp"

#include "c10d/errors.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

// For outstanding work when a group is shut down.
constexpr std::chrono::milliseconds kShutdownPatience{10000};

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

CudaRoute::CudaRoute(
    Group& group,
    std::string name,
    bool spans_hosts,
    cuda::CudaEngine::CheckPeers check_peers,
    CudaGroup::MakeDelegate make_delegate,
    bool pretend)
    : Forwarding(group),
      cuda_(
          std::move(name),
          group.store,
          group.rank,
          group.size,
          group.settings,
          spans_hosts,
          std::move(check_peers),
          std::move(make_delegate),
          pretend) {}

// --- c10d's collectives ------------------------------------------------------

WorkPtr CudaRoute::delegate(
    const at::Tensor& tensor,
    CudaGroup::Delegated operation) {
  group_.check_open("fused: a collective of CUDA tensors");
  auto work = cuda_.delegated(
      tensor, group_.timeout.load(), group_.is_coalescing(), operation);
  // What is held back is waited for as a whole.
  return cuda_.holds_back() ? work : group_.remember(work);
}

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

WorkPtr CudaRoute::endCoalescing() {
  return cuda_.end_coalescing();
}

// --- ours --------------------------------------------------------------------

void CudaRoute::check_not_coalescing(const char* title) const {
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
  group_.check_open(title);
  check_not_coalescing(title);
  if (arguments.masters_follow) {
    follow_params(arguments, rank_, size_);
  }
  return cuda_.fused_step(
      std::move(arguments), title, group_.timeout.load(), async_op);
}

WorkPtr CudaRoute::reduce_shards_(ShardsArguments arguments, bool async_op) {
  constexpr const char* title = "fused:reduce_shards";
  group_.check_open(title);
  check_not_coalescing(title);
  return cuda_.reduce_shards(
      std::move(arguments), title, group_.timeout.load(), async_op);
}

WorkPtr CudaRoute::fused_program_(ProgramArguments arguments, bool async_op) {
  constexpr const char* title = "fused:fused_program";
  group_.check_open(title);
  check_not_coalescing(title);
  const bool known = arguments.done.numel() == 0;
  TORCH_CHECK_VALUE(
      arguments.function == nullptr,
      "fused: fused_program: an address is a CPU's function; on a GPU pass "
      "what load_program() gave");
  TORCH_CHECK_VALUE(
      arguments.layout.runs == 0,
      "fused: fused_program: on a GPU a rank's elements are its shard_range");
  TORCH_CHECK_VALUE(
      arguments.layout.row == 1,
      "fused: fused_program: no kernel takes whole rows");
  TORCH_CHECK_VALUE(
      std::get<0>(arguments.phases).empty(),
      "fused: fused_program: no kernel has several phases");
  TORCH_CHECK_VALUE(
      known ? arguments.kernel != nullptr
            : arguments.done.scalar_type() == at::kFloat &&
              arguments.done.device() == arguments.source.device(),
      "fused: fused_program: `done` must be one float32 on the GPU");
  TORCH_CHECK_VALUE(
      known || !cuda_.capturing(arguments.source),
      "fused: the first call of a fused function finds out whether all ranks "
      "have compiled it, which a graph cannot hold; call it once before the "
      "capture");
  group_.stats.add(OpCode::kFusedProgram, DataPath::kStaged, {});
  return cuda_.fused_program(
      std::move(arguments), title, group_.timeout.load(), async_op);
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
  const auto t = cuda_.allocate({size}, options, group_.timeout.load());
  return t ? *t : at::empty({size}, options);
}

at::Tensor CudaRoute::empty(
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    bool /* lives_long */) {
  group_.check_open("fused:empty");
  const auto t = cuda_.allocate(sizes, options, group_.timeout.load());
  return t ? *t : at::empty(sizes, options);
}

at::Tensor CudaRoute::empty_shared(
    at::IntArrayRef /* sizes */,
    const at::TensorOptions& /* options */) {
  TORCH_CHECK_VALUE(
      false, "fused: parameters on a GPU cannot be shared between ranks");
}

bool CudaRoute::in_arena(const at::Tensor& t) {
  const auto engine = cuda_.engine();
  const auto* begin =
      engine ? static_cast<const char*>(engine->arena()) : nullptr;
  const auto* data = static_cast<const char*>(t.const_data_ptr());
  return begin != nullptr && data >= begin &&
      data < begin + engine->arena_bytes();
}

// --- state and end -----------------------------------------------------------

void CudaRoute::describe(GroupInfo& info) {
  info.cuda_arena = group_.settings.cuda_arena_bytes;
  if (const auto engine = cuda_.engine()) {
    info.nccl_version = engine->nccl().version;
    info.cuda_path = engine->path_of_last_step();
  }
}

std::optional<ErrorKind> CudaRoute::failure() {
  const auto engine = cuda_.engine();
  return engine && engine->failed() ? std::optional(engine->failure_kind())
                                    : std::nullopt;
}

void CudaRoute::shutdown() {
  cuda_.shutdown(kShutdownPatience);
}

} // namespace fusedpg
