#include "check.hpp"
#include "kernels_reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace fusedpg;
using namespace fusedpg::test;
using kernels::Table;

constexpr int kDTypes = static_cast<int>(DType::kComplex128) + 1;
constexpr int kOps = static_cast<int>(RedOp::kPremulSum) + 1;

// --- comparing and filling ---------------------------------------------------

// Replaces every NaN by one bit pattern: which payload survives an operation on
// two NaNs is not part of the contract. Returns how many there were.
size_t canonical(DType dtype, Bytes& bytes) {
  const auto walk = [&](auto infinity) {
    using U = decltype(infinity);
    const U no_sign = static_cast<U>(-1) >> 1;
    size_t found = 0;
    for (size_t i = 0; i + sizeof(U) <= bytes.size(); i += sizeof(U)) {
      U bits;
      std::memcpy(&bits, &bytes[i], sizeof(U));
      if ((bits & no_sign) > infinity) {
        ++found;
        std::memcpy(&bytes[i], &no_sign, sizeof(U));
      }
    }
    return found;
  };
  switch (dtype) {
    case DType::kFloat16:
      return walk(uint16_t{0x7c00});
    case DType::kBFloat16:
      return walk(uint16_t{0x7f80});
    case DType::kFloat32:
    case DType::kComplex64:
      return walk(uint32_t{0x7f800000});
    case DType::kFloat64:
    case DType::kComplex128:
      return walk(uint64_t{0x7ff0000000000000});
    default:
      return 0;
  }
}

// Random values of moderate size, every bit pattern for integers, and (with
// `special`) NaN, infinities, zeros of both signs and denormals sprinkled in.
Bytes filled(DType dtype, size_t count, std::mt19937_64& random, bool special) {
  Bytes out(count * dtype_size(dtype));
  const auto put = [&](auto convert, auto infinity) {
    using U = decltype(infinity);
    std::normal_distribution<double> normal;
    const U sign = static_cast<U>(~(static_cast<U>(-1) >> 1));
    const U specials[] = {
        0,
        sign,
        infinity,
        static_cast<U>(infinity | sign),
        static_cast<U>(infinity + 1),
        static_cast<U>(infinity | sign | 77),
        1,
        static_cast<U>(sign | 5),
        static_cast<U>(infinity - 1)};
    for (size_t i = 0; i < out.size(); i += sizeof(U)) {
      U bits = convert(normal(random) * 3);
      if (special && random() % 4 == 0) {
        bits = specials[random() % std::size(specials)];
      }
      std::memcpy(&out[i], &bits, sizeof(U));
    }
  };
  switch (dtype) {
    case DType::kFloat16:
      put([](double x) { return nearest_half(x); }, uint16_t{0x7c00});
      break;
    case DType::kBFloat16:
      put([](double x) { return nearest_bfloat(x); }, uint16_t{0x7f80});
      break;
    case DType::kFloat32:
    case DType::kComplex64:
      put([](double x) { return std::bit_cast<uint32_t>(float(x)); },
          uint32_t{0x7f800000});
      break;
    case DType::kFloat64:
    case DType::kComplex128:
      put([](double x) { return std::bit_cast<uint64_t>(x); },
          uint64_t{0x7ff0000000000000});
      break;
    case DType::kBool:
      for (uint8_t& byte : out) {
        byte = random() % 3 == 0 ? static_cast<uint8_t>(random()) : 0;
      }
      break;
    default:
      for (uint8_t& byte : out) {
        byte = static_cast<uint8_t>(random());
      }
  }
  return out;
}

struct Shape {
  size_t num_srcs;
  size_t num_dsts;
  size_t count;
  size_t misalign; // bytes
  bool in_place; // the first dsts are the last srcs
  bool stream;
};

