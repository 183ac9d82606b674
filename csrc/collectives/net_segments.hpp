#pragma once

#include <vector>

#include "collectives/lanes.hpp"

namespace fusedpg {

// What of a lane travels as one message.
struct NetSegment {
  std::vector<LanePiece> pieces;
  size_t elements = 0;
};

// Pieces are cut at multiples of `granule`, counted from their begin. `most`
// elements a segment, a multiple of that.
inline std::vector<NetSegment> cut_lane(
    const std::vector<LanePiece>& lane,
    size_t most,
    size_t granule) {
  std::vector<NetSegment> segments;
  size_t room = 0;
  for (LanePiece rest : lane) {
    while (rest.count != 0) {
      const size_t fits =
          rest.count <= room ? rest.count : room / granule * granule;
      if (fits == 0) {
        segments.emplace_back();
        room = most;
        continue;
      }
      segments.back().pieces.push_back({rest.tensor, rest.begin, fits});
      segments.back().elements += fits;
      room -= fits;
      rest.begin += fits;
      rest.count -= fits;
    }
  }
  return segments;
}

} // namespace fusedpg
