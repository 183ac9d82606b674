#pragma once

#include <cstring>
#include <random>

#include "base/ownership.hpp"
#include "kernels_reference.hpp"
#include "testing.hpp"

// What the tests of the CUDA kernels share, which run on the fake GPU.
namespace fusedpg::test {

using namespace cuda; // NOLINT: the launch arguments' names
using fake_gpu::Clean;
using fake_gpu::run;
using kernels::Formula;
using kernels::Hyper;

constexpr size_t kGuard = 64;

// Random elements of a type, with guards around them. `shift` elements after an
// aligned address.
class Array {
 public:
  Array() = default;
  Array(DType type, size_t count, size_t shift, uint32_t seed) : type_(type) {
    const size_t size = dtype_size(type);
    bytes_.resize(2 * kGuard + (count + shift) * size);
    begin_ = kGuard + shift * size;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) {
      // Zeros and denormals now and then.
      const float scale = i % 97 == 5 ? 0.0f : i % 89 == 7 ? 1e-39f : 1.0f;
      set(i, normal(random) * scale);
    }
  }
  void set(size_t i, double value) {
    put_number(type_, pointer(), i, value);
  }
  double get(size_t i) const {
    return number(type_, pointer(), i);
  }
  // Array allocations are aligned to 16 bytes, and so is kGuard.
  char* pointer(size_t i = 0) const {
    return const_cast<char*>(
        reinterpret_cast<const char*>(bytes_.data()) + begin_ +
        i * dtype_size(type_));
  }
  const Bytes& bytes() const {
    return bytes_;
  }

 private:
  DType type_ = DType::kFloat32;
  Bytes bytes_;
  size_t begin_ = 0;
};

struct Types {
  DType param;
  DType grad;
  DType state;
  bool masters;
};

inline std::vector<Types> all_types() {
  std::vector<Types> all{
      {DType::kFloat64, DType::kFloat64, DType::kFloat64, false}};
  const DType single[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const DType param : single) {
    for (const DType grad : single) {
      all.push_back({param, grad, DType::kFloat32, false});
      if (param != DType::kFloat32) {
        all.push_back({param, grad, DType::kFloat32, true});
        all.push_back({param, grad, param, false});
        all.push_back({param, grad, param, true});
      }
    }
  }
  return all;
}

// Tensors of a group of ranks, cut into pieces of at most `longest` elements.
struct Cut {
  std::vector<uint64_t> counts;
  int rank = 0;
  int size = 1;
  std::vector<ShardPiece> pieces;
  std::vector<Tile> tiles;
  uint64_t block = 0;

  Cut(std::vector<uint64_t> of, int r, int p, uint64_t longest)
      : counts(std::move(of)),
        rank(r),
        size(p) {
    for (uint32_t t = 0; t < counts.size(); ++t) {
      for (uint64_t begin = 0; begin < shard(t); begin += longest) {
        const uint64_t length = std::min(longest, shard(t) - begin);
        const auto index = static_cast<uint32_t>(pieces.size());
        pieces.push_back({t, 0, begin, length, block});
        for (uint32_t i = 0; i * uint64_t(kTile) < length; ++i) {
          tiles.push_back({index, i});
        }
        block += length;
      }
    }
  }
  uint64_t shard(size_t t) const {
    return static_cast<uint64_t>(
        shard_size(static_cast<int64_t>(counts[t]), size));
  }
  ShardRange slice(size_t t) const {
    return shard_range(static_cast<int64_t>(counts[t]), size, rank);
  }
  Chunk chunk(const std::vector<TensorInfo>& tensors) const {
    return {
        tensors.data(),
        pieces.data(),
        tiles.data(),
        static_cast<uint32_t>(tiles.size()),
        rank,
        size,
        0,
        block};
  }
  // Elements of a piece that this rank has.
  uint64_t valid(const ShardPiece& piece) const {
    const auto length = static_cast<uint64_t>(slice(piece.tensor).length);
    return length <= piece.begin ? 0
                                 : std::min(piece.length, length - piece.begin);
  }
};

// Ranks of three whose shards of some tensors are short or empty; pieces that
// begin inside a shard and tiles that end inside a piece; more tiles than
// blocks.
inline std::vector<Cut> all_cuts() {
  const std::vector<uint64_t> counts{1, 40, 1500, 13001};
  return {
      Cut(counts, 0, 3, 2048),
      Cut(counts, 1, 3, 1 << 20),
      Cut(counts, 2, 3, 4128),
      Cut({0, 9000, 70}, 0, 1, 1 << 20),
      Cut({700, 0, 900, 70}, 1, 2, 64)};
}

struct Variant {
  const char* name;
  Formula formula;
  Hyper hyper;
};

inline std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  Hyper h;
  h.lr = 0.01;
  h.beta1 = 0.9;
  h.beta2 = 0.95;
  h.eps = 1e-6;
  h.weight_decay = 0.1;
  all.push_back({"sgd", Formula::kSgd, h});
  for (const bool decoupled : {false, true}) {
    for (const bool amsgrad : {false, true}) {
      h.decoupled = decoupled;
      h.amsgrad = amsgrad;
      all.push_back({"adam", Formula::kAdam, h});
    }
  }
  all.push_back({"lamb", Formula::kLamb, h});
  h.momentum = 0.9;
  h.dampening = 0.1;
  all.push_back({"sgd with momentum", Formula::kSgd, h});
  h.first_step = true;
  all.push_back({"sgd, first step", Formula::kSgd, h});
  h.nesterov = true;
  all.push_back({"sgd, nesterov, first step", Formula::kSgd, h});
  h.first_step = false;
  all.push_back({"sgd, nesterov", Formula::kSgd, h});
  return all;
}

} // namespace fusedpg::test