// Runs one reduction on a table; every dst must hold the same bytes, and
// nothing outside of the dsts may change.
Bytes run(
    const Table& table,
    const ReduceArgs& args,
    const Shape& shape,
    const std::vector<Bytes>& inputs) {
  constexpr size_t kGuard = 128;
  const size_t bytes = shape.count * dtype_size(args.dtype);
  const auto room = [&] { return Bytes(bytes + 2 * kGuard + 64, 0xa5); };
  // Different offsets for the different spans, multiples of the misalignment.
  const auto start = [&](size_t span) {
    return kGuard + (span + 1) * shape.misalign % 64;
  };
  std::vector<Bytes> src_rooms(shape.num_srcs);
  std::vector<Bytes> dst_rooms(shape.num_dsts);
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (size_t k = 0; k < shape.num_srcs; ++k) {
    src_rooms[k] = room();
    std::copy(
        inputs[k].begin(),
        inputs[k].begin() + bytes,
        src_rooms[k].begin() + start(k));
    srcs.push_back(src_rooms[k].data() + start(k));
  }
  size_t shared = 0;
  for (size_t j = 0; j < shape.num_dsts; ++j) {
    if (shape.in_place && j < shape.num_srcs) {
      dsts.push_back(const_cast<void*>(srcs[shape.num_srcs - 1 - j]));
      ++shared;
    } else {
      dst_rooms[j] = room();
      dsts.push_back(dst_rooms[j].data() + start(j + 3));
    }
  }
  const std::vector<Bytes> before = src_rooms;
  table.reduce(
      args,
      dsts.data(),
      dsts.size(),
      srcs.data(),
      srcs.size(),
      shape.count,
      shape.stream);
  const auto* first = static_cast<const uint8_t*>(dsts[0]);
  Bytes result(first, first + bytes);
  for (size_t j = 0; j < shape.num_dsts; ++j) {
    CHECK(bytes == 0 || std::memcmp(dsts[j], result.data(), bytes) == 0);
    if (j >= shared) {
      const Bytes& r = dst_rooms[j];
      const auto untouched = [](uint8_t b) { return b == 0xa5; };
      const auto begin = r.begin() + start(j + 3);
      CHECK(std::all_of(r.begin(), begin, untouched));
      CHECK(std::all_of(begin + bytes, r.end(), untouched));
    }
  }
  for (size_t k = 0; k < shape.num_srcs; ++k) {
    Bytes expected = before[k];
    if (k >= shape.num_srcs - shared) {
      std::copy(result.begin(), result.end(), expected.begin() + start(k));
    }
    CHECK(src_rooms[k] == expected);
  }
  return result;
}

std::string described(const Table& table, const ReduceArgs& a, const Shape& s) {
  return std::string(table.name) + " " + dtype_name(a.dtype) + " " +
      red_op_name(a.op) + " srcs " + std::to_string(s.num_srcs) + " dsts " +
      std::to_string(s.num_dsts) + " count " + std::to_string(s.count) +
      " misalign " + std::to_string(s.misalign) + " in_place " +
      std::to_string(s.in_place) + " stream " + std::to_string(s.stream);
}

bool check_reduce(
    const ReduceArgs& args,
    const Shape& shape,
    const std::vector<Bytes>& inputs) {
  std::vector<const void*> srcs;
  for (size_t k = 0; k < shape.num_srcs; ++k) {
    srcs.push_back(inputs[k].data());
  }
  Bytes expected = reference(args, srcs, shape.count);
  canonical(args.dtype, expected);
  for (const Table* table : tables()) {
    Bytes got = run(*table, args, shape, inputs);
    canonical(args.dtype, got);
    if (got != expected) {
      report_failure(__FILE__, __LINE__, described(*table, args, shape));
      return false;
    }
  }
  return true;
}

// Calls f(args) for every supported pair of dtype and op.
template <typename F>
void for_each_reduction(F f) {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kOps; ++o) {
      ReduceArgs args;
      args.dtype = static_cast<DType>(d);
      args.op = static_cast<RedOp>(o);
      args.factor = 1.0 / 3.0;
      if (reduction_supported(args.dtype, args.op)) {
        f(args);
      }
    }
  }
}

} // namespace

TEST(kernels_table_by_name) {
  CHECK(kernels::table() != nullptr);
  CHECK(kernels::table("no such table") == nullptr);
  CHECK(!tables().empty());
  CHECK_EQ(kernels::table(), tables().front());
  for (const Table* table : tables()) {
    CHECK_EQ(kernels::table(table->name), table);
  }
}

