#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/kernels.hpp"

// What a reduction has to give, one element at a time. Shares no code with the
// kernels.
namespace fusedpg::test {

using kernels::ReduceArgs;
using Bytes = std::vector<uint8_t>;

inline std::vector<const void*> pointers_to(const std::vector<Bytes>& all) {
  std::vector<const void*> pointers;
  for (const Bytes& one : all) {
    pointers.push_back(one.data());
  }
  return pointers;
}

// Every table this CPU runs.
inline std::vector<const kernels::Table*> tables() {
  std::vector<const kernels::Table*> all;
  for (const char* name : {"avx512", "avx2", "x86-64-v2", "neon", "scalar"}) {
    if (const kernels::Table* table = kernels::table(name)) {
      all.push_back(table);
    }
  }
  return all;
}

// fp32 of a half, exactly, through the definition of the format.
inline float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  return exponent == 0
      ? std::ldexp(sign * static_cast<float>(mantissa), -24)
      : std::ldexp(sign * static_cast<float>(mantissa + 1024), exponent - 25);
}

// Nearest half, ties to the even mantissa: the candidates are adjacent bit
// patterns, found by bisection.
inline uint16_t nearest_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double wanted = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) {
    return 0x7e00;
  }
  if (wanted >= 65520.0) { // half way from the largest half to 2^16
    return sign | 0x7c00;
  }
  uint16_t low = 0;
  uint16_t high = 0x7c00;
  while (high - low > 1) {
    const uint16_t middle = (low + high) / 2;
    (half_value(middle) <= wanted ? low : high) = middle;
  }
  const double below = wanted - half_value(low);
  const double above = (high == 0x7c00 ? 65536.0 : half_value(high)) - wanted;
  const bool up = above < below || (above == below && (low & 1) != 0);
  return sign | (up ? high : low);
}

inline float bfloat_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t nearest_bfloat(float value) {
  if (std::isnan(value)) {
    return 0x7fc0;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rest = bits & 0xffff;
  const bool up = rest > 0x8000 || (rest == 0x8000 && ((bits >> 16) & 1) != 0);
  return static_cast<uint16_t>((bits >> 16) + (up ? 1 : 0));
}

// Element i of an array at any alignment.
inline double number(DType type, const void* data, size_t i) {
  const auto at = [&]<typename T>(T value) {
    std::memcpy(
        &value,
        static_cast<const char*>(data) + i * sizeof value,
        sizeof value);
    return value;
  };
  switch (type) {
    case DType::kFloat16:
      return half_value(at(uint16_t{}));
    case DType::kBFloat16:
      return bfloat_value(at(uint16_t{}));
    case DType::kFloat32:
      return at(float{});
    case DType::kInt32:
      return at(int32_t{});
    case DType::kInt64:
      return static_cast<double>(at(int64_t{}));
    default:
      return at(double{});
  }
}
inline void put_number(DType type, void* data, size_t i, double x) {
  const auto put = [&](auto value) {
    std::memcpy(
        static_cast<char*>(data) + i * sizeof value, &value, sizeof value);
  };
  const auto narrow = static_cast<float>(x);
  switch (type) {
    case DType::kFloat16:
      return put(nearest_half(narrow));
    case DType::kBFloat16:
      return put(nearest_bfloat(narrow));
    case DType::kFloat32:
      return put(narrow);
    case DType::kInt32:
      return put(static_cast<int32_t>(x));
    case DType::kInt64:
      return put(static_cast<int64_t>(x));
    default:
      return put(x);
  }
}

// x as the type holds it.
inline double rounded(DType type, double x) {
  char bytes[sizeof x];
  put_number(type, bytes, 0, x);
  return number(type, bytes, 0);
}

// `acc` op `x` for real floating-point types.
template <typename T>
T combine(RedOp op, T acc, T x, T factor) {
  switch (op) {
    case RedOp::kProduct:
      return acc * x;
    case RedOp::kMin:
      return std::isnan(acc) ? acc : std::isnan(x) ? x : x < acc ? x : acc;
    case RedOp::kMax:
      return std::isnan(acc) ? acc : std::isnan(x) ? x : x > acc ? x : acc;
    case RedOp::kPremulSum: {
      const volatile T scaled = x * factor; // rounds before the sum
      return acc + scaled;
    }
    default:
      return acc + x;
  }
}

template <typename T>
T fold(const ReduceArgs& args, const std::vector<T>& xs) {
  const T factor = static_cast<T>(args.factor);
  T acc = args.op == RedOp::kPremulSum ? xs[0] * factor : xs[0];
  for (size_t k = 1; k < xs.size(); ++k) {
    acc = combine(args.op, acc, xs[k], factor);
  }
  return args.op == RedOp::kAvg ? acc / static_cast<T>(args.divisor) : acc;
}

template <typename T>
T fold_integer(const ReduceArgs& args, const std::vector<T>& xs) {
  T acc = xs[0];
  for (size_t k = 1; k < xs.size(); ++k) {
    const T x = xs[k];
    const auto a = static_cast<uint64_t>(acc);
    const auto b = static_cast<uint64_t>(x);
    switch (args.op) {
      case RedOp::kProduct:
        acc = static_cast<T>(a * b);
        break;
      case RedOp::kMin:
        acc = std::min(acc, x);
        break;
      case RedOp::kMax:
        acc = std::max(acc, x);
        break;
      case RedOp::kBand:
        acc = static_cast<T>(a & b);
        break;
      case RedOp::kBor:
        acc = static_cast<T>(a | b);
        break;
      case RedOp::kBxor:
        acc = static_cast<T>(a ^ b);
        break;
      default:
        acc = static_cast<T>(a + b);
    }
  }
  if (args.op == RedOp::kAvg) {
    using W = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    acc = static_cast<T>(static_cast<W>(acc) / static_cast<W>(args.divisor));
  }
  return acc;
}

inline uint8_t fold_bool(
    const ReduceArgs& args,
    const std::vector<uint8_t>& xs) {
  const auto set =
      std::count_if(xs.begin(), xs.end(), [](uint8_t x) { return x != 0; });
  switch (args.op) {
    case RedOp::kSum:
    case RedOp::kMax:
    case RedOp::kBor:
      return set > 0;
    case RedOp::kBxor:
      return set % 2;
    default:
      return set == static_cast<int64_t>(xs.size());
  }
}

template <typename T>
std::complex<T> fold_complex(
    const ReduceArgs& args,
    const std::vector<std::complex<T>>& xs) {
  std::vector<T> re;
  std::vector<T> im;
  for (const auto& x : xs) {
    re.push_back(x.real());
    im.push_back(x.imag());
  }
  if (args.op != RedOp::kProduct) {
    return {fold(args, re), fold(args, im)};
  }
  volatile T a = re[0];
  volatile T b = im[0];
  for (size_t k = 1; k < xs.size(); ++k) {
    // volatile: every product is rounded.
    volatile T ax = a * re[k];
    volatile T by = b * im[k];
    volatile T ay = a * im[k];
    volatile T bx = b * re[k];
    a = ax - by;
    b = ay + bx;
  }
  return {a, b};
}

// Calls `fold_one` on every element; T is what lies in memory.
template <typename T, typename F>
Bytes each(const std::vector<const void*>& srcs, size_t count, F fold_one) {
  Bytes out(count * sizeof(T));
  std::vector<T> xs(srcs.size());
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < srcs.size(); ++k) {
      std::memcpy(
          &xs[k], static_cast<const char*>(srcs[k]) + i * sizeof(T), sizeof(T));
    }
    const T value = fold_one(xs);
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
  return out;
}

