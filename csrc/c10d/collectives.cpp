// The methods of ProcessGroupFused that reduce.

#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"
#include "collectives/monitored_barrier.hpp"

namespace fusedpg {
namespace {

using Tensors = ProcessGroupFused::Tensors;

// Gloo knows neither AVG nor PREMUL_SUM: both are SUM with a factor, before or
// after.
struct DelegatedReduction {
  c10d::ReduceOp op;
  double before = 1.0;
  int64_t divisor = 1;

  DelegatedReduction(const c10d::ReduceOp& given, at::ScalarType type, int size)
      : op(given) {
    if (op.op_ == c10d::ReduceOp::AVG) {
      divisor = size;
      op = c10d::ReduceOp::SUM;
    } else if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      before = to_reduce_args(given, type, size).factor;
      op = c10d::ReduceOp::SUM;
    }
  }
  void prepare(at::Tensor& t) const {
    if (before != 1.0) {
      t.mul_(before);
    }
  }
  void finish(at::Tensor& t) const {
    if (divisor == 1) {
      return;
    }
    if (t.is_floating_point() || t.is_complex()) {
      t.div_(divisor);
    } else {
      t.div_(divisor, "trunc");
    }
  }
};

// The tensors of one all_reduce: what takes part in it, and how its result
// comes to them.
struct Joined {
  const kernels::Table& kernels;
  Tensors tensors;
  kernels::ReduceArgs args;
  bool together; // all of them are one contribution

  std::vector<Flat> begin() const {
    if (together) {
      return {folded(kernels, tensors, args)};
    }
    return flat_inouts(tensors);
  }
  void end(const std::vector<Flat>& flats) const {
    if (flats.size() == tensors.size()) {
      finish(flats);
      return;
    }
    for (const at::Tensor& t : tensors) {
      flats[0].give(t);
    }
  }
};

} // namespace

