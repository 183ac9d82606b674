#include "collectives/collectives.hpp"
#include "collectives/move.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

void broadcast(Way& way, const Span& tensor, DType dtype, int root) {
  OpDescriptor d;
  d.op = OpCode::kBroadcast;
  d.dtype = dtype;
  d.root = root;
  d.count = tensor.bytes / dtype_size(dtype);
  Move move;
  move.shared = true;
  move.sends = {Span{}};
  move.recvs.resize(way.size());
  if (way.rank() == root) {
    check_nan(way.op(), d, tensor.data, d.count);
    move.sends[0] = tensor;
  }
  // The root too, which then copies nothing.
  if (root >= 0 && root < way.size()) {
    move.recvs[root] = tensor;
  }
  way.move(move, d);
}

} // namespace fusedpg
