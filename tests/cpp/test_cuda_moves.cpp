// Conversions, pack and unpack.

#include "check.hpp"
#include "cuda_tiles.hpp"

namespace fusedpg::test {

TEST(cuda_tiles_conversions) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float h = half_to_float(half);
    const float b = bfloat_to_float(half);
    if (std::isnan(half_value(half))) {
      CHECK(std::isnan(h) && std::isnan(half_value(float_to_half(h))));
    } else {
      CHECK_EQ(float_to_bits(h), float_to_bits(half_value(half)));
      CHECK_EQ(float_to_half(h), half);
    }
    if (std::isnan(bfloat_value(half))) {
      CHECK(std::isnan(b) && float_to_bfloat(b) == 0x7fc0);
    } else {
      CHECK_EQ(float_to_bits(b), bits << 16);
      CHECK_EQ(float_to_bfloat(b), half);
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    // Mostly values in the halves' range, ties among them.
    uint32_t bits = random();
    if (i % 2 != 0) {
      bits = (bits & 0x80ffffff) | ((0x66 + bits % 32) << 23);
      bits &= i % 4 == 1 ? 0xfffff000 : ~0u;
    }
    const float x = bits_to_float(bits);
    if (!std::isnan(x)) {
      CHECK_EQ(float_to_half(x), nearest_half(x));
      CHECK_EQ(float_to_bfloat(x), nearest_bfloat(x));
    }
  }
}

TEST(cuda_tiles_pack_and_unpack) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  for (const Cut& cut : all_cuts()) {
    for (const DType type :
         {DType::kFloat64,
          DType::kFloat32,
          DType::kFloat16,
          DType::kBFloat16}) {
      for (const double weight : {1.0, 0.3}) {
        for (const size_t shift : {0, 1}) {
          std::vector<Array> grads;
          std::vector<Array> params;
          std::vector<TensorInfo> infos(cut.counts.size());
          for (uint32_t t = 0; t < cut.counts.size(); ++t) {
            grads.emplace_back(type, cut.counts[t], shift, t);
            params.emplace_back(type, cut.counts[t], shift, t + 50);
            infos[t].grad = grads[t].pointer();
            infos[t].param = params[t].pointer();
            infos[t].output = params[t].pointer();
            infos[t].count = cut.counts[t];
            infos[t].shard = cut.shard(t);
          }
          const auto size = static_cast<uint64_t>(cut.size);
          Array wanted(type, size * cut.block, shift, 99);
          Array wire = wanted;
          for (const ShardPiece& piece : cut.pieces) {
            for (uint64_t i = 0; i < size * piece.length; ++i) {
              const uint64_t p = i / piece.length;
              const uint64_t k = i % piece.length;
              const uint64_t from =
                  p * cut.shard(piece.tensor) + piece.begin + k;
              const double x = from < cut.counts[piece.tensor]
                  ? grads[piece.tensor].get(from)
                  : 0.0;
              const double product = type == DType::kFloat64
                  ? x * weight
                  : static_cast<float>(x) * static_cast<float>(weight);
              wanted.set(p * cut.block + piece.wire + k, product);
            }
          }
          const Chunk chunk = cut.chunk(infos);
          run(&CudaApi::pack, {chunk, wire.pointer(), type, weight, false});
          CHECK(wire.bytes() == wanted.bytes());
          UnpackArgs back{};
          back.chunk = chunk;
          back.wire = wire.pointer();
          back.type = type;
          run(&CudaApi::unpack, back);
          for (uint32_t t = 0; t < cut.counts.size(); ++t) {
            CHECK(weight != 1 || params[t].bytes() == grads[t].bytes());
          }

          // This rank's block, divided, to the slices.
          std::vector<Array> outputs = params;
          std::vector<TensorScalars> scalars(4);
          for (size_t t = 0; t < scalars.size(); ++t) {
            scalars[t].skip = t == 1;
          }
          back.wire = wire.pointer(static_cast<uint64_t>(cut.rank) * cut.block);
          back.to_outputs = true;
          back.divisor = 3;
          back.scalars = scalars.data();
          for (uint32_t t = 0; t < cut.counts.size(); ++t) {
            infos[t].output = outputs[t].pointer();
            const ShardRange slice = cut.slice(t);
            for (int64_t i = 0; !scalars[t].skip && i < slice.length; ++i) {
              const auto at = static_cast<size_t>(slice.offset + i);
              const double x = params[t].get(at);
              params[t].set(
                  at,
                  type == DType::kFloat64 ? x * (1.0 / 3)
                                          : static_cast<float>(x) * (1.0f / 3));
            }
          }
          run(&CudaApi::unpack, back);
          for (uint32_t t = 0; t < cut.counts.size(); ++t) {
            CHECK(outputs[t].bytes() == params[t].bytes());
          }
          const std::vector<double> none(size, 0.0);
          back.weights = none.data();
          run(&CudaApi::unpack, back);
          for (uint32_t t = 0; t < cut.counts.size(); ++t) {
            const ShardRange slice = cut.slice(t);
            CHECK(
                scalars[t].skip || slice.length == 0 ||
                outputs[t].get(static_cast<size_t>(slice.offset)) == 0);
          }
        }
      }
    }
  }
}

} // namespace fusedpg::test
