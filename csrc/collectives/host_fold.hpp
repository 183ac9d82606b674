#pragma once

#include <vector>

#include "base/host_map.hpp"
#include "collectives/plan.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

// The order of sums between machines, which is a promise (docs/reference/numerics.md): a
// machine's contributions are added in rank order, in the wide type, and what
// they come to in the order of machines. Where every machine has one rank that
// is the order of one machine, and the epilogue gets the contributions.
class HostFold {
 public:
  // `weights` by rank, or none.
  HostFold(
      const kernels::Table& kernels,
      const HostMap& hosts,
      DType type,
      RedOp op,
      const std::vector<double>& weights = {});
  // Of a plan that reads.
  HostFold(
      const kernels::Table& kernels,
      const HostMap& hosts,
      const Plan& plan);
  HostFold(
      const kernels::Table& kernels,
      const HostMap& hosts,
      const kernels::ReduceArgs& args);

  // Whether nothing is added before the epilogue.
  bool plain() const {
    return plain_;
  }
  // Whether a machine's sum is its rank's contribution, bit for bit.
  bool is_contribution(int host) const {
    return plain_ ||
        (hosts_.ranks(host).size() == 1 && wide_ == type_ && weights_.empty());
  }
  // Bytes of an element of a sum.
  size_t element() const {
    return dtype_size(wide_);
  }
  // The contributions of a machine's ranks, in their order.
  void fold(int host, const void* const* srcs, size_t count, void* sum);

  // What the epilogue gets, of all ranks' contributions. Until the next call.
  Sources sources(const void* const* contributions, size_t count);

 private:
  const kernels::Table& kernels_;
  const HostMap hosts_;
  const DType type_;
  const RedOp op_;
  const std::vector<double> weights_;
  const DType wide_;
  const bool plain_;
  std::vector<const void*> found_; // what sources() returns
  std::vector<const void*> local_; // of one machine
  std::vector<double> local_weights_;
  std::vector<std::vector<char>> sums_; // by machine
};

} // namespace fusedpg
