// The methods of ProcessGroupFused that only move data.

#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {

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
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: broadcast: no tensor given");
  check_tensor("broadcast", tensors[0]);
  check_same_type("broadcast", tensors, tensors[0].scalar_type());
  check_alike("broadcast", tensors);
  check_root("broadcast", opts.rootRank);
  TORCH_CHECK_VALUE(
      opts.rootTensor >= 0 &&
          opts.rootTensor < static_cast<int64_t>(tensors.size()),
      "fused: broadcast: root tensor ",
      opts.rootTensor,
      " is not one of the ",
      tensors.size(),
      " given");
  const bool is_root = opts.rootRank == getRank();
  // What the root sends, or the first tensor to receive; the rest are copies.
  const size_t first = is_root ? static_cast<size_t>(opts.rootTensor) : 0;
  const auto begin = [is_root, t = tensors[first]] {
    return is_root ? Flat::input(t) : Flat::output(t);
  };
  const auto end = [tensors, first](const Flat& flat) {
    flat.finish();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (i != first) {
        flat.give(tensors[i]);
      }
    }
  };
  if (spans_hosts()) {
    return run_delegated(
        call, tensors, tensors, [begin, end, opts](auto& gloo) {
          const Flat flat = begin();
          Tensors one{flat.tensor()};
          c10d::BroadcastOptions from = opts;
          from.rootTensor = 0;
          gloo.broadcast(one, from)->wait();
          end(flat);
          return WorkPtr();
        });
  }
  return run(
      call,
      tensors,
      tensors,
      [begin, end, root = static_cast<int>(opts.rootRank)](Context& ctx) {
        const Flat flat = begin();
        fusedpg::broadcast(
            ctx, flat.span(), to_dtype(flat.tensor().scalar_type()), root);
        end(flat);
      });
}

ProcessGroupFused::WorkPtr ProcessGroupFused::allgather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  if (on_gpu(inputs)) {
    return on_nccl(inputs, &Backend::allgather, outputs, inputs, opts);
  }
  if (inputs.size() < 2) {
    return gather_lists(outputs, inputs, opts);
  }
  // Every list receives all inputs of all ranks, rank after rank.
  check_alike("all_gather", inputs);
  check_count("all_gather", "lists of outputs", outputs.size(), inputs.size());
  const size_t each = inputs.size();
  TensorLists by_input(each);
  for (const Tensors& list : outputs) {
    check_count(
        "all_gather",
        "output tensors (one for each input of each rank)",
        list.size(),
        each * static_cast<size_t>(size_));
    check_same_type("all_gather", list, inputs[0].scalar_type());
    for (const at::Tensor& t : list) {
      TORCH_CHECK_VALUE(
          t.numel() == inputs[0].numel(),
          "fused: all_gather: an output has ",
          t.numel(),
          " elements, the inputs have ",
          inputs[0].numel());
    }
  }
  for (size_t k = 0; k < outputs[0].size(); ++k) {
    by_input[k % each].push_back(outputs[0][k]);
  }
  return gather_lists(
      by_input, inputs, opts, {outputs.begin() + 1, outputs.end()});
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
    const c10d::AllgatherOptions& opts,
    const TensorLists& copies) {
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
  for (const Tensors& list : copies) {
    all.insert(all.end(), list.begin(), list.end());
  }
  // As if all inputs were read first, and outputs written in order.
  const auto begin = [outputs, inputs, me = getRank()](size_t i) {
    return flat_outputs(
        outputs[i], need_apart(outputs[i], Tensors{inputs[i]}, me));
  };
  const auto copy = [outputs, copies] {
    for (const Tensors& list : copies) {
      for (size_t k = 0; k < list.size(); ++k) {
        const size_t each = outputs.size();
        Flat::input(outputs[k % each][k / each]).give(list[k]);
      }
    }
  };
  if (spans_hosts()) {
    // Broadcasts, so that sizes may differ from rank to rank.
    return run_delegated(
        call,
        inputs,
        all,
        [begin, copy, inputs, opts, size = getSize(), me = getRank()](
            auto& gloo) {
          for (size_t i = 0; i < inputs.size(); ++i) {
            const Flat in = Flat::input(inputs[i]);
            const auto outs = begin(i);
            for (int p = 0; p < size; ++p) {
              if (p == me) {
                in.give(outs[p].tensor());
              }
              if (outs[p].tensor().numel() != 0) {
                c10d::BroadcastOptions from;
                from.rootRank = p;
                from.timeout = opts.timeout;
                Tensors one{outs[p].tensor()};
                gloo.broadcast(one, from)->wait();
              }
            }
            finish(outs);
          }
          copy();
          return WorkPtr();
        });
  }
  return run(call, inputs, all, [begin, copy, inputs](Context& ctx) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      ctx.begin_item(i, inputs.size());
      const auto outs = begin(i);
      const Flat in = Flat::input(inputs[i]);
      all_gather(
          ctx, spans(outs), in.span(), to_dtype(inputs[i].scalar_type()));
      finish(outs);
    }
    copy();
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
        call,
        inputs,
        outputs,
        [outputs, inputs, opts, me = getRank()](auto& gloo) {
          for (size_t i = 0; i < inputs.size(); ++i) {
            const Flat in = Flat::input(inputs[i]);
            const Flat out =
                Flat::output(outputs[i], need_apart(outputs[i], inputs[i], me));
            at::Tensor from = in.tensor();
            at::Tensor to = out.tensor();
            gloo._allgather_base(to, from, opts)->wait();
            out.finish();
          }
          return WorkPtr();
        });
  }
  return run(
      call, inputs, outputs, [outputs, inputs, size = getSize()](Context& ctx) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          ctx.begin_item(i, inputs.size());
          const Flat out = Flat::output(
              outputs[i], need_apart(outputs[i], inputs[i], ctx.rank()));
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
        call, inputs, list, [list, in = inputs[0], opts](auto& gloo) {
          // Gloo copies into outputs of its own first.
          const auto outs = flat_outputs(list);
          TensorLists lists;
          if (!list.empty()) {
            lists.push_back(flat_tensors(outs));
          }
          Tensors one{Flat::input(in).tensor()};
          gloo.gather(lists, one, opts)->wait();
          finish(outs);
          return WorkPtr();
        });
  }
  return run(
      call,
      inputs,
      list,
      [list, in = inputs[0], root = static_cast<int>(opts.rootRank)](
          Context& ctx) {
        const auto outs =
            flat_outputs(list, need_apart(list, Tensors{in}, ctx.rank()));
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
        call,
        list,
        outputs,
        [list, output = outputs[0], opts, me = getRank()](auto& gloo) {
          const Flat out = Flat::output(output, need_apart({output}, list, me));
          const auto ins = flat_inputs(list);
          TensorLists lists;
          if (!list.empty()) {
            lists.push_back(flat_tensors(ins));
          }
          Tensors one{out.tensor()};
          gloo.scatter(one, lists, opts)->wait();
          out.finish();
          return WorkPtr();
        });
  }
  return run(
      call,
      list,
      outputs,
      [list, output = outputs[0], root = static_cast<int>(opts.rootRank)](
          Context& ctx) {
        const Flat out =
            Flat::output(output, need_apart({output}, list, ctx.rank()));
        const auto ins = flat_inputs(list);
        fusedpg::scatter(
            ctx, out.span(), spans(ins), to_dtype(output.scalar_type()), root);
        out.finish();
      });
}

} // namespace fusedpg
