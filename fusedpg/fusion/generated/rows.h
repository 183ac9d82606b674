namespace {

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
