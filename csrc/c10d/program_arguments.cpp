#include "base/ownership.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/tensor_memory.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

RedOp reduction_of(const std::string& op) {
  const bool picks = op == "min" || op == "max";
  TORCH_CHECK_VALUE(
      op == "sum" || picks,
      formatted("fused: fused_program: unknown reduction \"{}\"", op));
  return !picks ? RedOp::kSum : op == "min" ? RedOp::kMin : RedOp::kMax;
}

void check_argument(
    const char* what,
    const at::Tensor& t,
    int64_t count,
    at::Device device) {
  TORCH_CHECK_VALUE(
      t.device() == device && t.layout() == at::kStrided && t.is_contiguous() &&
          (count < 0 || t.numel() == count) && t.element_size() <= 8,
      formatted(
          "fused: fused_program: {} must be contiguous on {}{}; found {} "
          "elements of {} on {}",
          what,
          device.str(),
          count < 0 ? "" : formatted(", with {} elements", count),
          t.numel(),
          t.scalar_type(),
          t.device().str()));
  check_memory("fused_program", t);
}

// All ranks' parts, and where dropout begins to count, have to be whole rows.
void check_rows(
    const ProgramArguments& a,
    int64_t count,
    int64_t part,
    int size) {
  const auto row = static_cast<int64_t>(a.layout.row);
  bool whole = row > 0 && count % row == 0 && part % row == 0;
  if (whole && a.layout.runs == 0) {
    const int64_t shard = shard_size(count, size);
    whole = shard >= count || shard % row == 0;
  } else if (whole) {
    const auto blocks = static_cast<int64_t>(a.layout.runs) * size;
    whole = count / blocks % row == 0 && a.layout.spacing % a.layout.row == 0;
  }
  TORCH_CHECK_VALUE(
      whole && a.layout.first % a.layout.row == 0,
      formatted(
          "fused: fused_program: {} elements on {} ranks are not whole rows "
          "of {} on each",
          count,
          size,
          a.layout.row));
}

} // namespace

ProgramCall to_engine(const ProgramArguments& a, int rank, int size) {
  ProgramCall call;
  const int64_t count = a.source.numel();
  const auto blocks = static_cast<int64_t>(a.layout.runs) * size;
  TORCH_CHECK_VALUE(
      blocks == 0 || count % blocks == 0,
      formatted(
          "fused: fused_program: {} elements are not {} equal blocks",
          count,
          blocks));
  const int64_t part =
      blocks == 0 ? shard_range(count, size, rank).length : count / size;
  const auto row = static_cast<int64_t>(a.layout.row);
  check_rows(a, count, part, size);
  const at::Device device = a.source.device();
  check_argument("the contribution", a.source, count, device);
  TORCH_CHECK_VALUE(
      a.source.is_floating_point() && a.done.numel() <= 1 &&
          a.kinds.size() == a.operands.size() &&
          a.reads.size() == a.operands.size() &&
          a.gathered.size() == a.outputs.size(),
      "fused: fused_program: arguments do not fit each other");
  call.program = a.program;
  call.dtype = to_dtype(a.source.scalar_type());
  call.op = reduction_of(a.op);
  call.source = a.source.const_data_ptr();
  call.count = static_cast<size_t>(count);
  call.first = a.layout.first;
  call.runs = a.layout.runs;
  call.spacing = a.layout.spacing;
  call.row = a.layout.row;
  call.scratch = a.layout.scratch;
  const auto& [sums, kept, written, single] = a.phases;
  TORCH_CHECK_VALUE(
      (sums.empty() && kept.empty() && written.empty() && single.empty()) ||
          (a.layout.runs == 0 && row == 1 &&
           written.size() == a.outputs.size() &&
           single.size() == a.outputs.size()),
      "fused: fused_program: arguments of phases do not fit the others");
  for (const std::vector<std::string>& ops : sums) {
    call.sums.emplace_back();
    for (const std::string& op : ops) {
      call.sums.back().push_back(reduction_of(op));
    }
  }
  call.kept = kept;
  for (size_t k = 0; k < a.operands.size(); ++k) {
    TORCH_CHECK_VALUE(
        a.kinds[k] >= 0 && a.kinds[k] <= 3,
        formatted(
            "fused: fused_program: operand {} is of kind {}; expected 0 (all "
            "elements), 1 (this rank's slice), 2 (as it is) or 3 (a number of "
            "each of its rows)",
            k,
            a.kinds[k]));
    const auto kind = static_cast<ProgramCall::Operand>(a.kinds[k]);
    check_argument(
        "an operand",
        a.operands[k],
        kind == ProgramCall::Operand::kFull             ? count
            : kind == ProgramCall::Operand::kPart       ? part
            : kind == ProgramCall::Operand::kPartOfRows ? part / row
                                                        : -1,
        device);
    call.inputs.push_back(
        {static_cast<const char*>(a.operands[k].const_data_ptr()),
         a.operands[k].element_size(),
         kind,
         static_cast<size_t>(a.operands[k].numel()),
         kind == ProgramCall::Operand::kAsIs ? static_cast<size_t>(a.reads[k])
                                             : 0});
  }
  for (size_t k = 0; k < a.outputs.size(); ++k) {
    TORCH_CHECK_VALUE(
        blocks == 0 || !a.gathered[k],
        "fused: fused_program: results in blocks are not gathered");
    const bool one = !single.empty() && single[k];
    const int64_t whole = one ? 1 : a.gathered[k] ? count : part;
    const bool of_rows = row > 1 && a.outputs[k].numel() == whole / row;
    check_argument(
        "a result", a.outputs[k], of_rows ? whole / row : whole, device);
    char* data = static_cast<char*>(a.outputs[k].data_ptr());
    bool in_place = data == call.source;
    for (const ProgramCall::Input& input : call.inputs) {
      in_place = in_place || input.data == data;
    }
    call.outputs.push_back(
        {data,
         a.outputs[k].element_size(),
         a.gathered[k],
         in_place,
         of_rows,
         one,
         written.empty() ? 0 : written[k]});
  }
  call.numbers = a.numbers;
  call.seeds = a.seeds;
  return call;
}

} // namespace fusedpg
