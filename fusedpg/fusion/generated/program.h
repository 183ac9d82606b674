#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__clang__)
#define VECTORISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define VECTORISE _Pragma("GCC ivdep")
#endif

namespace {

// csrc/collectives/fused_program.hpp
struct Output {
  void* const* to;
  uint64_t num;
  uint32_t direct;
  uint32_t stream;
};
struct Args {
  const void* const* sources;
  uint64_t num_sources;
  const void* const* inputs;
  const Output* outputs;
  const double* numbers;
  const uint64_t* seeds;
  uint64_t phase;
  double* sums;
  const double* totals;
};

constexpr uint64_t kTile = 1024; // kProgramBlock
constexpr uint64_t kLine = 64;

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;

template <typename T>
inline T load(const T* from) {
  return *from;
}
inline float load(const bfloat16* from) {
  const uint32_t bits = uint32_t(from->bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float load(const float16* from) {
  return float(*from);
}

// A float that is a value of the type.
template <typename T>
inline float rounded(float value) {
  return float(T(value));
}
template <>
inline float rounded<bfloat16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  bits = value != value ? 0x7fc00000 : bits;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
inline void store(T* to, T value) {
  *to = value;
}
inline void store(bfloat16* to, float value) { // which has been rounded
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = uint16_t(bits >> 16);
}
inline void store(float16* to, float value) {
  *to = float16(value);
}

// Without immintrin.h, which would take half of the compiler's time.
#if defined(__x86_64__)
#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX2__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif
typedef char Vector __attribute__((vector_size(kVector), may_alias));
inline void stream_vector(char* to, const char* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
#if defined(__AVX512F__)
  asm volatile("vmovntdq %1, %0"
               : "=m"(*reinterpret_cast<Vector*>(to))
               : "v"(value));
#elif defined(__AVX2__)
  asm volatile("vmovntdq %1, %0"
               : "=m"(*reinterpret_cast<Vector*>(to))
               : "x"(value));
#else
  asm volatile("movntdq %1, %0"
               : "=m"(*reinterpret_cast<Vector*>(to))
               : "x"(value));
#endif
}
#endif

// Full lines go around the cache; the ends are ordinary stores.
inline void write(char* to, const char* from, uint64_t bytes, bool stream) {
#if defined(__x86_64__)
  if (stream) {
    const uint64_t lead = -reinterpret_cast<uintptr_t>(to) & (kLine - 1);
    const uint64_t head = lead < bytes ? lead : bytes;
    std::memcpy(to, from, head);
    uint64_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
      for (uint64_t k = 0; k < kLine; k += sizeof(Vector)) {
        stream_vector(to + at + k, from + at + k);
      }
    }
    std::memcpy(to + at, from + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// Where a tile of a result is computed.
template <typename T>
inline T* place(const Output& output, T* tile, uint64_t at) {
  return output.direct ? static_cast<T*>(output.to[0]) + at : tile;
}
template <typename T>
inline void deliver(
    const Output& output,
    const T* values,
    uint64_t at,
    uint64_t n) {
  for (uint64_t k = output.direct ? 1 : 0; k < output.num; ++k) {
    write(
        reinterpret_cast<char*>(static_cast<T*>(output.to[k]) + at),
        reinterpret_cast<const char*>(values),
        n * sizeof(T),
        output.stream);
  }
}
// Streamed stores are weakly ordered: who is told afterwards that the data are there must see them.
inline void fence() {
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}

// A NaN of either comes out. Each condition chooses a value of its own: GCC makes branches of
// conditions that are joined, and does not vectorise a loop that has some.
template <typename T>
inline T maximum(T a, T b) {
  const T most = a > b ? a : b;
  return a != a ? a : most;
}
template <typename T>
inline T minimum(T a, T b) {
  const T least = a < b ? a : b;
  return a != a ? a : least;
}

// The same over the ranks: of -0 and +0 the earlier stays.
template <typename T>
inline T greater(T a, T b) {
  const T most = b > a ? b : a;
  return b != b ? b : most;
}
template <typename T>
inline T lesser(T a, T b) {
  const T least = b < a ? b : a;
  return b != b ? b : least;
}

// Operands that repeat with a period, or stay for so many elements.
template <typename T>
inline void rows(
    T* to,
    const T* from,
    uint64_t period,
    uint64_t begin,
    uint64_t count) {
  uint64_t at = begin % period;
  for (uint64_t i = 0; i < count;) {
    const uint64_t n = period - at < count - i ? period - at : count - i;
    for (uint64_t k = 0; k < n; ++k) {
      to[i + k] = from[at + k];
    }
    i += n;
    at = 0;
  }
}
template <typename T>
inline void columns(
    T* to,
    const T* from,
    uint64_t stay,
    uint64_t begin,
    uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    to[i] = from[(begin + i) / stay];
  }
}

// Philox4x32-10: the words of elements `begin` to `begin + count`; element i
// has word i % 4 of block i / 4. Returns where the first one is.
inline const uint32_t* philox(
    uint32_t* words,
    uint64_t seed,
    uint64_t begin,
    uint64_t count) {
  const uint64_t first = begin / 4;
  const uint64_t blocks = (begin + count + 3) / 4 - first;
  VECTORISE
  for (uint64_t b = 0; b < blocks; ++b) {
    uint32_t c0 = uint32_t(first + b), c1 = uint32_t((first + b) >> 32);
    uint32_t c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t left = uint64_t(c0) * 0xD2511F53u;
      const uint64_t right = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(right >> 32) ^ c1 ^ k0;
      c1 = uint32_t(right);
      c2 = uint32_t(left >> 32) ^ c3 ^ k1;
      c3 = uint32_t(left);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[4 * b] = c0;
    words[4 * b + 1] = c1;
    words[4 * b + 2] = c2;
    words[4 * b + 3] = c3;
  }
  return words + begin % 4;
}

template <typename T>
inline T* take(char*& scratch, uint64_t count) {
  T* result = reinterpret_cast<T*>(scratch);
  scratch += ((count + kLine) * sizeof(T) + kLine - 1) / kLine * kLine;
  return result;
}

// Sums in an order that depends on the length alone: in blocks of 4096, element i of a block is
// added to number i % 32 of 32; these are added pairwise, and blocks' sums in double.
constexpr uint64_t kLanes = 32;
constexpr uint64_t kBlock = 4096;

template <typename T, typename Combine>
inline T folded(const T* x, uint64_t n, T first, Combine combine) {
  T lanes[kLanes];
  for (uint64_t j = 0; j < kLanes; ++j) {
    lanes[j] = first;
  }
  uint64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint64_t j = 0; j < kLanes; ++j) {
      lanes[j] = combine(lanes[j], x[i + j]);
    }
  }
  for (uint64_t j = 0; i + j < n; ++j) {
    lanes[j] = combine(lanes[j], x[i + j]);
  }
  for (uint64_t w = kLanes / 2; w > 0; w /= 2) {
    for (uint64_t j = 0; j < w; ++j) {
      lanes[j] = combine(lanes[j], lanes[j + w]);
    }
  }
  return lanes[0];
}
template <typename T>
inline T sum_of(const T* x, uint64_t n) {
  double total = 0;
  for (uint64_t at = 0; at < n; at += kBlock) {
    const uint64_t some = n - at < kBlock ? n - at : kBlock;
    total += folded(x + at, some, T(0), [](T a, T b) { return a + b; });
  }
  return T(total);
}
template <typename T>
inline T max_of(const T* x, uint64_t n) {
  return folded(x, n, T(-INFINITY), [](T a, T b) { return greater(a, b); });
}
template <typename T>
inline T min_of(const T* x, uint64_t n) {
  return folded(x, n, T(INFINITY), [](T a, T b) { return lesser(a, b); });
}

} // namespace
