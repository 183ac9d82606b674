#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "base/dtype.hpp"

namespace fusedpg {

// How dense the results of earlier operations were, by shape and type: a moving
// mean of the share of blocks that any rank contributed. Fed with what all
// ranks know, in the order of operations, so it is the same on all ranks.
class DensityEstimates {
 public:
  enum class Choice {
    kDense,
    kProbe, // dense, and look at a sample of the blocks
    kSkip,
  };
  // For the next operation of this shape. Changes nothing: whether that
  // operation takes place is not yet known.
  Choice choose(uint64_t shape, DType dtype) const;
  // A dense operation took place: all ranks have entered it.
  void count_dense(uint64_t shape, DType dtype);
  // `limit`: the density from which skipping does not pay.
  void observe(uint64_t shape, DType dtype, double density, double limit);

 private:
  struct Estimate {
    double density = -1; // none yet
    bool skips = false;
    uint64_t dense_calls = 0;
  };
  Estimate& estimate(uint64_t shape, DType dtype);
  std::map<std::pair<uint64_t, DType>, Estimate> estimates_;
};

} // namespace fusedpg
