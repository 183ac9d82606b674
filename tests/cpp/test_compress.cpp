// Compression: all instruction sets against each other, and selection against a
// sort.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "compress/select.hpp"
#include "kernels_reference.hpp"

using namespace fusedpg;
using namespace fusedpg::test;
using kernels::Compensation;

namespace {

std::vector<float> numbers(size_t count, uint32_t seed, int kind) {
  std::mt19937 draw(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(count);
  for (size_t i = 0; i < count; ++i) {
    v[i] = normal(draw);
    if (kind == 1) { // few values, many zeros
      v[i] = std::round(v[i]);
    } else if (kind == 2) { // what compares in no order, and extremes
      const float odd[] = {
          NAN, -NAN, INFINITY, -INFINITY, 0.0F, -0.0F, 1e-42F, -1e-42F, 3e38F};
      v[i] = draw() % 3 == 0 ? odd[draw() % 9] : v[i];
    } else if (kind == 3) { // periodic, to fool what is sampled regularly
      v[i] = i % 64 == 0 ? 100 + v[i] : 0.01F * v[i];
    } else if (kind == 4) {
      v[i] = 1;
    } else if (kind == 5) { // ascending
      v[i] = static_cast<float>(i);
    } else if (kind == 6) { // nearly nothing
      v[i] = draw() % 5000 == 0 ? v[i] : 0.0F;
    } else if (kind == 7) { // the same between zeros of both signs
      v[i] = draw() % 300 == 0 ? v[i] : draw() % 2 == 0 ? 0.0F : -0.0F;
    }
  }
  return v;
}

// What a table makes of one input, as bytes.
std::vector<unsigned char> everything(
    const kernels::CompressTable& t,
    const std::vector<float>& grad,
    const std::vector<float>& kept,
    float beta,
    float gamma) {
  std::vector<unsigned char> all;
  const size_t n = grad.size();
  const auto note = [&](const void* from, size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(from);
    all.insert(all.end(), begin, begin + bytes);
  };
  std::vector<float> residual;
  const auto v = [&] {
    residual = kept;
    return Compensation{
        grad.data(), kept.empty() ? nullptr : residual.data(), beta, gamma};
  };
  const auto note_residual = [&] {
    // Which NaN comes out is open.
    for (float& x : residual) {
      x = std::isnan(x) ? 7e33F : x;
    }
    note(residual.data(), residual.size() * sizeof(float));
  };
  std::vector<uint32_t> indices(n + 1);
  std::vector<float> values(n + 1);
  const size_t found =
      t.collect(v(), n, 0x3f800000, 5, indices.data(), values.data(), n);
  note(&found, sizeof(found));
  note(indices.data(), found * sizeof(uint32_t));
  note_residual();
  const kernels::CompressSums sums = t.sums(v(), n);
  for (const double sum : {sums.high_sum, sums.low_sum, sums.square_sum}) {
    const double one = std::isnan(sum) ? 7e33 : sum;
    note(&one, sizeof(one));
  }
  note(&sums.low_count, sizeof(sums.low_count));
  std::vector<uint8_t> bytes(n + 8);
  std::vector<float> out(n, 0.5F);
  const auto note_out = [&] {
    for (float& x : out) {
      x = std::isnan(x) ? 7e33F : x;
    }
    note(out.data(), n * sizeof(float));
  };
  const kernels::SignValues owed{-0.25F, 0.75F};
  for (const kernels::SignValues* before :
       {static_cast<const kernels::SignValues*>(nullptr), &owed}) {
    if (before != nullptr && kept.empty()) {
      continue;
    }
    const kernels::SideSums sides = t.sum_signs(v(), before, n, bytes.data());
    for (const double sum : {sides.high_sum, sides.low_sum}) {
      const double one = std::isnan(sum) ? 7e33 : sum;
      note(&one, sizeof(one));
    }
    note(&sides.low_count, sizeof(sides.low_count));
    note(bytes.data(), (n + 7) / 8);
    note_residual();
  }
  if (!kept.empty()) {
    t.subtract_signs(residual.data(), n, owed);
    note_residual();
  }
  const uint8_t* packed[] = {bytes.data(), bytes.data(), bytes.data()};
  const kernels::SignValues sent[] = {
      {-0.3F, 0.7F}, {0.1F, 0.2F}, {3e38F, -0.0F}};
  for (const size_t ranks : {1, 2, 3}) {
    t.unpack_signs(out.data(), packed, sent, ranks, n);
    note_out();
  }
  std::vector<uint8_t> rows(7 * ((n + 7) / 8));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<uint8_t>(i * 37 + i / 5);
  }
  for (const size_t ranks : {1, 2, 7}) {
    t.vote_signs(out.data(), rows.data(), (n + 7) / 8, ranks, n, 0.5F);
    note_out();
  }
  const kernels::RandomBits random{0x123456789abcdefULL, 3};
  for (const bool wide : {false, true}) {
    const kernels::Levels levels{wide ? 999 : 100, 4.5F, wide};
    std::vector<int16_t> codes(n);
    t.quantise(v(), n, levels, random, codes.data());
    note(codes.data(), n * (wide ? 2 : 1));
    note_residual();
    t.dequantise(out.data(), codes.data(), n, levels, 0.5F, wide);
    note_out();
  }
  t.ternary(v(), n, 2.0F, 1.75F, random, bytes.data());
  note(bytes.data(), (n + 3) / 4);
  note_residual();
  t.unternary(out.data(), bytes.data(), n, 0.3F, true);
  note_out();
  t.natural(v(), n, random, bytes.data());
  note(bytes.data(), n);
  note_residual();
  t.unnatural(out.data(), bytes.data(), n, 0.3F, true);
  note_out();
  return all;
}

} // namespace

