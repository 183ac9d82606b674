#include "collectives/locations.hpp"

#include <algorithm>

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

Locations locate(const Move& move, const Arena& arena) {
  Locations found;
  for (const std::vector<Span>* spans : {&move.sends, &move.recvs}) {
    for (const Span& one : *spans) {
      const auto place = one.bytes == 0 ? std::optional<uint64_t>()
                                        : arena.locate(one.data, one.bytes);
      found.table.push_back(place.value_or(kNotInArena));
    }
  }
  return found;
}

uint64_t publish(Domain& domain, const OpDescriptor& op, Locations own) {
  if (own.table.size() > kTableEntries) {
    own = {};
  }
  const int half = domain.next_half();
  const int me = domain.rank();
  OpDescriptor& said = domain.descriptor(me, half);
  said = op;
  said.flags = own.flags;
  said.table_entries = own.table.size();
  std::copy(own.table.begin(), own.table.end(), domain.table(me, half));
  return own.flags;
}

std::vector<Locations> published(Domain& domain) {
  const int half = domain.half();
  std::vector<Locations> all;
  for (int place = 0; place < domain.size(); ++place) {
    const OpDescriptor& said = domain.descriptor(place, half);
    const uint64_t* table = domain.table(place, half);
    all.push_back({said.flags, {table, table + said.table_entries}});
  }
  return all;
}

} // namespace fusedpg
