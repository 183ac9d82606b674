#pragma once

#include "cuda/kernels/moves.hpp"

// Blocks of zeros: which there are, and the others' way into the wire and out.
namespace fusedpg::cuda {

// The type of floating-point elements of this size, for copies of bits.
FUSEDPG_HOST_DEVICE DType bits_type(DType type) {
  return type == DType::kInt64 ? DType::kFloat64
      : type == DType::kInt32  ? DType::kFloat32
                               : type;
}

// Elements of block `b`: the last one may be shorter.
FUSEDPG_HOST_DEVICE uint32_t block_length(const TensorBlocks& t, uint64_t b) {
  const uint64_t left = t.count - b * t.block;
  return static_cast<uint32_t>(left < t.block ? left : t.block);
}

FUSEDPG_HOST_DEVICE char* block_at(const TensorBlocks& t, uint64_t b) {
  return static_cast<char*>(t.data) + b * t.block * dtype_size(t.type);
}

// This lane's share of "is any bit of the block set".
FUSEDPG_HOST_DEVICE uint32_t
block_bits(const TensorBlocks& t, uint64_t b, int lane, int lanes) {
  const char* from = block_at(t, b);
  const auto bytes =
      static_cast<uint32_t>(block_length(t, b) * dtype_size(t.type));
  const uint32_t vectors = is_aligned(from) ? bytes / 16 : 0;
  uint32_t any = 0;
  for (uint32_t v = lane; v < vectors; v += lanes) {
    uint32_t words[4];
    load_words<16>(words, from + v * 16);
    any |= words[0] | words[1] | words[2] | words[3];
  }
  // Elements are of an even number of bytes.
  for (uint32_t i = vectors * 8 + lane; i < bytes / 2; i += lanes) {
    any |= load_as<uint16_t>(from + i * 2);
  }
  return any;
}

struct Stretch {
  uint64_t begin;
  uint64_t end;
};
// A thread's stretch of flags.
FUSEDPG_HOST_DEVICE Stretch stretch_of(uint64_t n, int thread, int threads) {
  const uint64_t each = (n + threads - 1) / threads;
  const uint64_t begin = each * thread < n ? each * thread : n;
  return {begin, begin + each < n ? begin + each : n};
}

FUSEDPG_HOST_DEVICE uint32_t
count_flags(const ListBlocksArgs& args, int thread, int threads) {
  const Stretch s = stretch_of(args.num_blocks, thread, threads);
  uint32_t found = 0;
  for (uint64_t b = s.begin; b < s.end; ++b) {
    found += args.flags[b] != 0 ? 1 : 0;
  }
  return found;
}

// `before`: flags that are set in earlier threads' stretches.
FUSEDPG_HOST_DEVICE void list_flags(
    const ListBlocksArgs& args,
    uint32_t before,
    int thread,
    int threads) {
  const Stretch s = stretch_of(args.num_blocks, thread, threads);
  for (uint64_t b = s.begin; b < s.end; ++b) {
    if (args.flags[b] != 0) {
      args.list[before++] = static_cast<uint32_t>(b);
    }
  }
}

// Entry `item` of the list, between the tensor and the wire.
FUSEDPG_HOST_DEVICE void move_block(
    const MoveBlocksArgs& args,
    uint32_t item,
    int thread,
    int threads) {
  const uint32_t b = args.list[item];
  const uint32_t n = block_length(args.tensor, b);
  const uint32_t block = static_cast<uint32_t>(args.tensor.block);
  const DType type = bits_type(args.tensor.type);
  char* packed = static_cast<char*>(args.wire) +
      static_cast<uint64_t>(item) * block * dtype_size(type);
  char* here = block_at(args.tensor, b);
  if (args.to_wire) {
    copy_elements(packed, here, n, type, thread, threads);
    clear_elements(at(packed, n, type), block - n, type, thread, threads);
  } else {
    copy_elements(here, packed, n, type, thread, threads);
  }
}

// Bit k: whether any bit of block k of a tile's gradients in rank `owner`'s
// shard is set. This lane's share.
FUSEDPG_HOST_DEVICE uint32_t tile_bits(
    const UpdateArgs& args,
    uint32_t tile,
    int owner,
    int lane,
    int lanes) {
  const Span span = span_of(args.chunk, tile);
  const DType type = args.grad_type;
  const TensorBlocks blocks{
      at(span.tensor->grad, span.first(owner), type),
      span.count(owner),
      kSkipBlock,
      type};
  uint32_t bits = 0;
  for (uint32_t k = 0; k * kSkipBlock < blocks.count; ++k) {
    const bool any = block_bits(blocks, k, lane, lanes) != 0;
    bits |= (any ? uint32_t{1} : uint32_t{0}) << k;
  }
  return bits;
}

// Which ranks have a block.
struct Ranks {
  uint32_t words[kMaxDirectRanks / 32];

