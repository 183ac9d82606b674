// Finding blocks of zeros, and the map of whose blocks they are.

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.hpp"
#include "collectives/block_map.hpp"
#include "collectives/density.hpp"
#include "kernels_reference.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// `words` behind the last one must stay as they are.
std::vector<uint64_t> reference_bits(
    const Bytes& bytes,
    size_t offset,
    size_t total,
    size_t block) {
  std::vector<uint64_t> bits((total + block * 64 - 1) / (block * 64) + 1);
  bits.back() = 0x5a5a;
  for (size_t i = 0; i < total; ++i) {
    if (bytes[offset + i] != 0) {
      bits[i / block / 64] |= uint64_t(1) << (i / block % 64);
    }
  }
  return bits;
}

TEST(kernels_find_blocks) {
  std::mt19937_64 random(1);
  for (int turn = 0; turn < (kSanitized ? 300 : 3000); ++turn) {
    const size_t block = size_t(64) << random() % 8;
    const size_t offset = random() % 17;
    // More than 256 blocks are read in four streams.
    const size_t total = random() % (block * 600 / (1 + random() % 50) + 2);
    Bytes bytes(offset + total);
    for (size_t k = random() % 20; k > 0 && total > 0; --k) {
      bytes[offset + random() % total] =
          static_cast<uint8_t>(1 << random() % 8);
    }
    const auto wanted = reference_bits(bytes, offset, total, block);
    for (const kernels::Table* table : tables()) {
      std::vector<uint64_t> bits(wanted.size(), 0x5a5a);
      table->find_blocks(bytes.data() + offset, total, block, bits.data());
      CHECK(bits == wanted);
    }
  }
}

TEST(kernels_find_blocks_above) {
  constexpr size_t kBlock = 40;
  constexpr double kThreshold = 0.25;
  const float special[] = {
      0.25F,
      -0.25F,
      std::nextafter(0.25F, 1.0F),
      -1e30F,
      std::numeric_limits<float>::quiet_NaN(),
      -std::numeric_limits<float>::infinity(),
      1e-30F};
  const bool above[] = {false, false, true, true, true, true, false};
  for (size_t k = 0; k < std::size(special); ++k) {
    for (const size_t place : {0, 39, 40, 85, 2600, 2637}) {
      std::vector<float> single(2638, -0.1F);
      single[place] = special[k];
      const std::vector<double> twice(single.begin(), single.end());
      // Of half types the top bits; the value just above 1/4 is not one.
      std::vector<uint16_t> half(single.size());
      for (size_t i = 0; i < half.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, &single[i], 4);
        half[i] = static_cast<uint16_t>(bits >> 16);
      }
      for (const kernels::Table* table : tables()) {
        const auto check = [&](DType dtype, const void* data, bool wanted) {
          uint64_t bits[2] = {~uint64_t(0), ~uint64_t(0)};
          table->find_blocks_above(
              dtype, data, single.size(), kBlock, kThreshold, bits);
          for (size_t b = 0; b < 128; ++b) {
            const bool found = (bits[b / 64] >> (b % 64) & 1) != 0;
            CHECK_EQ(found, wanted && b == place / kBlock);
          }
        };
        check(DType::kFloat32, single.data(), above[k]);
        check(DType::kFloat64, twice.data(), above[k]);
        check(DType::kBFloat16, half.data(), above[k] && k != 2);
      }
    }
  }
}

TEST(kernels_find_half_blocks_above) {
  std::vector<uint16_t> half(1000, 0x3400); // 0.25
  half[999] = 0x3401;
  half[300] = 0xb401;
  half[700] = 0x7e00; // NaN
  for (const kernels::Table* table : tables()) {
    uint64_t bits = 0;
    table->find_blocks_above(
        DType::kFloat16, half.data(), half.size(), 100, 0.25, &bits);
    CHECK_EQ(bits, uint64_t(1) << 9 | 1 << 3 | 1 << 7);
  }
}

struct Drawn {
  std::vector<size_t> counts;
  size_t block;
  int size;
  std::vector<std::vector<std::vector<bool>>> present; // [rank][tensor][block]
};

Drawn draw(std::mt19937_64& random) {
  Drawn d;
  d.block = 32 + random() % 100;
  d.size = static_cast<int>(1 + random() % 4);
  for (size_t t = 1 + random() % 3; t > 0; --t) {
    d.counts.push_back(random() % 3 == 0 ? random() % 40 : random() % 20000);
  }
  const size_t density = 1 + random() % 100;
  for (int p = 0; p < d.size; ++p) {
    std::vector<std::vector<bool>> rank;
    for (const size_t count : d.counts) {
      std::vector<bool> blocks((count + d.block - 1) / d.block);
      for (size_t b = 0; b < blocks.size(); ++b) {
        blocks[b] = random() % 100 < density;
      }
      rank.push_back(std::move(blocks));
    }
    d.present.push_back(std::move(rank));
  }
  return d;
}

