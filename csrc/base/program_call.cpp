#include "base/program_call.hpp"

#include "base/error.hpp"
#include "base/hash.hpp"

namespace fusedpg {

OpDescriptor facts(const ProgramCall& call) {
  OpDescriptor d;
  d.op = OpCode::kFusedProgram;
  d.dtype = call.dtype;
  d.red_op = call.op;
  d.count = call.count;
  d.shape_hash = call.program;
  Hash values;
  for (const double number : call.numbers) {
    values.add(number);
  }
  for (const uint64_t seed : call.seeds) {
    values.add(seed);
  }
  values.add(call.first);
  values.add(uint64_t{call.runs});
  values.add(call.spacing);
  values.add(uint64_t{call.row});
  for (const std::vector<RedOp>& phase : call.sums) {
    values.add(uint64_t{phase.size()});
    for (const RedOp op : phase) {
      values.add(static_cast<uint64_t>(op));
    }
  }
  d.value_hash = values.value();
  d.options = call.missing != nullptr ? kFirstCall : 0;
  return d;
}

std::string misfit(const ProgramCall& call) {
  for (size_t k = 0; k < call.inputs.size(); ++k) {
    const ProgramCall::Input& input = call.inputs[k];
    if (input.kind == ProgramCall::Operand::kAsIs &&
        input.count != input.reads) {
      return formatted(
          "operand {} of {} has {} elements, expected {}: the function reads "
          "it as it is",
          k,
          call.inputs.size(),
          input.count,
          input.reads);
    }
  }
  return {};
}

size_t place(
    const ProgramCall::Input& input,
    size_t begin,
    size_t first,
    size_t row) {
  switch (input.kind) {
    case ProgramCall::Operand::kFull:
      return begin * input.element;
    case ProgramCall::Operand::kPart:
      return (begin - first) * input.element;
    case ProgramCall::Operand::kPartOfRows:
      return (begin - first) / row * input.element;
    default:
      return 0;
  }
}

size_t place(
    const ProgramCall::Output& output,
    size_t begin,
    size_t first,
    size_t row) {
  if (output.single) {
    return 0;
  }
  const size_t at = output.gathered ? begin : begin - first;
  return (output.of_rows ? at / row : at) * output.element;
}

} // namespace fusedpg