  FUSEDPG_HOST_DEVICE bool has(int rank) const {
    return (words[rank / 32] >> (rank % 32) & 1) != 0;
  }
};

// Elements as numbers that are added.
template <typename Float, typename Word>
struct FloatNumber {
  using Value = Float;
  using Bits = Word;
  static FUSEDPG_HOST_DEVICE Value mean(Value sum, int size) {
    return sum / static_cast<Value>(size);
  }
};
struct DoubleNumber : FloatNumber<double, double> {
  static FUSEDPG_HOST_DEVICE double widen(double bits) {
    return bits;
  }
  static FUSEDPG_HOST_DEVICE double narrow(double x) {
    return x;
  }
};
struct SingleNumber : FloatNumber<float, uint32_t> {
  static FUSEDPG_HOST_DEVICE float widen(uint32_t bits) {
    return bits_to_float(bits);
  }
  static FUSEDPG_HOST_DEVICE uint32_t narrow(float x) {
    return float_to_bits(x);
  }
};
struct HalfNumber : FloatNumber<float, uint16_t> {
  static FUSEDPG_HOST_DEVICE float widen(uint16_t bits) {
    return half_to_float(bits);
  }
  static FUSEDPG_HOST_DEVICE uint16_t narrow(float x) {
    return float_to_half(x);
  }
};
struct BFloatNumber : FloatNumber<float, uint16_t> {
  static FUSEDPG_HOST_DEVICE float widen(uint16_t bits) {
    return bfloat_to_float(bits);
  }
  static FUSEDPG_HOST_DEVICE uint16_t narrow(float x) {
    return float_to_bfloat(x);
  }
};
// Sums of unsigned ones may overflow.
template <typename Signed, typename Unsigned>
struct WholeNumber {
  using Value = Unsigned;
  using Bits = Unsigned;
  static FUSEDPG_HOST_DEVICE Value mean(Value sum, int size) {
    return static_cast<Value>(static_cast<Signed>(sum) / size);
  }
  static FUSEDPG_HOST_DEVICE Value widen(Bits bits) {
    return bits;
  }
  static FUSEDPG_HOST_DEVICE Bits narrow(Value x) {
    return x;
  }
};

template <typename Bits, int W>
FUSEDPG_HOST_DEVICE void load_bits(Bits (&bits)[W], const char* from) {
  if constexpr (sizeof bits == 16) {
    uint32_t words[4];
    load_words<16>(words, from);
    __builtin_memcpy(bits, words, 16);
  } else {
    static_assert(W == 1);
    bits[0] = load_as<Bits>(from);
  }
}
template <typename Bits, int W>
FUSEDPG_HOST_DEVICE void store_bits(char* to, const Bits (&bits)[W]) {
  if constexpr (sizeof bits == 16) {
    uint32_t words[4];
    __builtin_memcpy(words, bits, 16);
    store_words<16>(to, words);
  } else {
    static_assert(W == 1);
    store_as<Bits>(to, bits[0]);
  }
}

// Elements [i, i + W) of the tensors that begin at bases[p] of rank p.
template <typename Number, int W>
FUSEDPG_HOST_DEVICE void sum_elements(
    const DirectSumArgs& args,
    char* const* bases,
    const Ranks& ranks,
    uint64_t i) {
  using Value = typename Number::Value;
  typename Number::Bits bits[W];
  Value sum[W] = {};
  bool all = true;
  bool any = false;
  for (int p = 0; p < args.size; ++p) {
    if (!ranks.has(p)) {
      all = false;
      continue;
    }
    load_bits(bits, bases[p] + i * sizeof bits[0]);
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      const Value x = Number::widen(bits[e]);
      sum[e] = any ? sum[e] + x : x;
    }
    any = true;
  }
  FUSEDPG_UNROLL
  for (int e = 0; e < W; ++e) {
    // The absent ranks' zeros.
    const Value x = all ? sum[e] : sum[e] + Value{};
    bits[e] = Number::narrow(args.mean ? Number::mean(x, args.size) : x);
  }
  // Every rank begins with another peer.
  for (int k = 1, p = args.rank; k <= args.size; ++k) {
    p = p + 1 == args.size ? 0 : p + 1;
    store_bits(bases[p] + i * sizeof bits[0], bits);
  }
}

