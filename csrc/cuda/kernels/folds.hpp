#pragma once

#include "cuda/kernels/elements.hpp"

// Vectors of a tile, and sums over ranks: left folds in rank order, in the
// compute type, which are the CPU's.
namespace fusedpg::cuda {

// The U vectors of a tile that a thread works on at a time. Full ones are
// within the tile and all columns are aligned; of others U is 1.
template <int W, int U, bool kFull>
struct Vectors {
  uint32_t first;
  uint32_t stride;
  uint32_t end; // of the elements

  FUSEDPG_HOST_DEVICE uint32_t operator[](int u) const {
    return first + static_cast<uint32_t>(u) * stride;
  }
  FUSEDPG_HOST_DEVICE bool has(int u) const {
    return (*this)[u] < end;
  }
  template <typename C>
  FUSEDPG_HOST_DEVICE void load(const Column<C>& from, Raw<C, W> (&raw)[U])
      const {
    FUSEDPG_UNROLL
    for (int u = 0; u < U; ++u) {
      if constexpr (kFull) {
        if (has(u)) {
          from.load(raw[u], (*this)[u]);
        }
      } else {
        from.load(raw[u], (*this)[u], end);
      }
    }
  }
  // Vector u.
  template <typename C>
  FUSEDPG_HOST_DEVICE void store(const Column<C>& to, int u, const C* values)
      const {
    const Raw<C, W> raw = to.template round<W>(values);
    if constexpr (kFull) {
      to.store(raw, (*this)[u]);
    } else {
      to.store(raw, (*this)[u], end);
    }
  }
};

// Ranks whose loads are under way together: 32 registers' worth.
template <typename C, int W, int U, bool kFull>
constexpr int kFan = kFull ? static_cast<int>(128 / (U * W * sizeof(C))) : 1;

// Adds what rank `rank` contributes to the sum of the ranks before it.
template <typename C, int W, int U>
FUSEDPG_HOST_DEVICE void add_rank(
    int rank,
    const double* weights,
    DType type,
    const Raw<C, W> (&raw)[U],
    C (&sum)[U][W]) {
  const Column<C> column(nullptr, 0, type);
  const C weight = weights != nullptr ? static_cast<C>(weights[rank]) : C(1);
  FUSEDPG_UNROLL
  for (int u = 0; u < U; ++u) {
    C values[W];
    column.widen(values, raw[u]);
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      // A product with 1 has the factor's bits.
      const C value = values[e] * weight;
      sum[u][e] = rank == 0 ? value : sum[u][e] + value;
    }
  }
}

// Left fold of what lies at of_rank(0), of_rank(1), ...
template <typename C, int W, int U, bool kFull, typename OfRank>
FUSEDPG_HOST_DEVICE void fold_ranks(
    const Vectors<W, U, kFull>& at,
    int size,
    const double* weights,
    DType type,
    const OfRank& of_rank,
    C (&sum)[U][W]) {
  constexpr int kTogether = kFan<C, W, U, kFull>;
  FUSEDPG_NO_UNROLL
  for (int begin = 0; begin < size; begin += kTogether) {
    Raw<C, W> raw[kTogether][U];
    FUSEDPG_UNROLL
    for (int f = 0; f < kTogether; ++f) {
      if (begin + f < size) {
        at.load(Column<C>(of_rank(begin + f), 0, type), raw[f]);
      }
    }
    FUSEDPG_UNROLL
    for (int f = 0; f < kTogether; ++f) {
      if (begin + f < size) {
        add_rank(begin + f, weights, type, raw[f], sum);
      }
    }
  }
}

// The sum of all ranks' blocks, which lie one behind the other.
template <typename C>
struct FoldedBlocks {
  const char* first; // rank 0's
  uint64_t stride; // from one rank's to the next one's, in bytes
  const double* weights; // by rank; each product is rounded. Null: none
  int size;
  DType type;

  FUSEDPG_HOST_DEVICE bool aligned() const {
    return is_aligned(first) && stride % 16 == 0;
  }
  template <int W, int U, bool kFull>
  FUSEDPG_HOST_DEVICE void gather(
      const Vectors<W, U, kFull>& at,
      C (&sum)[U][W]) const {
    fold_ranks(
        at,
        size,
        weights,
        type,
        [&](int rank) { return first + rank * stride; },
        sum);
  }
};

// to = sum * factor, rounded once.
template <typename C>
FUSEDPG_HOST_DEVICE void fold_elements(
    const Column<C>& to,
    const FoldedBlocks<C>& from,
    uint32_t n,
    C factor,
    int thread,
    int threads) {
  constexpr int W = kWidth<C>;
  const auto work = [&](const auto& at) {
    C sum[1][W] = {};
    from.gather(at, sum);
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      sum[0][e] = sum[0][e] * factor;
    }
    at.store(to, 0, sum[0]);
  };
  const uint32_t stride = threads * W;
  const uint32_t full = to.aligned && from.aligned() ? n / W * W : 0;
  for (uint32_t i = thread * W; i < n; i += stride) {
    if (i < full) {
      work(Vectors<W, 1, true>{i, stride, full});
    } else {
      work(Vectors<W, 1, false>{i, stride, n});
    }
  }
}

} // namespace fusedpg::cuda
