// The collectives that only move data, on CPU tensors.

#include <algorithm>
#include <numeric>

#include "c10d/routes/cpu.hpp"
#include "collectives/perform.hpp"

namespace fusedpg {
namespace {

void check_splits(
    const char* op,
    const at::Tensor& t,
    const std::vector<int64_t>& splits,
    int size) {
  TORCH_CHECK_VALUE(
      t.dim() > 0,
      formatted(
          "fused: {}: a scalar cannot be split between ranks; give it a "
          "dimension, as in t.view(1), and the split sizes",
          op));
  const int64_t rows = t.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        t.numel() == 0 || rows % size == 0,
        formatted(
            "fused: {}: the first dimension ({}) is not divisible by the world "
            "size ({}); give the split sizes",
            op,
            rows,
            size));
    return;
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == size &&
          *std::min_element(splits.begin(), splits.end()) >= 0 &&
          std::accumulate(splits.begin(), splits.end(), int64_t(0)) == rows,
      formatted(
          "fused: {}: {} split sizes must be as many as ranks ({}), not "
          "negative, and sum to the first dimension ({})",
          op,
          splits.size(),
          size,
          rows));
}

} // namespace

WorkPtr CpuRoute::broadcast(
    Tensors& tensors,
    const c10d::BroadcastOptions& opts) {
  const CallInfo call =
      group_.info(c10d::OpType::BROADCAST, "fused:broadcast", opts);
  TORCH_CHECK_VALUE(!tensors.empty(), "fused: broadcast: no tensor given");
  check_tensor("broadcast", tensors[0]);
  check_same_type("broadcast", tensors, tensors[0].scalar_type());
  check_alike("broadcast", tensors);
  group_.check_root("broadcast", opts.rootRank);
  TORCH_CHECK_VALUE(
      opts.rootTensor >= 0 &&
          opts.rootTensor < static_cast<int64_t>(tensors.size()),
      formatted(
          "fused: broadcast: root tensor {} is not one of the {} given",
          opts.rootTensor,
          tensors.size()));
  const bool is_root = opts.rootRank == rank_;
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
  return run(
      call,
      tensors,
      tensors,
      [begin, end, root = static_cast<int>(opts.rootRank)](Way& way) {
        const Flat flat = begin();
        perform(
            way,
            {.op = OpCode::kBroadcast,
             .dtype = dtype_of(flat),
             .inputs = single(flat.buffer()),
             .root = root});
        end(flat);
      });
}

WorkPtr CpuRoute::allgather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  if (inputs.size() < 2) {
    return gather_lists(outputs, inputs, opts, outputs);
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
          formatted(
              "fused: all_gather: an output has {} elements, the inputs have "
              "{}",
              t.numel(),
              inputs[0].numel()));
    }
  }
  for (size_t k = 0; k < outputs[0].size(); ++k) {
    by_input[k % each].push_back(outputs[0][k]);
  }
  return gather_lists(
      by_input, inputs, opts, outputs, {outputs.begin() + 1, outputs.end()});
}

WorkPtr CpuRoute::allgather_coalesced(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
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
  return gather_lists(by_input, inputs, opts, outputs);
}

WorkPtr CpuRoute::gather_lists(
    const TensorLists& outputs,
    const Tensors& inputs,
    const c10d::AllgatherOptions& opts,
    const TensorLists& lists,
    const TensorLists& copies) {
  const CallInfo call =
      group_.info(c10d::OpType::ALLGATHER, "fused:all_gather", opts);
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
        formatted(
            "fused: all_gather: this rank's output has {} elements, its input "
            "{}",
            outputs[i][rank_].numel(),
            inputs[i].numel()));
    all.insert(all.end(), outputs[i].begin(), outputs[i].end());
  }
  for (const Tensors& list : copies) {
    all.insert(all.end(), list.begin(), list.end());
  }
  // As if all inputs were read first, and outputs written in order.
  const auto begin = [outputs, inputs, me = rank_](size_t i) {
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
  const auto operation = [begin, copy, inputs](Way& way) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      way.begin_item(i, inputs.size());
      const auto outs = begin(i);
      const Flat in = Flat::input(inputs[i]);
      perform(
          way,
          {.op = OpCode::kAllGather,
           .dtype = dtype_of(in),
           .inputs = single(in.buffer()),
           .outputs = buffers(outs)});
      finish(outs);
    }
    copy();
  };
  return run(call, inputs, all, operation, lists);
}

