#include <algorithm>

#include "c10d/coo.hpp"
#include "c10d/routes/hosts_turn.hpp"
#include "collectives/fused_step.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
NetContext HostsTurn::sums() {
  NetContext ctx = context();
  if (route_.flat_) {
    ctx.hosts = &*route_.flat_;
    ctx.domain = nullptr;
  }
  return ctx;
}

void HostsTurn::all_reduce(
    const std::vector<Flat>& tensors,
    const Reduction& reduction) {
  // Each tensor is an operation here, so ranks must know how many there are.
  const uint64_t first = list_index_;
  const uint64_t length = std::max<uint64_t>(list_length_, tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Flat& flat = tensors[i];
    begin_item(first + i, length);
    NetContext ctx = sums();
    HostsWay way(ctx);
    fusedpg::all_reduce(way, {flat.reduce_tensor()}, reduction.args);
  }
}

void HostsTurn::reduce(
    const Flat& tensor,
    const Reduction& reduction,
    int root) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  const ReduceTensor span = tensor.reduce_tensor();
  fusedpg::reduce(way, span.data, span.count, reduction.args, root);
}

void HostsTurn::reduce_scatter(
    const Flat& output,
    const Parts& inputs,
    const Reduction& reduction) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  fusedpg::reduce_scatter(
      way, output.reduce_tensor(), inputs.reduce_tensors(), reduction.args);
}

void HostsTurn::fused_step(const StepCall& call) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  fusedpg::fused_step(way, call);
}

void HostsTurn::reduce_shards(const ShardsCall& call) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  fusedpg::reduce_shards(way, call);
}

bool HostsTurn::fused_program(const ProgramCall& call) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  return fusedpg::fused_program(way, call);
}

void HostsTurn::sparse_all_reduce(
    const Flat& tensor,
    const kernels::ReduceArgs& args,
    const SkipOptions& options) {
  NetContext ctx = sums();
  HostsWay way(ctx);
  fusedpg::sparse_all_reduce(way, {tensor.reduce_tensor()}, args, options);
}

at::Tensor HostsTurn::coo_all_reduce(const at::Tensor& mine, bool mean) {
  NetContext ctx = sums();
  return fusedpg::coo_all_reduce(ctx, mine, mean);
}

} // namespace fusedpg
