#define DEVICE __device__ __forceinline__

namespace {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kThreads = 256;
// Of a thread at once, so that several loads are under way.
constexpr u32 kItems = 4;
constexpr u32 kTile = kThreads * kItems;

struct bfloat16 {
  u16 bits;
};
struct float16 {
  u16 bits;
};

#if defined(__CUDA_ARCH__)
DEVICE float half_value(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEVICE u16 half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

template <typename T>
DEVICE T load(const T* from) {
  return *from;
}
DEVICE float load(const bfloat16* from) {
  return __uint_as_float(u32(from->bits) << 16);
}
DEVICE float load(const float16* from) {
  return half_value(from->bits);
}

// A float that is a value of the type.
template <typename T>
DEVICE float rounded(float value);
template <>
DEVICE float rounded<bfloat16>(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return __uint_as_float(value != value ? 0x7fc00000 : nearest);
}
template <>
DEVICE float rounded<float16>(float value) {
  return half_value(half_bits(value));
}

template <typename T>
DEVICE void store(T* to, T value) {
  *to = value;
}
DEVICE void store(bfloat16* to, float value) { // which has been rounded
  to->bits = u16(__float_as_uint(value) >> 16);
}
DEVICE void store(float16* to, float value) {
  to->bits = half_bits(value);
}

DEVICE float infinity() {
  return __uint_as_float(0x7f800000);
}
DEVICE float nan() {
  return __uint_as_float(0x7fc00000);
}

// Rounded to nearest, whatever the compiler is told.
DEVICE float root(float x) {
  return __fsqrt_rn(x);
}
DEVICE double root(double x) {
  return __dsqrt_rn(x);
}
template <typename T>
DEVICE T absolute(T x) {
  return fabs(x);
}

// A NaN of either comes out.
template <typename T>
DEVICE T maximum(T a, T b) {
  return a != a || a > b ? a : b;
}
template <typename T>
DEVICE T minimum(T a, T b) {
  return a != a || a < b ? a : b;
}

// Operands that repeat with a period, or stay for so many elements: the index
// that an element has there. Divisions of 64 bits are slow.
DEVICE u64 rows(u64 index, u64 period) {
  return (index | period) >> 32 ? index % period : u32(index) % u32(period);
}
DEVICE u64 columns(u64 index, u64 stay) {
  return (index | stay) >> 32 ? index / stay : u32(index) / u32(stay);
}

// Philox4x32-10: element i has word i % 4 of block i / 4.
DEVICE u32 philox(u64 seed, u64 index) {
  const u64 block = index / 4;
  u32 c0 = u32(block), c1 = u32(block >> 32), c2 = 0, c3 = 0;
  u32 k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 left = u64(c0) * 0xD2511F53u;
    const u64 right = u64(c2) * 0xCD9E8D57u;
    c0 = u32(right >> 32) ^ c1 ^ k0;
    c1 = u32(right);
    c2 = u32(left >> 32) ^ c3 ^ k1;
    c3 = u32(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const u32 word = u32(index) & 3;
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

} // namespace
