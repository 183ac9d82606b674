#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/compress.hpp"

// Selects the elements of a gradient that are sent, and adds up those of ranks.
namespace fusedpg::compress {

struct Selected {
  std::vector<uint32_t> indices; // ascending
  std::vector<float> values;
};

// The k elements of v with the largest magnitudes, of equal ones the first; NaN
// is larger than anything. The residual, if there is one, becomes v with these
// set to 0. Exact for any data; k <= count < 2^31.
// Goes into `found`, whose memory is used again: fresh pages cost more than the
// selection.
void top_k(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    size_t count,
    size_t k,
    Selected& found);

// All elements of v whose magnitude is above `threshold` (>= 0), and NaN; where
// these are fewer than `at_least`, as top_k. The residual as there.
void above(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    size_t count,
    float threshold,
    size_t at_least,
    Selected& found);

// Some elements of a rank, and which these are.
struct Picked {
  const int32_t* indices = nullptr;
  const float* values = nullptr;
  size_t count = 0;
};

// out = alpha * the sum of what the ranks have sent; the rest is 0. Part by part,
// for which indices are best in order; in any other one the sums are the same but
// for the order of ranks. Goes behind what it has read. Returns an index that is
// out of bounds, if there is one.
std::optional<int64_t> scatter(
    float* out,
    size_t count,
    float alpha,
    std::vector<Picked>& ranks);

} // namespace fusedpg::compress
