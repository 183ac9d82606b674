// all_to_all and all_to_all_single of ProcessGroupFused.

#include <algorithm>
#include <numeric>

#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

void check_splits(
    const char* op,
    const at::Tensor& t,
    const std::vector<int64_t>& splits,
    int size) {
  TORCH_CHECK_VALUE(
      t.dim() > 0,
      "fused: ",
      op,
      ": a scalar cannot be split between ranks; give it a dimension, as in "
      "t.view(1), and the split sizes");
  const int64_t rows = t.size(0);
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
  const auto rows = static_cast<size_t>(t.size(0));
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
  check_splits("all_to_all_single", output, output_splits, getSize());
  check_splits("all_to_all_single", input, input_splits, getSize());
  const auto begin = [output, input] {
    return Flat::output(output, need_apart({output}, {input}, kNoRank));
  };
  if (spans_hosts()) {
    return run_delegated(
        call,
        {input},
        {output},
        [begin, input, output_splits, input_splits, opts](auto& gloo) mutable {
          const Flat out = begin();
          at::Tensor to = out.tensor();
          at::Tensor from = Flat::input(input).tensor();
          gloo.alltoall_base(to, from, output_splits, input_splits, opts)
              ->wait();
          out.finish();
          return WorkPtr();
        });
  }
  return run(
      call,
      {input},
      {output},
      [begin, output, input, output_splits, input_splits](Context& ctx) {
        const Flat out = begin();
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
            parts.push_back(Flat::input(t).tensor().detach().view({-1}));
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
            Flat::input(received[p]).give(outputs[p]);
          }
          return WorkPtr();
        });
  }
  return run(call, inputs, outputs, [outputs, inputs](Context& ctx) {
    const auto outs =
        flat_outputs(outputs, need_apart(outputs, inputs, ctx.rank()));
    const auto ins = flat_inputs(inputs);
    all_to_all(ctx, spans(outs), spans(ins), to_dtype(inputs[0].scalar_type()));
    finish(outs);
  });
}

} // namespace fusedpg
