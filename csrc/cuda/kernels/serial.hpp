#pragma once

#include <vector>

#include "cuda/kernels/tiles.hpp"

// All of a launch on the calling CPU thread, for tests without a GPU: the
// kernels' own code, in their order of additions.
namespace fusedpg::cuda::serial {

inline void propose(const ProposeArgs& args) {
  propose_bytes(args, 0, 1);
}

inline void prepare(const PrepareArgs& args) {
  for (uint32_t t = 0; t < prepare_calls(args); ++t) {
    prepare_tensor(args, t);
  }
}

inline void pack(const PackArgs& args) {
  for (int block = 0; block < args.chunk.size; ++block) {
    for (uint32_t tile = 0; tile < args.chunk.num_tiles; ++tile) {
      pack_tile(args, tile, block, 0, 1);
    }
  }
}

inline void unpack(const UnpackArgs& args) {
  for (int block = 0; block < unpack_blocks(args); ++block) {
    for (uint32_t tile = 0; tile < args.chunk.num_tiles; ++tile) {
      unpack_tile(args, tile, block, 0, 1);
    }
  }
}

template <typename C>
void update_as(const UpdateArgs& args) {
  with_rule<C>(args, [&](auto tag) {
    for (uint32_t tile = 0; tile < args.chunk.num_tiles; ++tile) {
      update_tile<typename decltype(tag)::Type>(args, tile, 0, 1);
    }
  });
}

inline void update(const UpdateArgs& args) {
  if (args.param_type == DType::kFloat64) {
    update_as<double>(args);
  } else {
    update_as<float>(args);
  }
}

// As a block does it: lane after lane, then the tree.
template <typename Lane>
Sums sum_of(Lane&& lane) {
  std::vector<Sums> lanes;
  for (int i = 0; i < kThreads; ++i) {
    lanes.push_back(lane(i));
  }
  for (int half = kThreads / 2; half > 0; half /= 2) {
    fold_lanes(lanes.data(), half, 0, 1);
  }
  return lanes[0];
}

inline void lamb_moments(const MomentsArgs& args) {
  for (uint32_t tile = 0; tile < args.update.chunk.num_tiles; ++tile) {
    const Sums sums = sum_of([&](int i) {
      return args.update.param_type == DType::kFloat64
          ? moments_tile<double>(args, tile, i, kThreads)
          : moments_tile<float>(args, tile, i, kThreads);
    });
    args.tile_sums[2 * tile] = sums.param;
    args.tile_sums[2 * tile + 1] = sums.direction;
  }
}

inline void add_sums(const AddSumsArgs& args) {
  for (uint32_t t = 0; t < args.num_tensors; ++t) {
    const Sums sums = sum_of([&](int i) { return add_sums_lane(args, t, i); });
    args.sums[2 * t] = sums.param;
    args.sums[2 * t + 1] = sums.direction;
  }
}

inline void trust(const TrustArgs& args) {
  for (uint32_t t = 0; t < args.num_tensors; ++t) {
    trust_tensor(args, t);
  }
}

inline void find_blocks(const FindBlocksArgs& args) {
  for (uint64_t b = 0; b < args.num_blocks; ++b) {
    args.flags[b] = block_bits(args.tensor, b, 0, 1) != 0 ? 1 : 0;
    if (args.present != nullptr) {
      *args.present += args.flags[b];
    }
  }
}

inline void find_tile_bits(const DirectArgs& args) {
  const uint32_t tiles = args.update.chunk.num_tiles;
  for (int owner = 0; owner < args.update.chunk.size; ++owner) {
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      args.present[static_cast<uint64_t>(owner) * tiles + tile] =
          static_cast<uint16_t>(tile_bits(args.update, tile, owner, 0, 1));
    }
  }
}

inline void list_blocks(const ListBlocksArgs& args) {
  uint32_t before = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    list_flags(args, before, thread, kThreads);
    before += count_flags(args, thread, kThreads);
  }
  args.found[0] = before;
  args.found[1] = *args.present;
}

inline void move_blocks(const MoveBlocksArgs& args) {
  for (uint32_t item = 0; item < args.num_items; ++item) {
    move_block(args, item, 0, 1);
  }
}

} // namespace fusedpg::cuda::serial
