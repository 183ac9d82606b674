#include "collectives/skip.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "collectives/block_map.hpp"

namespace fusedpg {

alignas(64) const char kZeros[kZeroBytes] = {};

namespace {

constexpr size_t kScanGrain = size_t(256) << 10; // bytes worth a thread
// Blocks of a sample; its words go into the operation's table.
constexpr size_t kSample = 2048;

// tensor += residual, rounded as a sum of two ranks would be.
void add_residual(
    const kernels::Table& kernels,
    const Buffer& t,
    DType dtype,
    const void* residual) {
  kernels::ReduceArgs sum;
  sum.dtype = dtype;
  const void* srcs[] = {t.data, residual};
  void* dst = t.data;
  kernels.reduce(sum, &dst, 1, srcs, 2, t.count, false);
}

// What is not sent stays in the residual, and only there.
void split_residual(
    const Buffer& t,
    size_t element,
    size_t block,
    const uint64_t* bits,
    void* residual) {
  for (size_t b = 0; b * block < t.count; ++b) {
    const size_t offset = b * block * element;
    const size_t bytes = std::min(block, t.count - b * block) * element;
    char* sent = static_cast<char*>(t.data) + offset;
    char* kept = static_cast<char*>(residual) + offset;
    if ((bits[b / 64] >> (b % 64) & 1) != 0) {
      std::memset(kept, 0, bytes);
    } else {
      std::memcpy(kept, sent, bytes);
      std::memset(sent, 0, bytes);
    }
  }
}

// A sample without a block of zeros is not worth looking further: a block that
// is said to be present costs its bytes, no more.
bool looks_dense(
    const kernels::Table& kernels,
    const Buffer& tensor,
    DType dtype,
    size_t block) {
  if (tensor.count / block < 8 * kSample) {
    return false;
  }
  const auto sample = sample_blocks(kernels, single(tensor), dtype, block);
  return sampled_density({sample.data()}) == 1.0;
}

// A block of `bits` is present if any of the bitmap's blocks in it is. The
// others become zeros, or the ranks would not have the same result where nobody
// has the block.
void obey_bitmap(
    Pool& pool,
    const Buffer& tensor,
    size_t element,
    const SkipOptions& options,
    uint64_t* bits) {
  const size_t said = options.bitmap_block;
  const size_t per_word = 64 * options.block / said;
  const size_t all = (tensor.count + said - 1) / said;
  const size_t words = BlockMap::words_of(tensor.count, options.block);
  const size_t grain = kScanGrain / (64 * options.block * element) + 1;
  pool.run(words, 1, grain, [&](size_t first, size_t last) {
    std::fill(bits + first, bits + last, 0);
    const size_t end = std::min(last * per_word, all);
    for (size_t b = first * per_word; b < end; ++b) {
      if (options.bitmap[b] != 0) {
        const size_t block = b * said / options.block;
        bits[block / 64] |= uint64_t(1) << (block % 64);
        continue;
      }
      std::memset(
          static_cast<char*>(tensor.data) + b * said * element,
          0,
          std::min(said, tensor.count - b * said) * element);
    }
  });
}

} // namespace

bool can_skip(const kernels::ReduceArgs& args) {
  if (args.op != RedOp::kSum && args.op != RedOp::kAvg) {
    return false;
  }
  switch (args.dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt32:
    case DType::kInt64:
      return true;
    default:
      return false;
  }
}

void check_can_skip(OpCode op, const kernels::ReduceArgs& args) {
  if (!can_skip(args)) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}: SUM and AVG of float64, float32, float16, bfloat16, int32 "
        "and int64 only, got {} of {}",
        op_name(op),
        red_op_name(args.op),
        dtype_name(args.dtype));
  }
}

SkipConfig skip_config(
    const SkipState& state,
    int world_size,
    const OpDescriptor& d,
    const kernels::ReduceArgs& args) {
  SkipConfig config{
      state.mode, world_size, d.count * dtype_size(d.dtype), can_skip(args)};
  if (select_estimate(config)) {
    config.estimate = state.estimates.choose(d.shape_hash, d.dtype);
  }
  return config;
}

void find_blocks(
    const kernels::Table& kernels,
    Pool& pool,
    const Buffer& tensor,
    DType dtype,
    const SkipOptions& options,
    uint64_t* bits) {
  const bool above = options.threshold > 0;
  if (above) {
    add_residual(kernels, tensor, dtype, options.residual);
  }
  const size_t element = dtype_size(dtype);
  if (options.bitmap != nullptr) {
    obey_bitmap(pool, tensor, element, options, bits);
    return;
  }
  const size_t block = options.block;
  const size_t per_word = 64 * block;
  const size_t words = BlockMap::words_of(tensor.count, block);
  if (!above && looks_dense(kernels, tensor, dtype, block)) {
    const size_t blocks = (tensor.count + block - 1) / block;
    std::fill_n(bits, words, ~uint64_t(0));
    if (blocks % 64 != 0) {
      bits[words - 1] >>= 64 - blocks % 64;
    }
    return;
  }
  const size_t grain = kScanGrain / (per_word * element) + 1;
  pool.run(words, 1, grain, [&](size_t first, size_t last) {
    const size_t begin = first * per_word;
    const size_t count = std::min(last * per_word, tensor.count) - begin;
    const char* src = static_cast<const char*>(tensor.data) + begin * element;
    if (above) {
      kernels.find_blocks_above(
          dtype, src, count, block, options.threshold, bits + first);
    } else {
      kernels.find_blocks(src, count * element, block * element, bits + first);
    }
  });
  if (above) {
    split_residual(tensor, element, block, bits, options.residual);
  }
}

std::vector<uint64_t> sample_blocks(
    const kernels::Table& kernels,
    Buffers tensors,
    DType dtype,
    size_t block) {
  const size_t element = dtype_size(dtype);
  size_t blocks = 0;
  for (const Buffer& t : tensors) {
    blocks += (t.count + block - 1) / block;
  }
  const size_t samples = std::min(blocks, kSample);
  std::vector<uint64_t> words((samples + 63) / 64 + 1);
  words[0] = samples;
  size_t tensor = 0;
  size_t before = 0; // blocks of earlier tensors
  for (size_t i = 0; i < samples; ++i) {
    // One of each stretch, scattered so that no pattern of the tensor's rows
    // meets the same place of all.
    const size_t from = blocks * i / samples;
    const size_t stretch = blocks * (i + 1) / samples - from;
    const size_t b = from + Hash().add(uint64_t(i)).value() % stretch;
    const auto blocks_here = [&] {
      return (tensors[tensor].count + block - 1) / block;
    };
    while (b - before >= blocks_here()) {
      before += blocks_here();
      ++tensor;
    }
    const Buffer& t = tensors[tensor];
    const size_t begin = (b - before) * block;
    const size_t bytes = std::min(block, t.count - begin) * element;
    uint64_t bit = 0;
    kernels.find_blocks(
        static_cast<const char*>(t.data) + begin * element, bytes, bytes, &bit);
    words[1 + i / 64] |= bit << (i % 64);
  }
  return words;
}

double sampled_density(const std::vector<const uint64_t*>& samples) {
  const uint64_t n = samples[0][0];
  uint64_t found = 0;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t any = 0;
    for (const uint64_t* words : samples) {
      any |= words[1 + i / 64] >> (i % 64) & 1;
    }
    found += any;
  }
  return n == 0 ? 1 : static_cast<double>(found) / static_cast<double>(n);
}

} // namespace fusedpg
