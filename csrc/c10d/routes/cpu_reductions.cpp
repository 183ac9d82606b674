// The collectives that reduce, on CPU tensors.

#include "c10d/coo.hpp"
#include "c10d/routes/cpu.hpp"
#include "c10d/tensor_memory.hpp"
#include "collectives/perform.hpp"

namespace fusedpg {
namespace {

Call reduction_call(
    OpCode op,
    const kernels::ReduceArgs& args,
    Buffers inputs,
    Buffers outputs = {},
    int root = -1) {
  return {op, args.dtype, inputs, outputs, root, args.op, args.factor};
}

void check_reduced(const Tensors& tensors) {
  for (const at::Tensor& t : tensors) {
    check_tensor("all_reduce", t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == tensors[0].scalar_type(),
        formatted(
            "fused: all_reduce: tensors of one call must have one dtype, found "
            "{} and {}",
            tensors[0].scalar_type(),
            t.scalar_type()));
  }
}

// An all_reduce of several tensors: of each, or of all as contributions to one
// result, which comes to them all.
struct AllReduce {
  const kernels::Table& kernels;
  Tensors tensors;
  kernels::ReduceArgs reduction;
  bool together;

  void operator()(Way& way) const {
    if (tensors.size() == 1) { // without lists of one
      const Flat flat = Flat::inout(tensors[0]);
      const Buffer one = flat.buffer();
      perform(way, reduction_call(OpCode::kAllReduce, reduction, single(one)));
      flat.finish();
      return;
    }
    const std::vector<Flat> flats = together
        ? std::vector<Flat>{folded(kernels, tensors, reduction)}
        : flat_inouts(tensors);
    const std::vector<Buffer> all = buffers(flats);
    for (size_t i = 0; i < all.size(); i += kMaxStepTensors) {
      const size_t num = std::min(all.size() - i, kMaxStepTensors);
      if (num != all.size()) {
        way.begin_item(i, all.size());
      }
      const Buffers some = Buffers(all).subspan(i, num);
      perform(way, reduction_call(OpCode::kAllReduce, reduction, some));
    }
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

void CpuRoute::refuse(const std::string& reason) {
  const CallInfo call =
      group_.info(c10d::OpType::UNKNOWN, "fused:refusal", /*async_op=*/true);
  ++group_.refusals;
  // Counted down with the operation, also where it is never begun.
  const std::shared_ptr<void> end(
      nullptr, [this](void*) { --group_.refusals; });
  run(call, {}, {}, [reason, end](Way&) {
    throw Error(ErrorKind::kInvalid, reason);
  });
}

kernels::ReduceArgs CpuRoute::reduction_of(
    const c10d::ReduceOp& op,
    at::ScalarType type) const {
  TORCH_CHECK(
      group_.dialect != Dialect::kGloo || op.op_ != c10d::ReduceOp::AVG ||
          !c10::isIntegralType(type, /*includeBool=*/true),
      formatted(
          "fused: AVG of integers, served as gloo: result type Float can't be "
          "cast to the desired output type {}",
          type));
  return to_reduce_args(op, type, size_);
}

WorkPtr CpuRoute::allreduce(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  if (tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, opts);
  }
  check_alike("all_reduce", tensors);
  return all_reduce_dense(tensors, opts, /*together=*/true);
}

WorkPtr CpuRoute::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  return all_reduce_dense(tensors, opts, /*together=*/false);
}

WorkPtr CpuRoute::all_reduce_dense(
    const Tensors& tensors,
    const c10d::AllreduceOptions& opts,
    bool together) {
  check_reduced(tensors);
  return run(
      group_.info(c10d::OpType::ALLREDUCE, "fused:all_reduce", opts),
      tensors,
      tensors,
      AllReduce{
          group_.kernels,
          tensors,
          reduction_of(opts.reduceOp, tensors[0].scalar_type()),
          together});
}

WorkPtr CpuRoute::allreduce_sparse(
    Tensors& tensors,
    const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: all_reduce: no tensor given");
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_VALUE(
        t.layout() == at::kSparse && t.device().is_cpu(),
        formatted(
            "fused: all_reduce: tensors of one call must all be sparse (COO) "
            "and on the CPU, found {} on {}",
            t.layout(),
            t.device()));
    check_memory("all_reduce", t._indices());
    check_memory("all_reduce", t._values());
  }
  check_alike("all_reduce", tensors);
  const CallInfo call = group_.info(
      c10d::OpType::_ALLREDUCE_SPARSE, "fused:sparse_all_reduce", opts);
  const bool mean = opts.reduceOp.op_ == c10d::ReduceOp::AVG;
  TORCH_CHECK_VALUE(
      mean || opts.reduceOp.op_ == c10d::ReduceOp::SUM,
      "fused: all_reduce of sparse tensors: only SUM and AVG");
  return run(call, tensors, tensors, [tensors, mean](Way& way) {
    const c10::NoGradGuard no_grad;
    at::Tensor mine = tensors[0].detach().coalesce();
    for (size_t i = 1; i < tensors.size(); ++i) {
      mine = (mine + tensors[i].detach()).coalesce();
    }
    const at::Tensor sum = coo_all_reduce(way, mine, mean);
    for (const at::Tensor& t : tensors) {
      t.copy_(sum); // what detach() gives has coordinates of its own
    }
  });
}

WorkPtr CpuRoute::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const CallInfo call = group_.info(c10d::OpType::REDUCE, "fused:reduce", opts);
  check_count("reduce", "tensor", tensors.size(), 1);
  check_tensor("reduce", tensors[0]);
  group_.check_root("reduce", opts.rootRank);
  const auto reduction = reduction_of(opts.reduceOp, tensors[0].scalar_type());
  return run(
      call,
      tensors,
      tensors,
      [t = tensors[0],
       reduction,
       root = static_cast<int>(opts.rootRank),
       me = rank_](Way& way) {
        const Flat flat = Flat::inout(t);
        const Buffer tensor = flat.buffer();
        perform(
            way,
            reduction_call(
                OpCode::kReduce, reduction, single(tensor), {}, root));
        if (root == me) {
          flat.finish();
        }
      });
}

