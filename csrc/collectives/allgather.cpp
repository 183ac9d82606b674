#include "collectives/collectives.hpp"
#include "collectives/move.hpp"

namespace fusedpg {

void all_gather(
    Context& ctx,
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
  check_nan(ctx, d, input.data, input.bytes / size);
  Move move;
  move.shared = true;
  move.sends = {input};
  move.recvs = outputs;
  move.run(ctx, d);
}

} // namespace fusedpg
