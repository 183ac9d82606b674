#pragma once

#include <cstddef>

namespace fusedpg {

// The least multiple of `to` that is at least n.
constexpr size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

} // namespace fusedpg