WorkPtr CpuRoute::reduce_scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ReduceScatterOptions& opts) {
  check_count("reduce_scatter", "output tensor", outputs.size(), 1);
  check_count("reduce_scatter", "list of inputs", inputs.size(), 1);
  check_count(
      "reduce_scatter", "input tensors (one a rank)", inputs[0].size(), size_);
  const CallInfo call =
      group_.info(c10d::OpType::REDUCE_SCATTER, "fused:reduce_scatter", opts);
  const at::Tensor& output = outputs[0];
  check_tensor("reduce_scatter", output);
  for (const at::Tensor& t : inputs[0]) {
    check_tensor("reduce_scatter", t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == output.scalar_type(),
        formatted(
            "fused: reduce_scatter: output is {}, an input is {}",
            output.scalar_type(),
            t.scalar_type()));
  }
  const auto reduction = reduction_of(opts.reduceOp, output.scalar_type());
  return run(
      call,
      inputs[0],
      outputs,
      [output, list = inputs[0], reduction, me = rank_](Way& way) {
        const Flat out = Flat::output(output, need_apart({output}, list, me));
        const auto ins = flat_inputs(list);
        perform(
            way,
            reduction_call(
                OpCode::kReduceScatter,
                reduction,
                buffers(ins),
                single(out.buffer())));
        out.finish();
      });
}

WorkPtr CpuRoute::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr CpuRoute::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  check_count("reduce_scatter_tensor", "inputs", inputs.size(), outputs.size());
  const CallInfo call = group_.info(
      c10d::OpType::_REDUCE_SCATTER_BASE, "fused:_reduce_scatter_base", opts);
  TORCH_CHECK_VALUE(
      !outputs.empty(), "fused: reduce_scatter_tensor: no tensor given");
  std::vector<kernels::ReduceArgs> reductions;
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_tensor("reduce_scatter_tensor", outputs[i]);
    check_tensor("reduce_scatter_tensor", inputs[i]);
    TORCH_CHECK_VALUE(
        inputs[i].scalar_type() == outputs[i].scalar_type(),
        formatted(
            "fused: reduce_scatter_tensor: output is {}, input is {}",
            outputs[i].scalar_type(),
            inputs[i].scalar_type()));
    TORCH_CHECK_VALUE(
        inputs[i].numel() == outputs[i].numel() * size_,
        formatted(
            "fused: reduce_scatter_tensor: the input must have world_size ({}) "
            "times the elements of the output, found {} and {}",
            size_,
            inputs[i].numel(),
            outputs[i].numel()));
    reductions.push_back(reduction_of(opts.reduceOp, outputs[i].scalar_type()));
  }
  return run(
      call,
      inputs,
      outputs,
      [outputs, inputs, reductions, me = rank_, size = size_](Way& way) {
        for (size_t i = 0; i < outputs.size(); ++i) {
          way.begin_item(i, outputs.size());
          const Flat out =
              Flat::output(outputs[i], need_apart(inputs[i], outputs[i], me));
          const Flat in = Flat::input(inputs[i]);
          perform(
              way,
              reduction_call(
                  OpCode::kReduceScatter,
                  reductions[i],
                  slices(in, size),
                  single(out.buffer())));
          out.finish();
        }
      });
}

WorkPtr CpuRoute::barrier(const c10d::BarrierOptions& opts) {
  const CallInfo call =
      group_.info(c10d::OpType::BARRIER, "fused:barrier", opts);
  return run(
      call, {}, {}, [](Way& way) { perform(way, {.op = OpCode::kBarrier}); });
}

} // namespace fusedpg
