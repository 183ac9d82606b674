#include "collectives/collectives.hpp"
#include "collectives/move.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void all_gather(
    Way& way,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype) {
  OpDescriptor d;
  d.op = OpCode::kAllGather;
  d.dtype = dtype;
  const size_t size = dtype_size(dtype);
  for (const Span& output : outputs) {
    d.count += output.bytes / size;
  }
  check_nan(way.op(), d, input.data, input.bytes / size);
  Move move;
  move.shared = true;
  move.sends = {input};
  move.recvs = outputs;
  way.move(move, d);
}

} // namespace fusedpg
