#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace fusedpg {

// "a, b, c"; of many, the first few and how many more there are.
inline std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMostNames); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kMostNames) {
    text += formatted(" and {} more", names.size() - kMostNames);
  }
  return text;
}

} // namespace fusedpg