BlockMap map_of(const Drawn& d) {
  BlockMap map(d.counts, d.block, d.size);
  for (int p = 0; p < d.size; ++p) {
    std::vector<uint64_t> bits(map.words());
    for (size_t t = 0; t < d.counts.size(); ++t) {
      for (size_t b = 0; b < d.present[p][t].size(); ++b) {
        bits[map.first_word(t) + b / 64] |= uint64_t(d.present[p][t][b])
            << (b % 64);
      }
    }
    map.load(p, bits.data());
  }
  return map;
}

TEST(block_map_of_random_tensors) {
  std::mt19937_64 random(2);
  for (int turn = 0; turn < (kSanitized ? 100 : 1000); ++turn) {
    const Drawn d = draw(random);
    const BlockMap map = map_of(d);
    const auto has = [&](int p, size_t t, size_t i) {
      return d.present[p][t][i / d.block];
    };
    const auto any = [&](size_t t, size_t i) {
      for (int p = 0; p < d.size; ++p) {
        if (has(p, t, i)) {
          return true;
        }
      }
      return false;
    };
    for (size_t t = 0; t < d.counts.size(); ++t) {
      const size_t begin = random() % (d.counts[t] + 1);
      const size_t count = random() % (d.counts[t] - begin + 1);
      const LanePiece piece{t, begin, count};

      std::vector<bool> kept(d.counts[t]);
      const Lanes lanes = map.skip({{}, {piece}});
      CHECK(lanes[0].empty());
      size_t last = begin;
      for (const LanePiece& k : lanes[1]) {
        CHECK(k.tensor == t && k.begin >= last && k.count > 0);
        CHECK(k.begin == begin || k.begin > last || last == begin);
        last = k.begin + k.count;
        std::fill_n(
            kept.begin() + static_cast<ptrdiff_t>(k.begin), k.count, true);
      }
      CHECK(last <= begin + count);
      size_t elements = 0;
      bool good = true;
      for (size_t i = begin; i < begin + count; ++i) {
        good = good && kept[i] == any(t, i);
        elements += any(t, i);
      }
      CHECK(good);
      CHECK_EQ(map.present_elements(BlockMap::kAny, piece), elements);

      size_t at = begin;
      std::vector<int> before{-1};
      map.for_contributors(
          piece, [&](size_t from, size_t to, const int* ranks, size_t num) {
            CHECK(from == at && to > from);
            const std::vector<int> now(ranks, ranks + num);
            CHECK(now != before);
            before = now;
            for (; at < to; ++at) {
              std::vector<int> wanted;
              for (int p = 0; p < d.size; ++p) {
                if (has(p, t, at)) {
                  wanted.push_back(p);
                }
              }
              good = good && now == wanted;
            }
          });
      CHECK_EQ(at, begin + count);
      CHECK(good);
    }
    size_t all = 0;
    for (int p = 0; p < d.size; ++p) {
      size_t mine = 0;
      for (const auto& blocks : d.present[p]) {
        mine +=
            static_cast<size_t>(std::count(blocks.begin(), blocks.end(), true));
        all += p == 0 ? blocks.size() : 0;
      }
      CHECK_EQ(map.present_blocks(p), mine);
    }
    CHECK_EQ(map.blocks(), all);
  }
}

TEST(block_map_fitting_blocks) {
  const auto fits = [](std::vector<size_t> counts, size_t words) {
    return BlockMap::fitting_block(counts, 32, words);
  };
  CHECK_EQ(fits({32 * 64 * 10}, 10), size_t{32});
  CHECK_EQ(fits({32 * 64 * 10 + 1}, 10), size_t{64});
  CHECK_EQ(fits({32 * 64 * 10, 1}, 10), size_t{64});
  CHECK_EQ(fits({size_t(1) << 40, 5}, 65536), size_t(1) << 19);
  CHECK_EQ(fits({1, 1, 1}, 2), size_t{0});
}

TEST(density_estimates) {
  using Choice = DensityEstimates::Choice;
  DensityEstimates e;
  const auto choose = [&] {
    const Choice choice = e.choose(7, DType::kFloat32);
    // An operation that does not take place counts for nothing.
    CHECK_EQ(e.choose(7, DType::kFloat32), choice);
    if (choice != Choice::kSkip) {
      e.count_dense(7, DType::kFloat32);
    }
    return choice;
  };
  const auto observe = [&](double density) {
    e.observe(7, DType::kFloat32, density, 0.5);
  };
  CHECK_EQ(choose(), Choice::kProbe);
  observe(0.9);
  for (int i = 1; i < 16; ++i) {
    CHECK_EQ(choose(), Choice::kDense);
  }
  CHECK_EQ(choose(), Choice::kProbe);
  observe(0.1);
  CHECK_EQ(choose(), Choice::kSkip);
  observe(0.8); // one outlier
  CHECK_EQ(choose(), Choice::kSkip);
  for (int i = 0; i < 3; ++i) {
    observe(0.9);
  }
  CHECK_EQ(choose(), Choice::kDense);
  // Another shape and another type are other estimates.
  CHECK_EQ(e.choose(8, DType::kFloat32), Choice::kProbe);
  CHECK_EQ(e.choose(7, DType::kFloat64), Choice::kProbe);
}

} // namespace
