#include "collectives/collectives.hpp"
#include "collectives/host_fold.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {

void reduce(
    Way& way,
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    int root) {
  const std::vector<ReduceTensor> tensors{{data, count}};
  SumCall call = sum_call(OpCode::kReduce, tensors, args);
  call.root = root;
  OpDescriptor d = describe_sum(way.op(), call, tensors);
  const size_t bytes = count * dtype_size(args.dtype);
  const size_t wanted = way.rank() == root ? count : 0;
  const auto finish = [&](const Sources& srcs) {
    combine(way.kernels(), args, &data, 1, srcs, wanted);
  };
  const auto small = way.at_once(d, {args, {data, bytes}, 0, wanted, finish});
  if (small == Way::AtOnce::kDone) {
    return;
  }
  Plan plan = in_place(way.kernels(), way.size(), tensors, args);
  plan.receiver = root;
  if (small == Way::AtOnce::kNo) {
    way.enter(&plan, d, {});
  }
  way.run(plan, d);
}

} // namespace fusedpg
