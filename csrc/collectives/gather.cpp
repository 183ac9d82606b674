#include "collectives/collectives.hpp"
#include "collectives/move.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void gather(
    Way& way,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype,
    int root) {
  OpDescriptor d;
  d.op = OpCode::kGather;
  d.dtype = dtype;
  d.root = root;
  d.count = input.bytes / dtype_size(dtype);
  check_nan(way.op(), d, input.data, d.count);
  Move move;
  move.sends.resize(way.size());
  move.sends[root] = input;
  move.recvs = outputs;
  move.recvs.resize(way.size());
  way.move(move, d);
}

} // namespace fusedpg