TEST(dtype_names_and_support) {
  CHECK_EQ(std::string(dtype_name(DType::kBFloat16)), "bfloat16");
  CHECK_EQ(std::string(red_op_name(RedOp::kPremulSum)), "PREMUL_SUM");
  size_t supported = 0;
  for_each_reduction([&](const ReduceArgs&) { ++supported; });
  // 8 integers x 8, 4 reals x 6, bool 7, 2 complex x 4.
  CHECK_EQ(supported, size_t{8 * 8 + 4 * 6 + 7 + 2 * 4});
  for (int o = 0; o < kOps; ++o) {
    CHECK(!reduction_supported(DType::kOpaque, static_cast<RedOp>(o)));
  }
}

// Every dtype, op, number of sources and destinations, on a count with whole
// tiles, whole vectors and a rest.
TEST(kernels_reduce_all_shapes) {
  std::mt19937_64 random(1);
  for_each_reduction([&](ReduceArgs args) {
    for (bool special : {false, true}) {
      constexpr size_t kCount = 1117;
      std::vector<Bytes> inputs;
      for (size_t k = 0; k < 9; ++k) {
        inputs.push_back(filled(args.dtype, kCount, random, special));
      }
      for (size_t srcs = 1; srcs <= 9; ++srcs) {
        if (kSanitized && srcs > 3 && srcs < 9) {
          continue;
        }
        args.divisor = static_cast<int64_t>(srcs);
        const size_t dsts = 1 + srcs % 4;
        for (bool in_place : {false, true}) {
          const Shape shape{
              srcs, dsts, kCount, srcs % 2 * 4, in_place, srcs % 3 == 0};
          if (!check_reduce(args, shape, inputs)) {
            return;
          }
        }
      }
    }
  });
}

TEST(kernels_reduce_all_counts) {
  std::mt19937_64 random(2);
  for (DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kInt8, DType::kComplex128}) {
    ReduceArgs args;
    args.dtype = dtype;
    std::vector<Bytes> inputs;
    for (size_t k = 0; k < 3; ++k) {
      inputs.push_back(filled(dtype, 5000, random, true));
    }
    for (size_t count = 0; count <= 5000; count += count < 140 ? 1 : 243) {
      for (bool stream : {false, true}) {
        const Shape shape{3, 2, count, count % 7 * 4, stream, stream};
        if (!check_reduce(args, shape, inputs)) {
          return;
        }
      }
    }
  }
}

// Spans need not even be aligned to their elements.
TEST(kernels_reduce_any_alignment) {
  std::mt19937_64 random(3);
  for_each_reduction([&](ReduceArgs args) {
    args.divisor = 2;
    const std::vector<Bytes> inputs{
        filled(args.dtype, 300, random, true),
        filled(args.dtype, 300, random, true)};
    for (size_t misalign : {1, 2, 3, 8, 12, 16, 33, 60}) {
      for (bool stream : {false, true}) {
        if (!check_reduce(args, {2, 2, 300, misalign, false, stream}, inputs)) {
          return;
        }
      }
    }
  });
}

// Many tiles of streamed stores, destinations on and off line boundaries.
TEST(kernels_reduce_streams_large_spans) {
  std::mt19937_64 random(4);
  ReduceArgs args;
  const std::vector<Bytes> inputs{
      filled(DType::kFloat32, 100003, random, false),
      filled(DType::kFloat32, 100003, random, false)};
  for (size_t misalign : {0, 4, 32}) {
    for (bool in_place : {false, true}) {
      CHECK(
          check_reduce(args, {2, 3, 100003, misalign, in_place, true}, inputs));
    }
  }
}

// Rounding must not carry a NaN's low bits into its sign or exponent.
TEST(kernels_half_of_nans) {
  const uint32_t nans[] = {
      0x7fffffff, 0xffffffff, 0x7f800001, 0xff800001, 0x7f80ffff, 0x7fffff00};
  float values[std::size(nans)];
  std::memcpy(values, nans, sizeof nans);
  for (const Table* table : tables()) {
    for (const auto& [type, infinity] :
         {std::pair(DType::kFloat16, 0x7c00),
          std::pair(DType::kBFloat16, 0x7f80)}) {
      uint16_t halves[std::size(nans)];
      table->cast(type, halves, DType::kFloat32, values, std::size(nans));
      for (const uint16_t half : halves) {
        CHECK((half & 0x7fff) > infinity);
      }
    }
  }
}

