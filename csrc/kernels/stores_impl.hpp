// Part of kernels_impl.hpp: stores, ordinary and around the cache.

constexpr size_t kLine = 64;

FUSEDPG_INLINE size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

// Bytes from `p` to the next cache line.
FUSEDPG_INLINE size_t to_line(const void* p) {
  return -reinterpret_cast<uintptr_t>(p) & (kLine - 1);
}

#if defined(__x86_64__)
// `dst` is aligned to a line, `lines` lines are written. Four lines are loaded
// before they are stored, to keep several misses in flight.
static void stream_lines(char* dst, const char* src, size_t lines) {
#if defined(__AVX512F__)
  using Vector = __m512i;
#define FUSEDPG_LOAD(p) _mm512_loadu_si512(p)
#define FUSEDPG_STREAM(p, v) _mm512_stream_si512(p, v)
#elif defined(__AVX2__)
  using Vector = __m256i;
#define FUSEDPG_LOAD(p) _mm256_loadu_si256(p)
#define FUSEDPG_STREAM(p, v) _mm256_stream_si256(p, v)
#else
  using Vector = __m128i;
#define FUSEDPG_LOAD(p) _mm_loadu_si128(p)
#define FUSEDPG_STREAM(p, v) _mm_stream_si128(p, v)
#endif
  constexpr size_t kVectors = kLine / sizeof(Vector);
  auto* out = reinterpret_cast<Vector*>(dst);
  const auto* in = reinterpret_cast<const Vector*>(src);
  for (; lines >= 4; lines -= 4) {
    Vector v[4 * kVectors];
#pragma GCC unroll 16
    for (size_t k = 0; k < 4 * kVectors; ++k) {
      v[k] = FUSEDPG_LOAD(in + k);
    }
#pragma GCC unroll 16
    for (size_t k = 0; k < 4 * kVectors; ++k) {
      FUSEDPG_STREAM(out + k, v[k]);
    }
    in += 4 * kVectors;
    out += 4 * kVectors;
  }
  for (; lines > 0; --lines) {
#pragma GCC unroll 4
    for (size_t k = 0; k < kVectors; ++k) {
      FUSEDPG_STREAM(out + k, FUSEDPG_LOAD(in + k));
    }
    in += kVectors;
    out += kVectors;
  }
#undef FUSEDPG_LOAD
#undef FUSEDPG_STREAM
}
#endif

FUSEDPG_INLINE bool contains(
    const void* const* pointers,
    size_t num,
    const void* wanted) {
  for (size_t k = 0; k < num; ++k) {
    if (pointers[k] == wanted) {
      return true;
    }
  }
  return false;
}

// Full lines go around the cache; the ends are ordinary stores.
static void stream_store(char* dst, const char* src, size_t bytes) {
#if defined(__x86_64__)
  const size_t head = smaller(to_line(dst), bytes);
  const size_t lines = (bytes - head) / kLine;
  const size_t body = head + lines * kLine;
  __builtin_memcpy(dst, src, head);
  stream_lines(dst + head, src + head, lines);
  __builtin_memcpy(dst + body, src + body, bytes - body);
#else
  __builtin_memcpy(dst, src, bytes);
#endif
}

// Streamed stores are weakly ordered: whoever is told afterwards that the data
// is there must see it.
FUSEDPG_INLINE void stream_fence([[maybe_unused]] bool stream) {
#if defined(__x86_64__)
  if (stream) {
    _mm_sfence();
  }
#endif
}

// Writes a tile to every destination. A destination that was just read has its
// lines in the cache: there a streamed store costs twice an ordinary one.
FUSEDPG_INLINE void store_tile(
    void* const* dsts,
    size_t num_dsts,
    const void* const* read,
    size_t num_read,
    size_t offset,
    const void* tile,
    size_t bytes,
    bool stream) {
  const auto* src = static_cast<const char*>(tile);
  for (size_t j = 0; j < num_dsts; ++j) {
    char* dst = static_cast<char*>(dsts[j]) + offset;
    if (stream && !contains(read, num_read, dsts[j])) {
      stream_store(dst, src, bytes);
    } else {
      __builtin_memcpy(dst, src, bytes);
    }
  }
}
