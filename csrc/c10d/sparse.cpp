// Reductions that skip zeros: dense tensors by blocks, torch.sparse_coo tensors
// by their coordinates.

#include "collectives/sparse_all_reduce.hpp"

#include "base/hash.hpp"
#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

void check_residual(const at::Tensor& tensor, const at::Tensor& residual) {
  TORCH_CHECK_VALUE(
      residual.scalar_type() == tensor.scalar_type() &&
          residual.numel() == tensor.numel() && residual.is_contiguous() &&
          residual.device() == tensor.device(),
      "fused: sparse_all_reduce: residual must be a contiguous tensor of ",
      tensor.numel(),
      " elements of ",
      tensor.scalar_type(),
      " like the tensor, found ",
      residual.numel(),
      " of ",
      residual.scalar_type());
}

SparseOptions sparse_options(
    const at::Tensor& tensor,
    int64_t block_size,
    double threshold,
    const std::optional<at::Tensor>& residual) {
  translate([&] { check_block_size(block_size); });
  TORCH_CHECK_VALUE(
      threshold >= 0,
      "fused: sparse_all_reduce: threshold must not be negative, found ",
      threshold);
  TORCH_CHECK_VALUE(
      (threshold > 0) == residual.has_value(),
      "fused: sparse_all_reduce: a threshold and a residual, which keeps what "
      "is not sent, go together");
  SparseOptions options;
  options.block = static_cast<size_t>(block_size);
  options.threshold = threshold;
  if (residual) {
    TORCH_CHECK_VALUE(
        tensor.is_floating_point(),
        "fused: sparse_all_reduce: a threshold needs a floating-point tensor, "
        "found ",
        tensor.scalar_type());
    check_residual(tensor, *residual);
    options.residual = residual->data_ptr();
  }
  return options;
}

// --- torch.sparse_coo
// ----------------------------------------------------------

// What ranks tell each other of their tensors.
struct CooHeader {
  int64_t entries;
  uint64_t shape; // hash of everything else, which must be the same
};

// The coordinates and values of all ranks.
struct Gathered {
  std::vector<at::Tensor> indices; // of each rank: [sparse_dim, entries]
  std::vector<at::Tensor> values; // [entries, dense sizes...]
};

uint64_t shape_hash(const at::Tensor& t) {
  Hash hash;
  hash.add(static_cast<uint64_t>(t.sparse_dim()));
  hash.add(static_cast<uint64_t>(t.scalar_type()));
  for (const int64_t size : t.sizes()) {
    hash.add(static_cast<uint64_t>(size));
  }
  return hash.value();
}

Gathered gather_entries(Context& ctx, const at::Tensor& mine) {
  CooHeader header{mine._nnz(), shape_hash(mine)};
  std::vector<CooHeader> headers(ctx.size());
  std::vector<Span> parts;
  for (CooHeader& h : headers) {
    parts.push_back({&h, sizeof h});
  }
  ctx.begin_item(0, 3);
  all_gather(ctx, parts, {&header, sizeof header}, DType::kOpaque);
  for (int p = 0; p < ctx.size(); ++p) {
    if (headers[p].shape != header.shape) {
      fail(
          ErrorKind::kMismatch,
          "fused: all_reduce of sparse tensors, sequence number ",
          ctx.sequence,
          ": sizes, dtypes or sparse dimensions differ between rank ",
          ctx.rank(),
          " (here) and rank ",
          p,
          " (there)");
    }
  }
  Gathered all;
  const auto exchange = [&](const at::Tensor& part,
                            std::vector<at::Tensor>& list,
                            int64_t dim,
                            uint64_t item) {
    ctx.begin_item(item, 3); // before what may find no memory
    for (const CooHeader& h : headers) {
      std::vector<int64_t> sizes = part.sizes().vec();
      sizes[dim] = h.entries;
      list.push_back(at::empty(sizes, part.options()));
    }
    const Flat in = Flat::input(part);
    const auto outs = flat_outputs(list);
    all_gather(ctx, spans(outs), in.span(), to_dtype(part.scalar_type()));
    finish(outs);
  };
  exchange(mine.indices(), all.indices, 1, 1);
  exchange(mine.values(), all.values, 0, 2);
  return all;
}

