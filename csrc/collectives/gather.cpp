#include "collectives/collectives.hpp"
#include "collectives/move.hpp"

namespace fusedpg {

void gather(
    Context& ctx,
    const std::vector<Span>& outputs,
    const Span& input,
    DType dtype,
    int root) {
  OpDescriptor d;
  d.op = OpCode::kGather;
  d.dtype = dtype;
  d.root = root;
  d.count = input.bytes / dtype_size(dtype);
  check_nan(ctx, d, input.data, d.count);
  Move move;
  move.sends.resize(ctx.size());
  move.sends[root] = input;
  move.recvs = outputs;
  move.recvs.resize(ctx.size());
  move.run(ctx, d);
}

} // namespace fusedpg
