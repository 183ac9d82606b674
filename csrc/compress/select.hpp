#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/compress.hpp"

// Selects the elements of a gradient that are sent.
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

} // namespace fusedpg::compress
