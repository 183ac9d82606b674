#include "base/stats.hpp"

namespace fusedpg {

const char* path_name(DataPath path) {
  constexpr std::array<const char*, kDataPaths> kNames{
      "one_shot",
      "staged",
      "direct",
      "block_sparse",
      "delegated",
      "coordinates",
      "messages",
      "aggregated"};
  return kNames[static_cast<size_t>(path)];
}

OpStats Stats::of(OpCode op) const {
  const Counters& c = ops_[static_cast<size_t>(op)];
  OpStats s;
  for (size_t i = 0; i < kOpNumbers.size(); ++i) {
    s.*kOpNumbers[i] = c.numbers[i].value.load(std::memory_order_relaxed);
  }
  for (size_t i = 0; i < kDataPaths; ++i) {
    s.calls[i] = c.calls[i].value.load(std::memory_order_relaxed);
  }
  return s;
}

void Stats::clear() {
  for (Counters& c : ops_) {
    for (Counter& counter : c.numbers) {
      counter.value = 0;
    }
    for (Counter& calls : c.calls) {
      calls.value = 0;
    }
  }
}

} // namespace fusedpg
