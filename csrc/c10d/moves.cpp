// The methods of ProcessGroupFused that only move data.

#include <algorithm>
#include <numeric>

#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

void check_same_type(
    const char* op,
    const std::vector<at::Tensor>& tensors,
    at::ScalarType type) {
  for (const at::Tensor& t : tensors) {
    check_tensor(op, t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == type,
        "fused: ",
        op,
        ": tensors must have one dtype, found ",
        type,
        " and ",
        t.scalar_type());
  }
}

void check_splits(
    const char* op,
    const at::Tensor& t,
    const std::vector<int64_t>& splits,
    int size) {
  const int64_t rows = t.dim() ? t.size(0) : 0;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        t.numel() == 0 || rows % size == 0,
        "fused: ",
        op,
        ": the first dimension (",
        rows,
        ") is not divisible by the world size (",
        size,
        "); give the split sizes");
    return;
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == size &&
          *std::min_element(splits.begin(), splits.end()) >= 0 &&
          std::accumulate(splits.begin(), splits.end(), int64_t(0)) == rows,
      "fused: ",
      op,
      ": ",
      splits.size(),
      " split sizes must be as many as ranks (",
      size,
      "), not negative, and sum to the first dimension (",
      rows,
      ")");
}

// The parts of a contiguous tensor along its first dimension.
std::vector<Span> split_spans(
    const Flat& flat,
    const at::Tensor& t,
    const std::vector<int64_t>& splits,
    int size) {
  const Span whole = flat.span();
  const size_t rows = t.dim() ? static_cast<size_t>(t.size(0)) : 0;
  const size_t row = rows ? whole.bytes / rows : 0;
  std::vector<Span> parts;
  size_t offset = 0;
  for (int p = 0; p < size; ++p) {
    const size_t bytes = splits.empty() ? whole.bytes / size
                                        : static_cast<size_t>(splits[p]) * row;
    parts.push_back({static_cast<char*>(whole.data) + offset, bytes});
    offset += bytes;
  }
  return parts;
}

} // namespace