TEST(kernels_half_values_round_trip) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Bytes all(65536 * 2);
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      std::memcpy(&all[2 * i], &bits, 2);
    }
    ReduceArgs args;
    args.dtype = dtype;
    Bytes expected = all;
    CHECK_EQ(
        canonical(dtype, expected),
        size_t{dtype == DType::kFloat16 ? 2u * 1023 : 2u * 127});
    Bytes widest;
    for (const Table* table : tables()) {
      Bytes got = run(*table, args, {1, 1, 65536, 0, false, false}, {all});
      if (widest.empty()) {
        widest = got;
      }
      // Across instruction sets even the NaNs are the same.
      CHECK(got == widest);
      canonical(dtype, got);
      CHECK(got == expected);
    }
    // Every value next to every rounding situation.
    for (double factor : {1.0 / 3, 0.5, 1.0009765625, 1.5, 6e-5, 3e-8, 1e9}) {
      args.op = RedOp::kPremulSum;
      args.factor = factor;
      CHECK(check_reduce(args, {1, 1, 65536, 0, false, false}, {all}));
    }
  }
}

TEST(kernels_min_max_rules) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float low[] = {nan, 1, -0.0f, 0.0f, 2};
  const float high[] = {1, nan, 0.0f, -0.0f, 3};
  for (const Table* table : tables()) {
    float out[5];
    void* dst = out;
    const void* srcs[] = {low, high};
    ReduceArgs args;
    args.op = RedOp::kMin;
    table->reduce(args, &dst, 1, srcs, 2, 5, false);
    CHECK(std::isnan(out[0]) && std::isnan(out[1]));
    CHECK(out[2] == 0 && std::signbit(out[2]));
    CHECK(out[3] == 0 && !std::signbit(out[3]));
    CHECK_EQ(out[4], 2.0f);
    args.op = RedOp::kMax;
    table->reduce(args, &dst, 1, srcs, 2, 5, false);
    CHECK(std::isnan(out[0]) && std::isnan(out[1]));
    CHECK(out[2] == 0 && std::signbit(out[2]));
    CHECK_EQ(out[4], 3.0f);
  }
}

TEST(kernels_copy_any_size) {
  std::mt19937_64 random(5);
  const Bytes src = filled(DType::kUInt8, 40000, random, false);
  for (const Table* table : tables()) {
    for (size_t bytes : {0, 1, 63, 64, 65, 255, 256, 1000, 4097, 39000}) {
      for (size_t offset : {0, 1, 17, 64}) {
        for (bool stream : {false, true}) {
          Bytes dst(40000, 0);
          table->copy(
              dst.data() + offset, src.data() + 2 * offset, bytes, stream);
          Bytes expected(40000, 0);
          std::copy_n(
              src.begin() + 2 * offset, bytes, expected.begin() + offset);
          CHECK(dst == expected);
        }
      }
    }
  }
}

TEST(kernels_has_nan_finds_one) {
  std::mt19937_64 random(6);
  for (int d = 0; d <= kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    const size_t size = dtype_size(dtype);
    for (size_t count : {0, 1, 7, 64, 5001}) {
      Bytes values = filled(dtype, count, random, true);
      Bytes probe = values;
      const bool expected = canonical(dtype, probe) != 0;
      for (const Table* table : tables()) {
        CHECK_EQ(table->has_nan(dtype, values.data(), count), expected);
      }
    }
    // Infinities and the rest, then a single NaN at the end of a byte string
    // of ones, which is a NaN of either sign in every format.
    Bytes values = filled(dtype, 5001, random, false);
    Bytes probe = values;
    std::fill(probe.end() - static_cast<int64_t>(size), probe.end(), 0xff);
    Bytes copy = probe;
    const bool floating = canonical(dtype, copy) != 0;
    for (const Table* table : tables()) {
      CHECK(!table->has_nan(dtype, values.data(), 5001));
      CHECK_EQ(table->has_nan(dtype, probe.data(), 5001), floating);
    }
  }
}
