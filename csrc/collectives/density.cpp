#include "collectives/density.hpp"

namespace fusedpg {
namespace {

// Dense operations of a shape between looks at a sample.
constexpr uint64_t kProbeEvery = 16;
constexpr double kNewShare = 0.25; // of the moving mean
constexpr size_t kMaxShapes = 4096;

} // namespace

DensityEstimates::Choice DensityEstimates::choose(uint64_t shape, DType dtype)
    const {
  const auto found = estimates_.find({shape, dtype});
  if (found == estimates_.end()) {
    return Choice::kProbe;
  }
  const Estimate& e = found->second;
  if (e.skips) {
    return Choice::kSkip;
  }
  return e.dense_calls % kProbeEvery == 0 ? Choice::kProbe : Choice::kDense;
}

void DensityEstimates::count_dense(uint64_t shape, DType dtype) {
  ++estimate(shape, dtype).dense_calls;
}

DensityEstimates::Estimate& DensityEstimates::estimate(
    uint64_t shape,
    DType dtype) {
  if (estimates_.size() >= kMaxShapes && !estimates_.contains({shape, dtype})) {
    estimates_.clear();
  }
  return estimates_[{shape, dtype}];
}

void DensityEstimates::observe(
    uint64_t shape,
    DType dtype,
    double density,
    double limit) {
  Estimate& e = estimate(shape, dtype);
  e.density = e.density < 0 || !e.skips
      ? density // samples are far apart
      : (1 - kNewShare) * e.density + kNewShare * density;
  const bool skips = e.density < limit;
  if (e.skips && !skips) {
    e.dense_calls = 1; // the next look is kProbeEvery away
  }
  e.skips = skips;
}

} // namespace fusedpg