ProcessGroupFused::WorkPtr ProcessGroupFused::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& opts) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::broadcast, tensors, opts);
  }
  const Call call{
      c10d::OpType::BROADCAST,
      "fused:broadcast",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("broadcast", "tensor", tensors.size(), 1);
  check_tensor("broadcast", tensors[0]);
  check_root("broadcast", opts.rootRank);
  if (spans_hosts()) {
    return run_delegated(
        call, tensors, tensors, [tensors, opts](auto& gloo) mutable {
          return gloo.broadcast(tensors, opts);
        });
  }
  return run(
      call,
      tensors,
      tensors,
      [t = tensors[0], root = static_cast<int>(opts.rootRank)](Context& ctx) {
        const Flat flat = Flat::inout(t);
        fusedpg::broadcast(ctx, flat.span(), to_dtype(t.scalar_type()), root);
        if (ctx.rank() != root) {
          flat.finish();
        }
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allgather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  if (on_gpu(inputs)) {
    return on_nccl(inputs, &Backend::allgather, outputs, inputs, opts);
  }
  check_count("all_gather", "input tensor", inputs.size(), 1);
  return gather_lists(outputs, inputs, opts);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allgather_coalesced(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  if (on_gpu(inputs)) {
    return on_nccl(
        inputs, &Backend::allgather_coalesced, outputs, inputs, opts);
  }
  // Here outputs[p] holds what comes from rank p, a tensor for each input.
  check_count(
      "all_gather_coalesced",
      "lists of outputs (one a rank)",
      outputs.size(),
      size_);
  TensorLists by_input(inputs.size());
  for (const Tensors& list : outputs) {
    check_count(
        "all_gather_coalesced",
        "outputs in a list (one an input)",
        list.size(),
        inputs.size());
    for (size_t i = 0; i < list.size(); ++i) {
      by_input[i].push_back(list[i]);
    }
  }
  return gather_lists(by_input, inputs, opts);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::gather_lists(
    const TensorLists& outputs,
    const Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  const Call call{
      c10d::OpType::ALLGATHER,
      "fused:all_gather",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("all_gather", "lists of outputs", outputs.size(), inputs.size());
  TORCH_CHECK_VALUE(!inputs.empty(), "fused: all_gather: no tensor given");
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("all_gather", inputs[i]);
    check_count(
        "all_gather", "output tensors (one a rank)", outputs[i].size(), size_);
    check_same_type("all_gather", outputs[i], inputs[i].scalar_type());
    TORCH_CHECK_VALUE(
        outputs[i][rank_].numel() == inputs[i].numel(),
        "fused: all_gather: this rank's output has ",
        outputs[i][rank_].numel(),
        " elements, its input ",
        inputs[i].numel());
    all.insert(all.end(), outputs[i].begin(), outputs[i].end());
  }
  if (spans_hosts()) {
    // Broadcasts, so that sizes may differ from rank to rank.
    return run_delegated(
        call,
        inputs,
        all,
        [outputs, inputs, opts, size = getSize(), me = getRank()](auto& gloo) {
          for (size_t i = 0; i < inputs.size(); ++i) {
            for (int p = 0; p < size; ++p) {
              const at::Tensor& out = outputs[i][p];
              at::Tensor flat = p == me ? inputs[i].detach().contiguous()
                                        : at::empty(out.sizes(), out.options());
              if (flat.numel() != 0) {
                c10d::BroadcastOptions from;
                from.rootRank = p;
                from.timeout = opts.timeout;
                Tensors one{flat};
                gloo.broadcast(one, from)->wait();
              }
              out.detach().copy_(flat.view(out.sizes()));
            }
          }
          return WorkPtr();
        });
  }
  return run(call, inputs, all, [outputs, inputs](Context& ctx) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      ctx.begin_item(i, inputs.size());
      const auto outs = flat_outputs(outputs[i]);
      const Flat in = Flat::input(inputs[i]);
      all_gather(
          ctx, spans(outs), in.span(), to_dtype(inputs[i].scalar_type()));
      finish(outs);
    }
  });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& opts) {
  if (on_gpu(output)) {
    return on_nccl(output, &Backend::_allgather_base, output, input, opts);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  if (on_gpu(outputs)) {
    return on_nccl(
        outputs,
        &Backend::allgather_into_tensor_coalesced,
        outputs,
        inputs,
        opts);
  }
  const Call call{
      c10d::OpType::_ALLGATHER_BASE,
      "fused:_all_gather_base",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count(
      "all_gather_into_tensor", "outputs", outputs.size(), inputs.size());
  TORCH_CHECK_VALUE(
      !inputs.empty(), "fused: all_gather_into_tensor: no tensor given");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("all_gather_into_tensor", inputs[i]);
    check_same_type(
        "all_gather_into_tensor", {outputs[i]}, inputs[i].scalar_type());
    TORCH_CHECK_VALUE(
        outputs[i].numel() == inputs[i].numel() * getSize(),
        "fused: all_gather_into_tensor: the output must have world_size (",
        getSize(),
        ") times the elements of the input, found ",
        outputs[i].numel(),
        " and ",
        inputs[i].numel());
  }
  if (spans_hosts()) {
    return run_delegated(
        call, inputs, outputs, [outputs, inputs, opts](auto& gloo) mutable {
          for (size_t i = 0; i < inputs.size(); ++i) {
            at::Tensor in = inputs[i].contiguous();
            at::Tensor out = outputs[i].is_contiguous()
                ? outputs[i]
                : at::empty(outputs[i].sizes(), outputs[i].options());
            gloo._allgather_base(out, in, opts)->wait();
            if (!out.is_same(outputs[i])) {
              outputs[i].detach().copy_(out);
            }
          }
          return WorkPtr();
        });
  }
  return run(
      call, inputs, outputs, [outputs, inputs, size = getSize()](Context& ctx) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          ctx.begin_item(i, inputs.size());
          const Flat out = Flat::output(outputs[i]);
          const Flat in = Flat::input(inputs[i]);
          const Span input = in.span();
          std::vector<Span> parts;
          for (int p = 0; p < size; ++p) {
            parts.push_back(
                {static_cast<char*>(out.span().data) + p * input.bytes,
                 input.bytes});
          }
          all_gather(ctx, parts, input, to_dtype(inputs[i].scalar_type()));
          out.finish();
        }
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::gather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& opts) {
  if (on_gpu(inputs)) {
    return on_nccl(inputs, &Backend::gather, outputs, inputs, opts);
  }
  const Call call{
      c10d::OpType::GATHER,
      "fused:gather",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("gather", "input tensor", inputs.size(), 1);
  check_tensor("gather", inputs[0]);
  check_root("gather", opts.rootRank);
  const bool is_root = opts.rootRank == getRank();
  check_count(
      "gather",
      is_root ? "list of outputs on the root" : "lists of outputs off the root",
      outputs.size(),
      is_root ? 1 : 0);
  const Tensors list = is_root ? outputs[0] : Tensors();
  if (is_root) {
    check_count("gather", "output tensors (one a rank)", list.size(), size_);
    check_same_type("gather", list, inputs[0].scalar_type());
  }
  if (spans_hosts()) {
    return run_delegated(
        call, inputs, list, [outputs, inputs, opts](auto& gloo) mutable {
          return gloo.gather(outputs, inputs, opts);
        });
  }
  return run(
      call,
      inputs,
      list,
      [list, in = inputs[0], root = static_cast<int>(opts.rootRank)](
          Context& ctx) {
        const auto outs = flat_outputs(list);
        fusedpg::gather(
            ctx,
            spans(outs),
            Flat::input(in).span(),
            to_dtype(in.scalar_type()),
            root);
        finish(outs);
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ScatterOptions& opts) {
  if (on_gpu(outputs)) {
    return on_nccl(outputs, &Backend::scatter, outputs, inputs, opts);
  }
  const Call call{
      c10d::OpType::SCATTER,
      "fused:scatter",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("scatter", "output tensor", outputs.size(), 1);
  check_tensor("scatter", outputs[0]);
  check_root("scatter", opts.rootRank);
  const bool is_root = opts.rootRank == getRank();
  check_count(
      "scatter",
      is_root ? "list of inputs on the root" : "lists of inputs off the root",
      inputs.size(),
      is_root ? 1 : 0);
  const Tensors list = is_root ? inputs[0] : Tensors();
  if (is_root) {
    check_count("scatter", "input tensors (one a rank)", list.size(), size_);
    check_same_type("scatter", list, outputs[0].scalar_type());
  }
  if (spans_hosts()) {
    return run_delegated(
        call, list, outputs, [outputs, inputs, opts](auto& gloo) mutable {
          return gloo.scatter(outputs, inputs, opts);
        });
  }
  return run(
      call,
      list,
      outputs,
      [list, output = outputs[0], root = static_cast<int>(opts.rootRank)](
          Context& ctx) {
        const Flat out = Flat::output(output);
        const auto ins = flat_inputs(list);
        fusedpg::scatter(
            ctx, out.span(), spans(ins), to_dtype(output.scalar_type()), root);
        out.finish();
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  if (on_gpu(output)) {
    return on_nccl(
        output,
        &Backend::alltoall_base,
        output,
        input,
        output_splits,
        input_splits,
        opts);
  }
  const Call call{
      c10d::OpType::ALLTOALL_BASE,
      "fused:all_to_all",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_tensor("all_to_all_single", input);
  check_same_type("all_to_all_single", {output}, input.scalar_type());
  if (spans_hosts()) {
    return run_delegated(
        call,
        {input},
        {output},
        [output, input, output_splits, input_splits, opts](auto& gloo) mutable {
          return gloo.alltoall_base(
              output, input, output_splits, input_splits, opts);
        });
  }
  check_splits("all_to_all_single", output, output_splits, getSize());
  check_splits("all_to_all_single", input, input_splits, getSize());
  return run(
      call,
      {input},
      {output},
      [output, input, output_splits, input_splits](Context& ctx) {
        const Flat out = Flat::output(output);
        const Flat in = Flat::input(input);
        all_to_all(
            ctx,
            split_spans(out, output, output_splits, ctx.size()),
            split_spans(in, input, input_splits, ctx.size()),
            to_dtype(input.scalar_type()));
        out.finish();
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& opts) {
  if (on_gpu(outputs)) {
    return on_nccl(outputs, &Backend::alltoall, outputs, inputs, opts);
  }
  const Call call{
      c10d::OpType::ALLTOALL,
      "fused:all_to_all",
      timeout_or(opts.timeout),
      opts.asyncOp};
  check_count("all_to_all", "output tensors", outputs.size(), size_);
  check_count("all_to_all", "input tensors", inputs.size(), size_);
  check_same_type("all_to_all", inputs, inputs[0].scalar_type());
  check_same_type("all_to_all", outputs, inputs[0].scalar_type());
  if (spans_hosts()) {
    // As one flat exchange: Gloo has no list form.
    return run_delegated(
        call, inputs, outputs, [outputs, inputs, opts](auto& gloo) {
          std::vector<int64_t> in_splits;
          std::vector<int64_t> out_splits;
          std::vector<at::Tensor> parts;
          for (const at::Tensor& t : inputs) {
            in_splits.push_back(t.numel());
            parts.push_back(t.detach().reshape({-1}));
          }
          int64_t total = 0;
          for (const at::Tensor& t : outputs) {
            out_splits.push_back(t.numel());
            total += t.numel();
          }
          at::Tensor in = at::cat(parts);
          at::Tensor out = at::empty({total}, in.options());
          const auto sizes = out_splits; // Gloo empties what it is given
          gloo.alltoall_base(out, in, out_splits, in_splits, opts)->wait();
          const auto received = out.split_with_sizes(sizes);
          for (size_t p = 0; p < outputs.size(); ++p) {
            outputs[p].detach().copy_(received[p].view(outputs[p].sizes()));
          }
          return WorkPtr();
        });
  }
  return run(call, inputs, outputs, [outputs, inputs](Context& ctx) {
    const auto outs = flat_outputs(outputs);
    const auto ins = flat_inputs(inputs);
    all_to_all(ctx, spans(outs), spans(ins), to_dtype(inputs[0].scalar_type()));
    finish(outs);
  });
}

} // namespace fusedpg
