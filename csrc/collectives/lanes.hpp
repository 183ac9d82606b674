#pragma once

#include <cstddef>
#include <vector>

namespace fusedpg {

// A run of elements of one tensor of an operation.
struct LanePiece {
  size_t tensor;
  size_t begin; // elements
  size_t count; // elements

  bool operator==(const LanePiece&) const = default;
};

// What each owner reduces.
using Lanes = std::vector<std::vector<LanePiece>>;

} // namespace fusedpg
