#include "collectives/collectives.hpp"
#include "collectives/move.hpp"

namespace fusedpg {

void all_to_all(
    Context& ctx,
    const std::vector<Span>& outputs,
    const std::vector<Span>& inputs,
    DType dtype) {
  OpDescriptor d;
  d.op = OpCode::kAllToAll;
  d.dtype = dtype;
  const size_t size = dtype_size(dtype);
  for (const Span& input : inputs) {
    check_nan(ctx, d, input.data, input.bytes / size);
  }
  Move move;
  move.sends = inputs;
  move.recvs = outputs;
  move.run(ctx, d);
}

} // namespace fusedpg
