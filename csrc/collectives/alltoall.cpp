#include "collectives/collectives.hpp"
#include "collectives/move.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void all_to_all(
    Way& way,
    const std::vector<Span>& outputs,
    const std::vector<Span>& inputs,
    DType dtype) {
  OpDescriptor d;
  d.op = OpCode::kAllToAll;
  d.dtype = dtype;
  const size_t size = dtype_size(dtype);
  for (const Span& input : inputs) {
    check_nan(way.op(), d, input.data, input.bytes / size);
  }
  Move move;
  move.sends = inputs;
  move.recvs = outputs;
  way.move(move, d);
}

} // namespace fusedpg
