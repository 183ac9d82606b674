#pragma once

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels_reference.hpp"
#include "operations.hpp"
#include "ranks.hpp"

// What the tests of collectives have in common: groups of several shapes, and
// inputs that every rank can compute for all ranks.
namespace fusedpg::test {

// Where a rank has its tensors.
enum class Place { kOrdinary, kArena, kMixed };
// Sanitizers find the same in fewer groups.
inline std::vector<int> world_sizes() {
  return kSanitized ? std::vector{3} : std::vector{1, 2, 3, 4};
}

constexpr Place kPlaces[] = {Place::kOrdinary, Place::kArena, Place::kMixed};

inline PlacedMemory placed(Group& g, Place place, size_t bytes, int salt = 0) {
  const bool in_arena = place == Place::kArena ||
      (place == Place::kMixed && (g.rank + salt) % 2 == 0);
  return PlacedMemory(g.engine.domain(), bytes, in_arena);
}

inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Values that depend on (seed, index): numbers of moderate size for floating
// types, any bits for integers.
inline Bytes values(DType dtype, size_t count, uint64_t seed) {
  const size_t size = dtype_size(dtype);
  Bytes out(count * size);
  const auto real = [](uint64_t bits) {
    return static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-63;
  };
  if (dtype == DType::kUInt8) { // eight at a time
    for (size_t i = 0; i < count; i += 8) {
      const uint64_t bits = mixed(seed * 0x10001 + i);
      std::memcpy(out.data() + i, &bits, std::min<size_t>(8, count - i));
    }
    return out;
  }
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = mixed(seed * 0x10001 + i);
    uint8_t* to = out.data() + i * size;
    const auto put = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (dtype) {
      case DType::kFloat32:
        put(static_cast<float>(real(bits)));
        break;
      case DType::kFloat64:
        put(real(bits));
        break;
      case DType::kComplex64:
        put(std::complex<float>(
            static_cast<float>(real(bits)),
            static_cast<float>(real(mixed(bits)))));
        break;
      case DType::kFloat16: // exponents from -4 to 3
        put(static_cast<uint16_t>((bits & 0x9fff) + 0x2c00));
        break;
      case DType::kBFloat16:
        put(static_cast<uint16_t>((bits & 0x83ff) + 0x3e00));
        break;
      case DType::kBool:
        put(static_cast<uint8_t>(bits & 1));
        break;
      default:
        std::memcpy(to, &bits, std::min(size, sizeof bits));
    }
  }
  return out;
}

// The same in about so many percent of the blocks; the others are zero.
inline Bytes values_in_blocks(
    DType dtype,
    size_t count,
    uint64_t seed,
    size_t block,
    size_t percent) {
  Bytes x = values(dtype, count, seed);
  const size_t bytes = block * dtype_size(dtype);
  for (size_t b = 0; b * bytes < x.size(); ++b) {
    if (mixed(seed * 1000003 + b) % 100 >= percent) {
      const size_t end = std::min(x.size(), (b + 1) * bytes);
      std::fill(x.begin() + b * bytes, x.begin() + end, 0);
    }
  }
  return x;
}

// The reduction of values(dtype, count, seed + rank) over `size` ranks.
inline Bytes reduced(
    const ReduceArgs& args,
    size_t count,
    uint64_t seed,
    int size) {
  std::vector<Bytes> all;
  for (int p = 0; p < size; ++p) {
    all.push_back(values(args.dtype, count, seed + p));
  }
  if (args.dtype != DType::kFloat32 || args.op != RedOp::kSum) {
    return reference(args, pointers_to(all), count);
  }
  Bytes out = all[0]; // the same, faster
  auto* sum = reinterpret_cast<float*>(out.data());
  for (int p = 1; p < size; ++p) {
    const auto* more = reinterpret_cast<const float*>(all[p].data());
    for (size_t i = 0; i < count; ++i) {
      sum[i] += more[i];
    }
  }
  return out;
}

inline ReduceArgs sum_of(DType dtype = DType::kFloat32) {
  ReduceArgs args;
  args.dtype = dtype;
  return args;
}

using GroupBody = std::function<void(Group&)>;

// `shares`: the body calls share_memory(), whose memory is never given back.
inline void with_group(
    int size,
    int threads,
    const GroupBody& body,
    bool shares = false) {
  on_threads(size, [&](int rank, Store& store) {
    Group group(rank, size, store, test_settings(threads));
    body(group);
    if (!shares) {
      CHECK_EQ(group.engine.domain().arena()->used_bytes(), size_t{0});
    }
    group.run([](Context& ctx) { barrier(ctx); });
  });
}

// Groups of several sizes, ranks with one and two threads.
inline void with_groups(const GroupBody& body) {
  std::vector<std::pair<int, int>> all{{1, 2}, {2, 2}, {3, 1}};
  if (!kSanitized) {
    all.insert(all.end(), {{1, 1}, {2, 1}, {4, 2}, {8, 1}});
  }
  for (const auto& [size, threads] : all) {
    with_group(size, threads, body);
  }
}

// The group still works, and its ranks agree about where they are.
inline void check_usable(Group& g) {
  for (size_t count : {size_t{7}, size_t{40000}}) {
    const uint64_t seed = g.sequence * 100;
    PlacedMemory b = placed(g, Place::kArena, count * sizeof(float));
    b.assign(values(DType::kFloat32, count, seed + g.rank).data());
    g.run(
        [&](Context& ctx) { all_reduce(ctx, {{b.data(), count}}, sum_of()); });
    CHECK(b.holds(reduced(sum_of(), count, seed, g.size).data()));
  }
}

} // namespace fusedpg::test