template <typename Number>
FUSEDPG_HOST_DEVICE void sum_as(
    const DirectSumArgs& args,
    char* const* bases,
    const Ranks& ranks,
    uint64_t first,
    uint32_t n,
    int lane,
    int lanes) {
  constexpr uint32_t kWidth = 16 / sizeof(typename Number::Bits);
  bool aligned = true;
  for (int p = 0; p < args.size; ++p) {
    aligned =
        aligned && is_aligned(bases[p] + first * sizeof(typename Number::Bits));
  }
  const uint32_t vectors = aligned ? n / kWidth : 0;
  for (uint32_t v = lane; v < vectors; v += lanes) {
    sum_elements<Number, kWidth>(args, bases, ranks, first + v * kWidth);
  }
  for (uint32_t i = vectors * kWidth + lane; i < n; i += lanes) {
    sum_elements<Number, 1>(args, bases, ranks, first + i);
  }
}

// What this rank owns of block `b`.
FUSEDPG_HOST_DEVICE Stretch own_stretch(const DirectSumArgs& args, uint64_t b) {
  const TensorBlocks& t = args.tensor;
  const uint64_t own = static_cast<uint64_t>(args.rank) * args.shard;
  const uint64_t begin = b * t.block > own ? b * t.block : own;
  const uint64_t end = b * t.block + block_length(t, b);
  const uint64_t own_end = own + args.shard;
  return {begin, end < own_end ? end : own_end};
}

FUSEDPG_HOST_DEVICE void count_block(
    const DirectSumArgs& args,
    const Ranks& ranks,
    uint64_t b,
    DirectCounts& counts) {
  uint64_t peers = 0;
  for (int p = 0; p < args.size; ++p) {
    peers += p != args.rank && ranks.has(p) ? 1 : 0;
  }
  const bool mine = ranks.has(args.rank);
  if (!mine && peers == 0) {
    return;
  }
  const Stretch s = own_stretch(args, b);
  const uint64_t own = s.begin < s.end ? s.end - s.begin : 0;
  const uint64_t others = block_length(args.tensor, b) - own;
  counts.blocks_union += 1;
  counts.blocks_present += mine ? 1 : 0;
  counts.sent +=
      (mine ? others : 0) + own * static_cast<uint64_t>(args.size - 1);
  counts.received += own * peers + others;
}

FUSEDPG_HOST_DEVICE void sum_block(
    const DirectSumArgs& args,
    char* const* bases,
    const Ranks& ranks,
    uint64_t b,
    int lane,
    int lanes) {
  const Stretch s = own_stretch(args, b);
  if (s.begin >= s.end) {
    return;
  }
  const auto n = static_cast<uint32_t>(s.end - s.begin);
  const auto sum = [&](auto number) {
    sum_as<decltype(number)>(args, bases, ranks, s.begin, n, lane, lanes);
  };
  switch (args.tensor.type) {
    case DType::kFloat64:
      return sum(DoubleNumber{});
    case DType::kFloat16:
      return sum(HalfNumber{});
    case DType::kBFloat16:
      return sum(BFloatNumber{});
    case DType::kInt32:
      return sum(WholeNumber<int32_t, uint32_t>{});
    case DType::kInt64:
      return sum(WholeNumber<int64_t, uint64_t>{});
    default:
      return sum(SingleNumber{});
  }
}

} // namespace fusedpg::cuda