inline Bytes reference(
    const ReduceArgs& args,
    const std::vector<const void*>& srcs,
    size_t count) {
  const auto integer = [&]<typename T>(T) {
    return each<T>(srcs, count, [&](const std::vector<T>& xs) {
      return fold_integer(args, xs);
    });
  };
  const auto real = [&]<typename T>(T) {
    return each<T>(
        srcs, count, [&](const std::vector<T>& xs) { return fold(args, xs); });
  };
  const auto complex = [&]<typename T>(T) {
    return each<std::complex<T>>(
        srcs, count, [&](const std::vector<std::complex<T>>& xs) {
          return fold_complex(args, xs);
        });
  };
  const auto half = [&](auto value, auto nearest) {
    return each<uint16_t>(
        srcs, count, [&](const std::vector<uint16_t>& xs) -> uint16_t {
          std::vector<float> wide;
          for (uint16_t x : xs) {
            wide.push_back(value(x));
          }
          return nearest(fold(args, wide));
        });
  };
  switch (args.dtype) {
    case DType::kUInt8:
      return integer(uint8_t{});
    case DType::kInt8:
      return integer(int8_t{});
    case DType::kInt16:
      return integer(int16_t{});
    case DType::kInt32:
      return integer(int32_t{});
    case DType::kInt64:
      return integer(int64_t{});
    case DType::kUInt16:
      return integer(uint16_t{});
    case DType::kUInt32:
      return integer(uint32_t{});
    case DType::kUInt64:
      return integer(uint64_t{});
    case DType::kFloat16:
      return half(half_value, nearest_half);
    case DType::kBFloat16:
      return half(bfloat_value, nearest_bfloat);
    case DType::kFloat32:
      return real(float{});
    case DType::kFloat64:
      return real(double{});
    case DType::kComplex64:
      return complex(float{});
    case DType::kComplex128:
      return complex(double{});
    case DType::kBool:
      return each<uint8_t>(srcs, count, [&](const std::vector<uint8_t>& xs) {
        return fold_bool(args, xs);
      });
    case DType::kOpaque:
      break;
  }
  return {};
}

} // namespace fusedpg::test
