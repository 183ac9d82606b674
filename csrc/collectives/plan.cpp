#include "collectives/plan.hpp"

#include "base/ownership.hpp"

namespace fusedpg {

Lanes Plan::shards(const std::vector<size_t>& counts, int world_size) {
  Lanes lanes(world_size);
  for (int p = 0; p < world_size; ++p) {
    for (size_t t = 0; t < counts.size(); ++t) {
      const ShardRange r =
          shard_range(static_cast<int64_t>(counts[t]), world_size, p);
      if (r.length != 0) {
        lanes[p].push_back(
            {t, static_cast<size_t>(r.offset), static_cast<size_t>(r.length)});
      }
    }
  }
  return lanes;
}

Lanes Plan::blocks(size_t count, size_t runs, int world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  const size_t block = count / (runs * ranks);
  Lanes lanes(ranks);
  for (size_t p = 0; p < ranks && block != 0; ++p) {
    for (size_t run = 0; run < runs; ++run) {
      lanes[p].push_back({0, (run * ranks + p) * block, block});
    }
  }
  return lanes;
}

std::vector<size_t> Plan::counts() const {
  std::vector<size_t> all(tensors.size());
  for (const auto& lane : lanes) {
    for (const LanePiece& piece : lane) {
      all[piece.tensor] += piece.count;
    }
  }
  return all;
}

void Plan::drop(size_t tensor) {
  for (auto& lane : lanes) {
    std::erase_if(lane, [tensor](const LanePiece& piece) {
      return piece.tensor == tensor;
    });
  }
}

} // namespace fusedpg
