#include <ATen/cpu/vec/vec.h>

namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

// The formulas of torch's kernels.
template <typename T>
Vec<T> exp_of(const Vec<T>& x) {
  return x.exp();
}
template <typename T>
Vec<T> log_of(const Vec<T>& x) {
  return x.log();
}
template <typename T>
Vec<T> tanh_of(const Vec<T>& x) {
  return x.tanh();
}
template <typename T>
Vec<T> erf_of(const Vec<T>& x) {
  return x.erf();
}
// at::vec's own for float is off by up to 2e-7 everywhere: nothing is left of erf(1e-20).
template <>
inline Vec<float> erf_of(const Vec<float>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  return Sleef_erff16_u10(x);
#elif defined(CPU_CAPABILITY_AVX2)
  return Sleef_erff8_u10(x);
#else
  return x.erf();
#endif
}
template <typename T>
Vec<T> sigmoid_of(const Vec<T>& x) {
  return Vec<T>(1) / (Vec<T>(1) + x.neg().exp());
}
template <typename T>
Vec<T> silu_of(const Vec<T>& x) {
  return x / (Vec<T>(1) + x.neg().exp());
}
template <typename T>
Vec<T> gelu_of(const Vec<T>& x) {
  const Vec<T> alpha(T(M_SQRT1_2));
  return x * Vec<T>(T(0.5)) * (Vec<T>(1) + (x * alpha).erf());
}
template <typename T>
Vec<T> gelu_tanh_of(const Vec<T>& x) {
  const Vec<T> beta(T(M_SQRT2 * M_2_SQRTPI * 0.5));
  const Vec<T> inner = beta * (x + Vec<T>(T(0.044715)) * (x * x * x));
  return Vec<T>(T(0.5)) * x * (Vec<T>(1) + inner.tanh());
}

template <typename T>
void apply(T* tile, uint64_t count, Vec<T> (*function)(const Vec<T>&)) {
  constexpr uint64_t kLanes = Vec<T>::size();
  static_assert(kTile % kLanes == 0);
  for (uint64_t i = count; i % kLanes != 0; ++i) {
    tile[i] = 0;
  }
  for (uint64_t i = 0; i < count; i += kLanes) {
    function(Vec<T>::loadu(tile + i)).store(tile + i);
  }
}

template <typename T>
T one_of(T x, Vec<T> (*function)(const Vec<T>&)) {
  alignas(64) T values[Vec<T>::size()];
  function(Vec<T>(x)).store(values);
  return values[0];
}

} // namespace