WorkPtr CpuRoute::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr CpuRoute::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  const CallInfo call = group_.info(
      c10d::OpType::_ALLGATHER_BASE, "fused:_all_gather_base", opts);
  check_count(
      "all_gather_into_tensor", "outputs", outputs.size(), inputs.size());
  TORCH_CHECK_VALUE(
      !inputs.empty(), "fused: all_gather_into_tensor: no tensor given");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("all_gather_into_tensor", inputs[i]);
    check_same_type(
        "all_gather_into_tensor", {outputs[i]}, inputs[i].scalar_type());
    TORCH_CHECK_VALUE(
        outputs[i].numel() == inputs[i].numel() * size_,
        formatted(
            "fused: all_gather_into_tensor: the output must have world_size "
            "({}) times the elements of the input, found {} and {}",
            size_,
            outputs[i].numel(),
            inputs[i].numel()));
  }
  return run(
      call,
      inputs,
      outputs,
      [outputs, inputs, me = rank_, size = size_](Way& way) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          way.begin_item(i, inputs.size());
          const Flat out =
              Flat::output(outputs[i], need_apart(outputs[i], inputs[i], me));
          const Flat in = Flat::input(inputs[i]);
          perform(
              way,
              {.op = OpCode::kAllGather,
               .dtype = dtype_of(in),
               .inputs = single(in.buffer()),
               .outputs = slices(out, size)});
          out.finish();
        }
      });
}

// What gather and scatter have in common: one tensor everywhere, and on the root
// a list with one for each rank, which is returned.
Tensors CpuRoute::list_of_root(
    const char* op,
    const Tensors& tensors,
    const TensorLists& lists,
    int64_t root) {
  check_count(op, "tensor", tensors.size(), 1);
  check_tensor(op, tensors[0]);
  group_.check_root(op, root);
  if (root != rank_) {
    check_count(op, "lists of tensors off the root", lists.size(), 0);
    return {};
  }
  check_count(op, "list of tensors on the root", lists.size(), 1);
  check_count(op, "tensors in the list (one a rank)", lists[0].size(), size_);
  check_same_type(op, lists[0], tensors[0].scalar_type());
  return lists[0];
}

WorkPtr CpuRoute::gather(
    TensorLists& outputs,
    Tensors& inputs,
    const c10d::GatherOptions& opts) {
  const CallInfo call = group_.info(c10d::OpType::GATHER, "fused:gather", opts);
  const Tensors list = list_of_root("gather", inputs, outputs, opts.rootRank);
  return run(
      call,
      inputs,
      list,
      [list,
       in = inputs[0],
       root = static_cast<int>(opts.rootRank),
       me = rank_](Way& way) {
        const auto outs = flat_outputs(list, need_apart(list, {in}, me));
        const Flat input = Flat::input(in);
        perform(
            way,
            {.op = OpCode::kGather,
             .dtype = dtype_of(input),
             .inputs = single(input.buffer()),
             .outputs = buffers(outs),
             .root = root});
        finish(outs);
      });
}

WorkPtr CpuRoute::scatter(
    Tensors& outputs,
    TensorLists& inputs,
    const c10d::ScatterOptions& opts) {
  const CallInfo call =
      group_.info(c10d::OpType::SCATTER, "fused:scatter", opts);
  const Tensors list = list_of_root("scatter", outputs, inputs, opts.rootRank);
  return run(
      call,
      list,
      outputs,
      [list,
       output = outputs[0],
       root = static_cast<int>(opts.rootRank),
       me = rank_](Way& way) {
        const Flat out = Flat::output(output, need_apart({output}, list, me));
        const auto ins = flat_inputs(list);
        perform(
            way,
            {.op = OpCode::kScatter,
             .dtype = dtype_of(out),
             .inputs = buffers(ins),
             .outputs = single(out.buffer()),
             .root = root});
        out.finish();
      });
}

WorkPtr CpuRoute::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  const CallInfo call =
      group_.info(c10d::OpType::ALLTOALL_BASE, "fused:all_to_all", opts);
  check_tensor("all_to_all_single", input);
  check_same_type("all_to_all_single", {output}, input.scalar_type());
  check_splits("all_to_all_single", output, output_splits, size_);
  check_splits("all_to_all_single", input, input_splits, size_);
  return run(
      call,
      {input},
      {output},
      [output, input, output_splits, input_splits, size = size_](Way& way) {
        const Flat out =
            Flat::output(output, need_apart({output}, {input}, kNoRank));
        const Flat in = Flat::input(input);
        perform(
            way,
            {.op = OpCode::kAllToAll,
             .dtype = dtype_of(in),
             .inputs = slices(in, size, input_splits),
             .outputs = slices(out, size, output_splits)});
        out.finish();
      });
}

WorkPtr CpuRoute::alltoall(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllToAllOptions& opts) {
  const CallInfo call =
      group_.info(c10d::OpType::ALLTOALL, "fused:all_to_all", opts);
  check_count("all_to_all", "output tensors", outputs.size(), size_);
  check_count("all_to_all", "input tensors", inputs.size(), size_);
  check_same_type("all_to_all", inputs, inputs[0].scalar_type());
  check_same_type("all_to_all", outputs, inputs[0].scalar_type());
  return run(call, inputs, outputs, [outputs, inputs, me = rank_](Way& way) {
    const auto outs = flat_outputs(outputs, need_apart(outputs, inputs, me));
    const auto ins = flat_inputs(inputs);
    perform(
        way,
        {.op = OpCode::kAllToAll,
         .dtype = dtype_of(ins[0]),
         .inputs = buffers(ins),
         .outputs = buffers(outs)});
    finish(outs);
  });
}

} // namespace fusedpg
