#pragma once

#include "cuda/kernels/folds.hpp"

// Pack and unpack: between tensors and the wire.
namespace fusedpg::cuda {

// What a tile is of every rank's shard.
struct Span {
  const TensorInfo* tensor;
  uint32_t index; // of the tensor
  uint32_t length;
  uint64_t begin; // in a shard
  uint64_t wire; // in a block

  // In the whole tensor, where rank `rank`'s part begins ...
  FUSEDPG_HOST_DEVICE uint64_t first(int rank) const {
    return static_cast<uint64_t>(rank) * tensor->shard + begin;
  }
  // ... and how many elements it has: the tensor may end before the tile.
  FUSEDPG_HOST_DEVICE uint32_t count(int rank) const {
    const uint64_t from = first(rank);
    const uint64_t left = from < tensor->count ? tensor->count - from : 0;
    return left < length ? static_cast<uint32_t>(left) : length;
  }
};

FUSEDPG_HOST_DEVICE Span span_of(const Chunk& chunk, uint32_t tile) {
  const Tile t = chunk.tiles[tile];
  const ShardPiece& piece = chunk.pieces[t.piece];
  const uint64_t skipped = static_cast<uint64_t>(t.index) * kTile;
  const uint64_t left = piece.length - skipped;
  return {
      chunk.tensors + piece.tensor,
      piece.tensor,
      left < kTile ? static_cast<uint32_t>(left) : kTile,
      piece.begin + skipped,
      piece.wire + skipped};
}

// A bit copy of n elements.
FUSEDPG_HOST_DEVICE void copy_elements(
    char* to,
    const char* from,
    uint32_t n,
    DType type,
    int thread,
    int threads) {
  constexpr uint32_t kAhead = 4;
  const uint32_t size = float_size(type);
  const uint32_t vectors =
      is_aligned(to) && is_aligned(from) ? n * size / 16 : 0;
  for (uint32_t v = thread; v < vectors; v += kAhead * threads) {
    uint32_t words[kAhead][4];
    FUSEDPG_UNROLL
    for (uint32_t k = 0; k < kAhead; ++k) {
      if (v + k * threads < vectors) {
        load_words<16>(words[k], from + (v + k * threads) * 16);
      }
    }
    FUSEDPG_UNROLL
    for (uint32_t k = 0; k < kAhead; ++k) {
      if (v + k * threads < vectors) {
        store_words<16>(to + (v + k * threads) * 16, words[k]);
      }
    }
  }
  for (uint32_t i = vectors * 16 / size + thread; i < n; i += threads) {
    if (size == 2) {
      store_as(to + i * 2, load_as<uint16_t>(from + i * 2));
    } else if (size == 4) {
      store_as(to + i * 4, load_as<uint32_t>(from + i * 4));
    } else {
      store_as(to + i * 8, load_as<uint64_t>(from + i * 8));
    }
  }
}

// to = from * factor, rounded to the type.
template <typename C>
FUSEDPG_HOST_DEVICE void scale_elements(
    char* to,
    DType to_type,
    const char* from,
    DType from_type,
    uint32_t n,
    C factor,
    int thread,
    int threads) {
  constexpr int W = kWidth<C>;
  constexpr int kAhead = 4;
  const Column<C> in(from, 0, from_type);
  const Column<C> out(to, 0, to_type);
  const uint32_t stride = threads * W;
  for (uint32_t i = thread * W; i < n; i += kAhead * stride) {
    Raw<C, W> raw[kAhead];
    FUSEDPG_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      if (i + k * stride < n) {
        in.load(raw[k], i + k * stride, n);
      }
    }
    FUSEDPG_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      if (i + k * stride < n) {
        C values[W];
        in.widen(values, raw[k]);
        FUSEDPG_UNROLL
        for (int e = 0; e < W; ++e) {
          values[e] = values[e] * factor;
        }
        out.store(out.template round<W>(values), i + k * stride, n);
      }
    }
  }
}

