#include "collectives/host_fold.hpp"

namespace fusedpg {
namespace {

std::vector<double> weights_of(
    const HostMap& hosts,
    const kernels::ReduceArgs& args) {
  size_t ranks = 0;
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    ranks += hosts.ranks(h).size();
  }
  return args.op != RedOp::kPremulSum ? std::vector<double>()
      : args.weights != nullptr
      ? std::vector<double>(args.weights, args.weights + ranks)
      : std::vector<double>(ranks, args.factor);
}

} // namespace

HostFold::HostFold(
    const kernels::Table& kernels,
    const HostMap& hosts,
    DType type,
    RedOp op,
    const std::vector<double>& weights)
    : kernels_(kernels),
      hosts_(hosts),
      type_(type),
      op_(op == RedOp::kAvg || op == RedOp::kPremulSum ? RedOp::kSum : op),
      weights_(weights),
      wide_(wide_type(type, op)),
      plain_(!hosts.shared()),
      sums_(hosts.num_hosts()) {}

HostFold::HostFold(
    const kernels::Table& kernels,
    const HostMap& hosts,
    const Plan& plan)
    : HostFold(kernels, hosts, plan.src_type, plan.op, plan.weights) {}

HostFold::HostFold(
    const kernels::Table& kernels,
    const HostMap& hosts,
    const kernels::ReduceArgs& args)
    : HostFold(kernels, hosts, args.dtype, args.op, weights_of(hosts, args)) {}

void HostFold::fold(
    int host,
    const void* const* srcs,
    size_t count,
    void* sum) {
  kernels::ReduceArgs args;
  args.dtype = type_;
  args.op = op_;
  args.wide = wide_ != type_;
  if (!weights_.empty()) {
    local_weights_.clear();
    for (const int rank : hosts_.ranks(host)) {
      local_weights_.push_back(weights_[rank]);
    }
    args.op = RedOp::kPremulSum;
    args.weights = local_weights_.data();
  }
  kernels_.reduce(args, &sum, 1, srcs, hosts_.ranks(host).size(), count, false);
}

Sources HostFold::sources(const void* const* contributions, size_t count) {
  found_.clear();
  for (int h = 0; h < hosts_.num_hosts(); ++h) {
    local_.clear();
    for (const int rank : hosts_.ranks(h)) {
      local_.push_back(contributions[rank]);
    }
    if (plain_ || is_contribution(h)) {
      found_.push_back(local_[0]);
      continue;
    }
    sums_[h].resize(count * element());
    fold(h, local_.data(), count, sums_[h].data());
    found_.push_back(sums_[h].data());
  }
  return {found_.data(), found_.size(), !plain_};
}

} // namespace fusedpg
