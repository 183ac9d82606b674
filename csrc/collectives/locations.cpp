#include "collectives/locations.hpp"

#include <algorithm>

#include "base/descriptor.hpp"

namespace fusedpg {

Locations locate(const Plan& plan, const Arena& arena) {
  // The extent of each tensor, from the lanes that cover it.
  std::vector<size_t> ends(plan.tensors.size());
  for (const auto& lane : plan.lanes) {
    for (const LanePiece& piece : lane) {
      ends[piece.tensor] =
          std::max(ends[piece.tensor], piece.begin + piece.count);
    }
  }
  Locations found{kReadsDirect | kWritesDirect, {}};
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    struct Side {
      const char* address;
      size_t element;
      uint64_t bit;
    };
    for (const auto& [address, element, bit] :
         {Side{plan.tensors[t].src, plan.src_size, kReadsDirect},
          Side{plan.tensors[t].dst, plan.dst_size, kWritesDirect}}) {
      uint64_t location = 0;
      if (ends[t] != 0 && address != nullptr && (found.flags & bit) != 0) {
        const auto place = arena.locate(address, ends[t] * element);
        location = place.value_or(kNotInArena);
        found.flags &= place ? ~uint64_t(0) : ~bit;
      }
      found.table.push_back(location);
    }
  }
  return found;
}

} // namespace fusedpg