// Every entry is a left fold over the ranks that have it, in rank order.
at::Tensor add_entries(const at::Tensor& like, const Gathered& all) {
  std::vector<at::Tensor> flat;
  const int64_t dims = like.sparse_dim();
  std::vector<int64_t> strides(dims, 1);
  for (int64_t d = dims - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * like.size(d);
  }
  const at::Tensor factors = at::tensor(strides, at::kLong).unsqueeze(1);
  for (const at::Tensor& indices : all.indices) {
    flat.push_back((indices * factors).sum(0));
  }
  const auto [places, inverse, counts] =
      at::_unique2(at::cat(flat), /*sorted=*/true, /*return_inverse=*/true);
  std::vector<int64_t> sizes = all.values[0].sizes().vec();
  sizes[0] = places.numel();
  at::Tensor values = at::zeros(sizes, all.values[0].options());
  at::Tensor indices = at::empty({dims, places.numel()}, at::kLong);
  int64_t begin = 0;
  for (size_t p = 0; p < flat.size(); ++p) {
    const int64_t entries = flat[p].numel();
    const at::Tensor mine = inverse.narrow(0, begin, entries);
    values.index_add_(0, mine, all.values[p]);
    indices.index_copy_(1, mine, all.indices[p]);
    begin += entries;
  }
  return at::_sparse_coo_tensor_unsafe(
      indices,
      values,
      like.sizes(),
      like.options(),
      /*is_coalesced=*/true);
}

// More than the share of all blocks.
constexpr double kNoLimit = 2;

cuda::CudaEngine::SparseCall sparse_call(
    const at::Tensor& tensor,
    const kernels::ReduceArgs& args,
    size_t block,
    double limit) {
  cuda::CudaEngine::SparseCall call;
  call.data = tensor.data_ptr();
  call.count = static_cast<size_t>(tensor.numel());
  call.dtype = args.dtype;
  call.mean = args.op == RedOp::kAvg;
  call.block = block;
  call.limit = limit;
  return call;
}

// What blocks without an element above the threshold hold goes from the tensor
// to the residual, all the rest of which is zero.
void split_residual(
    const at::Tensor& tensor,
    const at::Tensor& residual,
    const SparseOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto block = static_cast<int64_t>(options.block);
  const at::Tensor flat = memory_order(tensor);
  const at::Tensor kept = residual.view({-1});
  flat.add_(kept);
  const int64_t missing = (block - flat.numel() % block) % block;
  const at::Tensor above =
      at::constant_pad_nd(flat.abs(), {0, missing}).view({-1, block});
  // NaN is not below.
  const at::Tensor sent = above.le(options.threshold)
                              .all(1)
                              .logical_not()
                              .repeat_interleave(block)
                              .narrow(0, 0, flat.numel());
  const at::Tensor zero = at::zeros({}, flat.options());
  kept.copy_(at::where(sent, zero, flat));
  flat.copy_(at::where(sent, flat, zero));
}

} // namespace

const Stats& ProcessGroupFused::stats() {
  cuda_->report_sums();
  return stats_;
}

void ProcessGroupFused::reset_stats() {
  cuda_->report_sums();
  stats_.clear();
}

ProcessGroupFused::WorkPtr ProcessGroupFused::sparse_on_gpu(
    const at::Tensor& tensor,
    const cuda::CudaEngine::SparseCall& call,
    OpCode named,
    std::chrono::milliseconds timeout,
    bool async_op) {
  constexpr const char* title = "fused:sparse_all_reduce";
  check_open(title);
  check_not_coalescing(title);
  const auto report = [this,
                       named,
                       shape = static_cast<uint64_t>(call.count),
                       dtype =
                           call.dtype](const CudaGroup::SparseReport& report) {
    stats_.add(
        named,
        report.skipped ? DataPath::kSkipping : DataPath::kDelegated,
        {report.bytes_sent,
         report.bytes_received,
         0,
         report.blocks,
         report.blocks_present,
         report.blocks_union});
    if (named == OpCode::kAllReduce && cuda_skip_.mode == BlockSkip::kAuto &&
        report.blocks != 0) {
      const std::lock_guard<std::mutex> lock(cuda_skip_mutex_);
      cuda_skip_.estimates.observe(
          shape,
          dtype,
          double(report.blocks_union) / double(report.blocks),
          kCudaSkipLimit);
    }
  };
  return remember(
      cuda().sparse_all_reduce(tensor, call, title, timeout, async_op, report));
}

