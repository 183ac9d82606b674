#include "base/stats.hpp"

namespace fusedpg {

const char* path_name(DataPath path) {
  switch (path) {
    case DataPath::kOneShot:
      return "one_shot";
    case DataPath::kStaged:
      return "staged";
    case DataPath::kDirect:
      return "direct";
    case DataPath::kSkipping:
      return "block_sparse";
    case DataPath::kDelegated:
      return "delegated";
    case DataPath::kCoordinates:
      return "coordinates";
    case DataPath::kMessages:
      return "messages";
    case DataPath::kAggregated:
      return "aggregated";
  }
  return "unknown";
}

OpStats Stats::of(OpCode op) const {
  const Counters& c = ops_[static_cast<size_t>(op)];
  const auto read = [](const Counter& counter) {
    return counter.value.load(std::memory_order_relaxed);
  };
  OpStats s{
      read(c.bytes_sent),
      read(c.bytes_received),
      read(c.messages_sent),
      read(c.blocks),
      read(c.blocks_present),
      read(c.blocks_union),
      {}};
  for (size_t i = 0; i < kDataPaths; ++i) {
    s.calls[i] = read(c.calls[i]);
  }
  return s;
}

void Stats::clear() {
  for (Counters& c : ops_) {
    for (Counter* counter :
         {&c.bytes_sent,
          &c.bytes_received,
          &c.messages_sent,
          &c.blocks,
          &c.blocks_present,
          &c.blocks_union}) {
      counter->value = 0;
    }
    for (Counter& counter : c.calls) {
      counter.value = 0;
    }
  }
}

} // namespace fusedpg
