#include <algorithm>

#include "c10d/coo.hpp"
#include "c10d/routes/hosts_turn.hpp"
#include "collectives/fused_step.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// Gloo knows neither AVG nor PREMUL_SUM: both are SUM with a factor, before or
// after.
struct GlooReduction {
  c10d::ReduceOp op;
  double before = 1.0;
  int64_t divisor = 1;

  explicit GlooReduction(const Reduction& given) : op(given.op) {
    if (given.args.op == RedOp::kAvg) {
      divisor = given.args.divisor;
      op = c10d::ReduceOp::SUM;
    } else if (given.args.op == RedOp::kPremulSum) {
      before = given.args.factor;
      op = c10d::ReduceOp::SUM;
    }
  }
  void prepare(at::Tensor& t) const {
    if (before != 1.0) {
      t.mul_(before);
    }
  }
  void finish(at::Tensor& t) const {
    if (divisor == 1) {
      return;
    }
    if (t.is_floating_point() || t.is_complex()) {
      t.div_(divisor);
    } else {
      t.div_(divisor, "trunc");
    }
  }
};

} // namespace

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
  SkipState& skip = route_.skip_;
  // Each tensor is an operation here, so ranks must know how many there are.
  const uint64_t first = list_index_;
  const uint64_t length = std::max<uint64_t>(list_length_, tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Flat& flat = tensors[i];
    begin_item(first + i, length);
    const ReduceTensor tensor = flat.reduce_tensor();
    DelegateConfig delegated;
    delegated.bytes = flat.span().bytes;
    delegated.world_size = size_;
    delegated.ranks_share_hosts = route_.hosts_.shared();
    delegated.flat = route_.flat_.has_value();
    delegated.all_ours = route_.all_ours();
    const bool dense_is_delegated = select_delegate(delegated);
    const OpDescriptor d =
        facts(sum_call(OpCode::kAllReduce, {tensor}, reduction.args));
    const SkipConfig config = skip_config(skip, size_, d, reduction.args);
    delegated.choice = select_skip(config);
    if (select_delegate(delegated)) {
      if (select_estimate(config)) {
        skip.estimates.count_dense(d.shape_hash, d.dtype);
      }
      agree(tensor, reduction);
      delegate_sum(flat, reduction);
      continue;
    }
    NetContext ctx = sums();
    HostsWay way(
        ctx,
        dense_is_delegated
            ? HostsWay::Delegate([&] { delegate_sum(flat, reduction); })
            : nullptr);
    fusedpg::all_reduce(way, {tensor}, reduction.args);
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

void HostsTurn::sum(at::Tensor t, const Reduction& reduction) {
  const GlooReduction gloo(reduction);
  gloo.prepare(t);
  auto opts = options<c10d::AllreduceOptions>();
  opts.reduceOp = gloo.op;
  Tensors one{t};
  gloo_.allreduce(one, opts)->wait();
  gloo.finish(t);
}

// Gloo compares nothing: ranks that differ would hang, or get wrong sums.
void HostsTurn::agree(const ReduceTensor& tensor, const Reduction& reduction) {
  NetContext ctx = context();
  HostsWay way(ctx);
  const SumCall call = sum_call(OpCode::kAllReduce, {tensor}, reduction.args);
  OpDescriptor mine = describe_sum(way.op(), call, {tensor});
  way.enter(nullptr, mine, {});
}

void HostsTurn::delegate_sum(const Flat& flat, const Reduction& reduction) {
  sum(flat.tensor().detach(), reduction);
  // What Gloo's ring moves.
  const uint64_t moved =
      2 * flat.span().bytes * static_cast<uint64_t>(size_ - 1) / size_;
  stats_.add(OpCode::kAllReduce, DataPath::kDelegated, {moved, moved});
}

} // namespace fusedpg
