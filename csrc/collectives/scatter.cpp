#include "collectives/collectives.hpp"
#include "collectives/move.hpp"

namespace fusedpg {

void scatter(
    Context& ctx,
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
    check_nan(ctx, d, input.data, input.bytes / size);
  }
  Move move;
  move.sends = inputs;
  move.sends.resize(ctx.size());
  move.recvs.resize(ctx.size());
  move.recvs[root] = output;
  move.run(ctx, d);
}

} // namespace fusedpg