bool ProcessGroupFused::skip_on_gpu(
    const Tensors& tensors,
    const c10d::AllreduceOptions& opts,
    WorkPtr& work) {
  if (cuda_skip_.mode == BlockSkip::kOff || is_coalescing() ||
      tensors.size() != 1 || tensors[0].layout() != at::kStrided ||
      !tensors[0].is_non_overlapping_and_dense() ||
      to_dtype(tensors[0].scalar_type()) == DType::kOpaque ||
      opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM) {
    return false;
  }
  check_open("fused:all_reduce");
  const at::Tensor& tensor = tensors[0];
  const auto args =
      to_reduce_args(opts.reduceOp, tensor.scalar_type(), getSize());
  const bool adapts = cuda_skip_.mode == BlockSkip::kAuto;
  const auto call = sparse_call(
      tensor, args, cuda_skip_.block, adapts ? kCudaSkipLimit : kNoLimit);
  // A graph would replay what its capture found, but for sums over the arenas,
  // which look each time.
  if (cuda().capturing(tensor) && (adapts || !cuda().can_sum_directly(call))) {
    return false;
  }
  if (adapts) {
    cuda().report_sums(); // so that all ranks know the same
  }
  {
    const std::lock_guard<std::mutex> lock(cuda_skip_mutex_);
    const auto choice =
        select_skip(cuda_skip_, getSize(), call.count, tensor.nbytes(), args);
    if (choice != DensityEstimates::Choice::kSkip) {
      // Here what ranks call differently ends the group, so calls count.
      count_dense(cuda_skip_, getSize(), call.count, tensor.nbytes(), args);
    }
    if (choice == DensityEstimates::Choice::kDense) {
      return false;
    }
  }
  work = sparse_on_gpu(
      tensor, call, OpCode::kAllReduce, timeout_or(opts.timeout), opts.asyncOp);
  return true;
}

ProcessGroupFused::WorkPtr ProcessGroupFused::sparse_all_reduce(
    const at::Tensor& tensor,
    const c10d::ReduceOp& op,
    int64_t block_size,
    double threshold,
    const std::optional<at::Tensor>& residual,
    bool async_op) {
  const Call call{
      c10d::OpType::ALLREDUCE,
      "fused:sparse_all_reduce",
      timeout_.load(),
      async_op};
  check_dense("sparse_all_reduce", tensor);
  const SparseOptions options =
      sparse_options(tensor, block_size, threshold, residual);
  const auto args = to_reduce_args(op, tensor.scalar_type(), getSize());
  translate([&] { check_can_skip(OpCode::kSparseAllReduce, args); });
  if (on_gpu(tensor)) {
    TORCH_CHECK_VALUE(
        tensor.is_non_overlapping_and_dense(),
        "fused: sparse_all_reduce: a tensor on a GPU must be dense in memory; "
        "call contiguous() first");
    if (residual) {
      split_residual(tensor, *residual, options);
    }
    return sparse_on_gpu(
        tensor,
        sparse_call(tensor, args, options.block, kNoLimit),
        OpCode::kSparseAllReduce,
        call.timeout,
        async_op);
  }
  check_tensor("sparse_all_reduce", tensor);
  // The closures keep the residual.
  if (spans_hosts()) {
    return enqueue(
        call,
        {tensor},
        {tensor},
        [this, tensor, residual, args, options, timeout = call.timeout](
            uint64_t ticket) {
          NetContext ctx = net_context(ticket, timeout);
          const Flat flat = Flat::inout(tensor);
          net_sparse_all_reduce(ctx, flat.reduce_tensor(), args, options);
          stats_.add(OpCode::kSparseAllReduce, DataPath::kSkipping, ctx.moved);
          flat.finish();
        });
  }
  return run(
      call,
      {tensor},
      {tensor},
      [tensor, residual, args, options](Context& ctx) {
        const Flat flat = Flat::inout(tensor);
        fusedpg::sparse_all_reduce(ctx, {flat.reduce_tensor()}, args, options);
        flat.finish();
      });
}