TEST(compression_is_the_same_on_every_instruction_set) {
  const kernels::CompressTable& best = kernels::table()->compress;
  for (const kernels::Table* other : tables()) {
    for (const size_t n : {0, 1, 7, 8, 15, 16, 17, 1023, 1024, 1025, 5000}) {
      for (int kind = 0; kind < 7; ++kind) {
        const auto grad = numbers(n, static_cast<uint32_t>(n + 1), kind);
        const auto kept = numbers(n, static_cast<uint32_t>(n + 2), 0);
        for (const auto& residual : {kept, std::vector<float>()}) {
          CHECK(
              everything(best, grad, residual, 1, 1) ==
              everything(other->compress, grad, residual, 1, 1));
          CHECK(
              everything(best, grad, residual, 0.9F, 0.3F) ==
              everything(other->compress, grad, residual, 0.9F, 0.3F));
        }
      }
    }
  }
}

TEST(large_results_are_those_of_their_parts) {
  constexpr size_t kCount = (size_t{1} << 20) + 4101;
  constexpr size_t kPart = 80'000; // elements of a byte stay together
  constexpr size_t kRanks = 3;
  constexpr size_t kStride = (kCount + 7) / 8;
  std::vector<uint8_t> codes(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    codes[i] = static_cast<uint8_t>(i * 167 + i / 251);
  }
  for (const kernels::Table* found : tables()) {
    const kernels::CompressTable& t = found->compress;
    const auto same = [&](auto decode) {
      std::vector<float> whole(kCount + 8, 9.0F);
      std::vector<float> parts = whole;
      decode(whole.data() + 3, size_t{0}, kCount); // not aligned to a line
      for (size_t begin = 0; begin < kCount; begin += kPart) {
        const size_t n = std::min(kPart, kCount - begin);
        decode(parts.data() + 3 + begin, begin, n);
      }
      CHECK(
          std::memcmp(
              whole.data(), parts.data(), whole.size() * sizeof(float)) == 0);
    };
    same([&](float* to, size_t begin, size_t n) {
      const uint8_t* from[] = {codes.data() + begin / 8, codes.data()};
      const kernels::SignValues values[] = {{-0.3F, 0.7F}, {0.1F, 0.2F}};
      t.unpack_signs(to, from, values, 1, n);
      from[1] = from[0] + kCount / 32;
      t.unpack_signs(to, from, values, 2, n);
    });
    same([&](float* to, size_t begin, size_t n) {
      const uint8_t* from = codes.data() + begin / 8;
      t.vote_signs(to, from, kStride, kRanks, n, 0.5F);
    });
    same([&](float* to, size_t begin, size_t n) {
      t.unternary(to, codes.data() + begin / 4, n, 0.3F, false);
    });
    same([&](float* to, size_t begin, size_t n) {
      t.unnatural(to, codes.data() + begin, n, 0.3F, false);
    });
  }
}

