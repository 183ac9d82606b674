#include "collectives/collectives.hpp"
#include "collectives/move.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void scatter(
    Way& way,
    const Span& output,
    const std::vector<Span>& inputs,
    DType dtype,
    int root) {
  OpDescriptor d;
  d.op = OpCode::kScatter;
  d.dtype = dtype;
  d.root = root;
  const size_t size = dtype_size(dtype);
  d.count = output.bytes / size;
  for (const Span& input : inputs) {
    check_nan(way.op(), d, input.data, input.bytes / size);
  }
  Move move;
  move.sends = inputs;
  move.sends.resize(way.size());
  move.recvs.resize(way.size());
  move.recvs[root] = output;
  way.move(move, d);
}

} // namespace fusedpg