bool ProcessGroupFused::skip_between_hosts(
    uint64_t ticket,
    std::chrono::milliseconds timeout,
    const at::Tensor& flat,
    const c10d::ReduceOp& op) {
  using Choice = DensityEstimates::Choice;
  const auto args = to_reduce_args(op, flat.scalar_type(), getSize());
  const auto shape = static_cast<uint64_t>(flat.numel());
  const Choice choice =
      select_skip(net_skip_, getSize(), shape, flat.nbytes(), args);
  const ReduceTensor tensor{flat.data_ptr(), static_cast<size_t>(flat.numel())};
  // What Gloo's ring would move.
  const uint64_t bytes =
      2 * flat.nbytes() * static_cast<uint64_t>(getSize() - 1) / getSize();
  const auto dense = [&] {
    count_dense(net_skip_, getSize(), shape, flat.nbytes(), args);
    stats_.add(OpCode::kAllReduce, DataPath::kDelegated, {bytes, bytes});
  };
  if (choice == Choice::kDense) {
    dense();
    return false;
  }
  NetContext ctx = net_context(ticket, timeout);
  const auto observe = [&](double density) {
    if (net_skip_.mode == BlockSkip::kAuto) {
      net_skip_.estimates.observe(shape, args.dtype, density, kNetSkipLimit);
    }
  };
  if (choice == Choice::kSkip) {
    net_sparse_all_reduce(ctx, tensor, args, {net_skip_.block});
    observe(double(ctx.moved.blocks_union) / double(ctx.moved.blocks));
    stats_.add(OpCode::kAllReduce, DataPath::kSkipping, ctx.moved);
    return true;
  }
  const double density =
      net_sampled_density(ctx, tensor, args.dtype, net_skip_.block);
  dense(); // a mismatch has raised, on all ranks
  observe(density);
  return false;
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allreduce_sparse(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::allreduce_sparse, tensors, opts);
  }
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_VALUE(
        t.layout() == at::kSparse && t.device().is_cpu(),
        "fused: all_reduce: tensors of one call must all be sparse (COO) and "
        "on the CPU, found ",
        t.layout(),
        " on ",
        t.device());
  }
  check_alike("all_reduce", tensors);
  const Call call{
      c10d::OpType::_ALLREDUCE_SPARSE,
      "fused:sparse_all_reduce",
      timeout_or(opts.timeout),
      opts.asyncOp};
  const bool mean = opts.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(
      mean || opts.reduceOp.op_ == c10d::ReduceOp::SUM,
      "fused: all_reduce of sparse tensors: only SUM and AVG");
  if (spans_hosts()) {
    TORCH_CHECK_VALUE(!mean, "fused: Gloo's sparse all_reduce has only SUM");
    log_once("all_reduce of sparse tensors between hosts uses Gloo");
    return run_delegated(
        call, tensors, tensors, [this, tensors, opts](auto& gloo) mutable {
          stats_.add(OpCode::kAllReduce, DataPath::kDelegated, {});
          return gloo.allreduce(tensors, opts);
        });
  }
  return run(call, tensors, tensors, [tensors, mean](Context& ctx) {
    const c10::NoGradGuard no_grad;
    at::Tensor mine = tensors[0].detach().coalesce();
    for (size_t i = 1; i < tensors.size(); ++i) {
      mine = (mine + tensors[i].detach()).coalesce();
    }
    const Gathered all = gather_entries(ctx, mine);
    at::Tensor sum = add_entries(mine, all);
    if (mean) {
      sum = sum.is_floating_point() || sum.is_complex()
          ? sum / ctx.size()
          : at::div(sum, ctx.size(), "trunc");
    }
    for (const at::Tensor& t : tensors) {
      t.copy_(sum); // what detach() gives has coordinates of its own
    }
    OpStats stats;
    for (int p = 0; p < ctx.size(); ++p) {
      const size_t bytes = all.indices[p].nbytes() + all.values[p].nbytes();
      if (p == ctx.rank()) {
        stats.bytes_sent = bytes * static_cast<size_t>(ctx.size() - 1);
      } else {
        stats.bytes_received += bytes;
      }
    }
    ctx.stats.add(OpCode::kAllReduce, DataPath::kCoordinates, stats);
  });
}

} // namespace fusedpg