TEST(top_k_is_that_of_a_sort) {
  const kernels::CompressTable& table = kernels::table()->compress;
  for (const size_t n : {1, 100, 32768, 32769, 150001}) {
    for (int kind = 0; kind < 8; ++kind) {
      const auto grad = numbers(n, static_cast<uint32_t>(n), kind);
      const auto bits = [&](uint32_t i) {
        return std::bit_cast<uint32_t>(grad[i]) & 0x7fffffffU;
      };
      std::vector<uint32_t> order(n);
      std::iota(order.begin(), order.end(), 0U);
      std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        return bits(a) > bits(b);
      });
      for (const size_t k :
           {size_t{0}, size_t{1}, n / 1000, n / 100, n / 3, n}) {
        std::vector<float> residual(n, 0.0F);
        compress::Selected found;
        compress::top_k(table, {grad.data(), residual.data()}, n, k, found);
        std::vector<uint32_t> want(order.begin(), order.begin() + k);
        std::sort(want.begin(), want.end());
        CHECK(found.indices == want);
        CHECK_EQ(found.values.size(), k);
        compress::Selected alone;
        compress::top_k(table, {grad.data()}, n, k, alone);
        CHECK(alone.indices == want);
        for (size_t i = 0; i < k; ++i) {
          CHECK_EQ(
              std::bit_cast<uint32_t>(alone.values[i]),
              std::bit_cast<uint32_t>(grad[want[i]]));
        }
        for (const uint32_t i : want) {
          CHECK_EQ(std::bit_cast<uint32_t>(residual[i]), 0U);
          residual[i] = grad[i];
        }
        // Adding to a zero loses the sign of -0 alone.
        for (size_t i = 0; i < n; ++i) {
          CHECK(
              std::bit_cast<uint32_t>(residual[i]) ==
                  std::bit_cast<uint32_t>(grad[i]) ||
              grad[i] == 0 || std::isnan(grad[i]));
        }
      }
    }
  }
}

TEST(above_keeps_to_its_capacity) {
  const std::vector<float> grad(100, 1);
  for (const kernels::Table* table : tables()) {
    std::vector<uint32_t> indices(10, 77);
    std::vector<float> values(10, 77);
    const size_t found = table->compress.collect(
        {grad.data()}, 100, 0, 0, indices.data(), values.data(), 9);
    CHECK_EQ(found, size_t{100});
    CHECK(indices[8] == 8 && values[8] == 1);
    CHECK(indices[9] == 77 && values[9] == 77);
  }
}

TEST(above_a_threshold_is_everything_above_it) {
  const kernels::CompressTable& table = kernels::table()->compress;
  for (const size_t n : {0, 5, 65536, 65537, 200001}) {
    auto grad = numbers(n, static_cast<uint32_t>(n), 2);
    std::fill_n(grad.begin(), std::min<size_t>(n, 1), 1.5F);
    // Among them the next smaller number to one that is there.
    for (const float threshold :
         {0.0F, 0.5F, std::nextafter(1.5F, 0.0F), 1.5F, 1e30F, INFINITY}) {
      std::vector<uint32_t> want;
      for (size_t i = 0; i < n; ++i) {
        if (!(std::abs(grad[i]) <= threshold)) {
          want.push_back(static_cast<uint32_t>(i));
        }
      }
      compress::Selected found;
      compress::above(table, {grad.data()}, n, threshold, 0, found);
      CHECK(found.indices == want);
      const size_t most = std::min(n, want.size() + n / 10);
      compress::above(table, {grad.data()}, n, threshold, most, found);
      CHECK_EQ(found.indices.size(), most);
      // What is not sent stays, also where the first choice was too small.
      for (const size_t at_least : {size_t{0}, most}) {
        std::vector<float> residual(n, 0.5F);
        compress::above(
            table,
            {grad.data(), residual.data(), 0.5F, 1},
            n,
            threshold,
            at_least,
            found);
        CHECK(found.indices.size() >= at_least);
        for (size_t i = 0; i < found.indices.size(); ++i) {
          CHECK_EQ(residual[found.indices[i]], 0.0F);
          residual[found.indices[i]] = found.values[i];
        }
        for (size_t i = 0; i < n; ++i) {
          const float v = 0.5F * 0.5F + grad[i];
          CHECK(residual[i] == v || (std::isnan(v) && std::isnan(residual[i])));
        }
      }
    }
  }
}