// The factor is rounded to the compute type first; 1 copies bits.
FUSEDPG_HOST_DEVICE void copy_scaled(
    char* to,
    const char* from,
    uint32_t n,
    DType type,
    double factor,
    int thread,
    int threads) {
  if (factor == 1) {
    copy_elements(to, from, n, type, thread, threads);
  } else if (type == DType::kFloat64) {
    scale_elements<double>(to, type, from, type, n, factor, thread, threads);
  } else {
    scale_elements<float>(
        to, type, from, type, n, static_cast<float>(factor), thread, threads);
  }
}

FUSEDPG_HOST_DEVICE void clear_elements(
    char* to,
    uint32_t n,
    DType type,
    int thread,
    int threads) {
  // Every type's zero is made of zero bits.
  for (uint32_t i = thread; i < n; i += threads) {
    if (type == DType::kFloat64) {
      store_as(to + i * 8, uint64_t(0));
    } else if (is_half(type)) {
      store_as(to + i * 2, uint16_t(0));
    } else {
      store_as(to + i * 4, uint32_t(0));
    }
  }
}

// The weights' sum in rank order.
FUSEDPG_HOST_DEVICE double total_weight(const double* weights, int size) {
  double total = 0;
  for (int p = 0; p < size; ++p) {
    total += weights[p];
  }
  return total;
}

// Of the block of rank `block`.
FUSEDPG_HOST_DEVICE void pack_tile(
    const PackArgs& args,
    uint32_t tile,
    int block,
    int thread,
    int threads) {
  const Span span = span_of(args.chunk, tile);
  const uint32_t n = span.count(block);
  const DType type = args.widens ? DType::kFloat32 : args.type;
  char* to = at(args.wire, block * args.chunk.block + span.wire, type);
  const char* from = at(span.tensor->grad, span.first(block), args.type);
  if (args.widens) {
    scale_elements<float>(to, type, from, args.type, n, 1, thread, threads);
  } else {
    copy_scaled(to, from, n, type, args.weight, thread, threads);
  }
  clear_elements(at(to, n, type), span.length - n, type, thread, threads);
}

// Blocks that unpack_tile has to be called for: [0, unpack_blocks()).
FUSEDPG_HOST_DEVICE int unpack_blocks(const UnpackArgs& args) {
  return args.to_outputs ? 1 : args.chunk.size;
}

// kFolds: args.folds.
template <bool kFolds>
FUSEDPG_HOST_DEVICE void unpack_tile(
    const UnpackArgs& args,
    uint32_t tile,
    int block,
    int thread,
    int threads) {
  const Span span = span_of(args.chunk, tile);
  if (args.scalars != nullptr && args.scalars[span.index].skip) {
    return;
  }
  if (!args.to_outputs) {
    copy_elements(
        at(span.tensor->param, span.first(block), args.type),
        at(args.wire, block * args.chunk.block + span.wire, args.type),
        span.count(block),
        args.type,
        thread,
        threads);
    return;
  }
  const int rank = args.chunk.rank;
  const double divisor = args.weights != nullptr
      ? total_weight(args.weights, args.chunk.size)
      : args.divisor;
  // The reciprocal, as in an update: both ways to reduce give the same bits.
  const double factor = divisor > 0 ? 1 / divisor : 0;
  if constexpr (kFolds) {
    fold_elements<float>(
        {span.tensor->output, span.first(rank), args.type},
        {at(args.wire, span.wire, args.type),
         args.chunk.block * float_size(args.type),
         args.weights,
         args.chunk.size,
         args.type},
        span.count(rank),
        static_cast<float>(factor),
        thread,
        threads);
  } else {
    copy_scaled(
        at(span.tensor->output, span.first(rank), args.type),
        at(args.wire, span.wire, args.type),
        span.count(rank),
        args.type,
        factor,
        thread,
        threads);
  }
}

} // namespace fusedpg::cuda