ProcessGroupFused::WorkPtr ProcessGroupFused::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  if (on_gpu(tensors)) {
    WorkPtr work;
    if (skip_on_gpu(tensors, opts, work)) {
      return work;
    }
    return on_nccl(tensors, &Backend::allreduce, tensors, opts);
  }
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  if (tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  check_alike("all_reduce", tensors);
  return reduce_all(tensors, opts, /*together=*/true);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::allreduce_coalesced, tensors, opts);
  }
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  return reduce_all(tensors, opts, /*together=*/false);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::reduce_all(
    const Tensors& tensors,
    const c10d::AllreduceOptions& opts,
    bool together) {
  const Call call{
      c10d::OpType::ALLREDUCE,
      "fused:all_reduce",
      timeout_or(opts.timeout),
      opts.asyncOp};
  for (const at::Tensor& t : tensors) {
    check_tensor("all_reduce", t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == tensors[0].scalar_type(),
        "fused: all_reduce: tensors of one call must have one dtype, found ",
        tensors[0].scalar_type(),
        " and ",
        t.scalar_type());
  }
  const auto type = tensors[0].scalar_type();
  const auto args = to_reduce_args(opts.reduceOp, type, getSize());
  const Joined joined{kernels_, tensors, args, together};
  if (spans_hosts()) {
    const DelegatedReduction reduction(opts.reduceOp, type, getSize());
    return enqueue(
        call,
        tensors,
        tensors,
        [this, joined, opts, reduction, timeout = call.timeout](
            uint64_t ticket) {
          const std::vector<Flat> flats = joined.begin();
          for (const Flat& flat : flats) {
            at::Tensor t = flat.tensor().detach();
            if (!skip_between_hosts(ticket, timeout, t, opts.reduceOp)) {
              reduction.prepare(t);
              c10d::AllreduceOptions one = opts;
              one.reduceOp = reduction.op;
              Tensors list{t};
              delegate().allreduce(list, one)->wait();
              reduction.finish(t);
            }
          }
          joined.end(flats);
        });
  }
  return run(call, tensors, tensors, [joined](Context& ctx) {
    const std::vector<Flat> flats = joined.begin();
    all_reduce(ctx, reduce_tensors(flats), joined.args);
    joined.end(flats);
  });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::reduce(
    Tensors& tensors,
    const c10d::ReduceOptions& opts) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::reduce, tensors, opts);
  }
  const Call call{
      c10d::OpType::REDUCE,
      "fused:reduce",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("reduce", "tensor", tensors.size(), 1);
  check_tensor("reduce", tensors[0]);
  check_root("reduce", opts.rootRank);
  const auto type = tensors[0].scalar_type();
  if (spans_hosts()) {
    const DelegatedReduction reduction(opts.reduceOp, type, getSize());
    return run_delegated(
        call,
        tensors,
        tensors,
        [tensors, opts, reduction, me = getRank()](auto& gloo) {
          // Gloo uses other ranks' tensors as scratch space: give it a copy.
          const Flat copy = Flat::inout(tensors[0], /*apart=*/true);
          at::Tensor flat = copy.tensor().detach();
          reduction.prepare(flat);
          c10d::ReduceOptions one = opts;
          one.reduceOp = reduction.op;
          Tensors list{flat};
          gloo.reduce(list, one)->wait();
          if (opts.rootRank == me) {
            reduction.finish(flat);
            copy.finish();
          }
          return WorkPtr();
        });
  }
  const auto args = to_reduce_args(opts.reduceOp, type, getSize());
  return run(
      call,
      tensors,
      tensors,
      [t = tensors[0], args, root = opts.rootRank](Context& ctx) {
        const Flat flat = Flat::inout(t);
        const ReduceTensor span = flat.reduce_tensor();
        fusedpg::reduce(
            ctx, span.data, span.count, args, static_cast<int>(root));
        if (root == ctx.rank()) {
          flat.finish();
        }
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::reduce_scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ReduceScatterOptions& opts) {
  if (on_gpu(outputs)) {
    return on_nccl(outputs, &Backend::reduce_scatter, outputs, inputs, opts);
  }
  check_count("reduce_scatter", "output tensor", outputs.size(), 1);
  check_count("reduce_scatter", "list of inputs", inputs.size(), 1);
  check_count(
      "reduce_scatter", "input tensors (one a rank)", inputs[0].size(), size_);
  const Call call{
      c10d::OpType::REDUCE_SCATTER,
      "fused:reduce_scatter",
      timeout_or(opts.timeout),
      opts.asyncOp};
  const at::Tensor& output = outputs[0];
  check_tensor("reduce_scatter", output);
  for (const at::Tensor& t : inputs[0]) {
    check_tensor("reduce_scatter", t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == output.scalar_type(),
        "fused: reduce_scatter: output is ",
        output.scalar_type(),
        ", an input is ",
        t.scalar_type());
  }
  const auto type = output.scalar_type();
  if (spans_hosts()) {
    const DelegatedReduction reduction(opts.reduceOp, type, getSize());
    return run_delegated(
        call,
        inputs[0],
        outputs,
        [output, list = inputs[0], opts, reduction, me = getRank()](
            auto& gloo) {
          // One all_reduce of everything: Gloo's own is no more, and this
          // works for uneven sizes.
          std::vector<at::Tensor> parts;
          for (const at::Tensor& t : list) {
            parts.push_back(Flat::input(t).tensor().detach().view({-1}));
          }
          at::Tensor flat = at::cat(parts);
          reduction.prepare(flat);
          c10d::AllreduceOptions all;
          all.reduceOp = reduction.op;
          all.timeout = opts.timeout;
          Tensors one{flat};
          gloo.allreduce(one, all)->wait();
          int64_t offset = 0;
          for (int p = 0; p < me; ++p) {
            offset += list[p].numel();
          }
          at::Tensor mine = flat.narrow(0, offset, list[me].numel());
          reduction.finish(mine);
          Flat::input(mine).give(output);
          return WorkPtr();
        });
  }
  const auto args = to_reduce_args(opts.reduceOp, type, getSize());
  return run(
      call, inputs[0], outputs, [output, list = inputs[0], args](Context& ctx) {
        const Flat out =
            Flat::output(output, need_apart({output}, list, ctx.rank()));
        const auto ins = flat_inputs(list);
        fusedpg::reduce_scatter(
            ctx, out.reduce_tensor(), reduce_tensors(ins), args);
        out.finish();
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  if (on_gpu(output)) {
    return on_nccl(output, &Backend::_reduce_scatter_base, output, input, opts);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  if (on_gpu(outputs)) {
    return on_nccl(
        outputs,
        &Backend::reduce_scatter_tensor_coalesced,
        outputs,
        inputs,
        opts);
  }
  check_count("reduce_scatter_tensor", "inputs", inputs.size(), outputs.size());
  const Call call{
      c10d::OpType::_REDUCE_SCATTER_BASE,
      "fused:_reduce_scatter_base",
      timeout_or(opts.timeout),
      opts.asyncOp};
  TORCH_CHECK_VALUE(
      !outputs.empty(), "fused: reduce_scatter_tensor: no tensor given");
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_tensor("reduce_scatter_tensor", outputs[i]);
    check_tensor("reduce_scatter_tensor", inputs[i]);
    TORCH_CHECK_VALUE(
        inputs[i].scalar_type() == outputs[i].scalar_type(),
        "fused: reduce_scatter_tensor: output is ",
        outputs[i].scalar_type(),
        ", input is ",
        inputs[i].scalar_type());
    TORCH_CHECK_VALUE(
        inputs[i].numel() == outputs[i].numel() * getSize(),
        "fused: reduce_scatter_tensor: the input must have world_size (",
        getSize(),
        ") times the elements of the output, found ",
        inputs[i].numel(),
        " and ",
        outputs[i].numel());
  }
  if (spans_hosts()) {
    // Issued in order; the last one done means all are.
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); ++i) {
      Tensors one{outputs[i]};
      auto parts =
          at::chunk(Flat::input(inputs[i]).tensor().view({-1}), getSize());
      TensorLists list{parts};
      list[0].resize(getSize(), at::empty({0}, inputs[i].options()));
      last = reduce_scatter(one, list, opts);
    }
    return last;
  }
  return run(
      call,
      inputs,
      outputs,
      [outputs, inputs, op = opts.reduceOp, size = getSize()](Context& ctx) {
        for (size_t i = 0; i < outputs.size(); ++i) {
          ctx.begin_item(i, outputs.size());
          const Flat out = Flat::output(
              outputs[i], need_apart(inputs[i], outputs[i], ctx.rank()));
          const Flat in = Flat::input(inputs[i]);
          const size_t bytes = outputs[i].nbytes();
          std::vector<ReduceTensor> parts;
          for (int p = 0; p < size; ++p) {
            parts.push_back(
                {static_cast<char*>(in.span().data) + p * bytes,
                 static_cast<size_t>(outputs[i].numel())});
          }
          fusedpg::reduce_scatter(
              ctx,
              out.reduce_tensor(),
              parts,
              to_reduce_args(op, outputs[i].scalar_type(), size));
          out.finish();
        }
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::barrier(
    const c10d::BarrierOptions& opts) {
  if (opts.device && opts.device->is_cuda()) {
    return on_nccl(
        at::empty({0}, at::TensorOptions().device(*opts.device)),
        &Backend::barrier,
        opts);
  }
  const Call call{
      c10d::OpType::BARRIER,
      "fused:barrier",
      timeout_or(opts.timeout),
      opts.asyncOp};
  if (spans_hosts()) {
    return run_delegated(
        call, {}, {}, [opts](auto& gloo) { return gloo.barrier(opts); });
  }
  return run(call, {}, {}, [](Context& ctx) { fusedpg::barrier(ctx); });
}

void ProcessGroupFused::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  check_open("fused:monitored_barrier");
  if (spans_hosts()) {
    delegate().monitoredBarrier(opts, wait_all_ranks);
    return;
  }
  translate([&] {
    engine_->check_failed();
    // Unlike elsewhere, a timeout of zero is one.
    const auto timeout =
        opts.timeout.count() >= 0 ? opts.timeout : timeout_.load();
    monitored_barrier(engine_->domain(), timeout, wait_all_ranks);
  });
}

} // namespace fusedpg
