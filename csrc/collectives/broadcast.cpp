#include "collectives/collectives.hpp"
#include "collectives/move.hpp"

namespace fusedpg {

void broadcast(Context& ctx, const Span& tensor, DType dtype, int root) {
  OpDescriptor d;
  d.op = OpCode::kBroadcast;
  d.dtype = dtype;
  d.root = root;
  d.count = tensor.bytes / dtype_size(dtype);
  Move move;
  move.shared = true;
  move.sends = {Span{}};
  move.recvs.resize(ctx.size());
  if (ctx.rank() == root) {
    check_nan(ctx, d, tensor.data, d.count);
    move.sends[0] = tensor;
  }
  // The root too, which then copies nothing.
  if (root >= 0 && root < ctx.size()) {
    move.recvs[root] = tensor;
  }
  move.run(ctx, d);
}

} // namespace fusedpg
