#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/block_float.hpp"
#include "kernels/compress.hpp"
#include "kernels/formulas/hyper.hpp"

// Pure functions over spans: no allocation, no locks, no errors, no I/O. Every
// pointer is to at least `count` elements; spans are either identical or
// disjoint. The functions of all instruction sets give the same bits.
namespace fusedpg::kernels {

// How the contributions of the ranks are combined.
struct ReduceArgs {
  DType dtype = DType::kFloat32;
  RedOp op = RedOp::kSum;
  // kAvg divides the sum by this, or multiplies it by the rounded reciprocal,
  // as the gradients of an optimizer step are (real floating-point types only).
  int64_t divisor = 1;
  bool reciprocal = false;
  // kPremulSum multiplies each contribution by this, or source k by weights[k]
  // (real floating-point types only). Each product is rounded.
  double factor = 1.0;
  const double* weights = nullptr;
  // Half types: destinations are float32, and get the sum without rounding.
  bool wide = false;
};

// Scalars of one update, resolved once per call and tensor. Each is rounded
// once to the compute type (double where the parameters are float64, else
// float), so they are what the formulas of both sides see.
struct UpdateArgs : StepScalars {
  Formula formula = Formula::kAdam;
  // gradient = (x0 + x1 + ...) * grad_factor in the order of the sources; with
  // weights, (w0 x0 + w1 x1 + ...) * grad_factor, each product rounded.
  double grad_factor = 1; // negative when maximizing
  const double* weights = nullptr; // one per source, or none
};

// The slice that one update works on. All pointers are to its first element.
// The compute type is double where param_type is kFloat64 (then all types are),
// else float: other types are widened to it and results rounded once.
struct UpdateSpans {
  DType param_type = DType::kFloat32; // float64, float32, bfloat16, float16
  DType grad_type = DType::kFloat32; // the same choice
  DType state_type = DType::kFloat32; // the compute type or param_type
  void* const* params_out = nullptr; // any of them may be identical to `param`
  size_t num_out = 0;
  const void* param = nullptr;
  const void* const* grads = nullptr;
  size_t num_grads = 0;
  // Parameters in the compute type, read and written in place of `param`;
  // params_out then receive its rounding. Null: none.
  void* master = nullptr;
  // A master that does not round to its parameter takes its value first:
  // somebody has written the parameter.
  bool follow = false;
  // SGD: momentum buffer or null. Adam: exp_avg, exp_avg_sq, and with amsgrad
  // max_exp_avg_sq. LAMB: exp_avg, exp_avg_sq in the compute type.
  void* state[3] = {nullptr, nullptr, nullptr};
  size_t count = 0;
  bool stream = false; // write params_out around the cache
};

// Sums of squares are taken over blocks of this many elements: within a block
// 16 fp64 partial sums, element i in sum i % 16, added in order 0 ... 15 at its
// end. So they depend on the span alone: not on tiles, threads or instruction
// set.
constexpr size_t kSumBlock = 256;

struct Table {
  const char* name; // "x86-64-v2", "avx2", "avx512", "neon", "scalar"

  // dsts[j][i] = srcs[0][i] (op) srcs[1][i] (op) ... for every j: a left fold
  // in the order of `srcs`, which is rank order. MIN and MAX give NaN where any
  // source is NaN; of -0 and +0 the earlier one stays. If several sources are
  // NaN, the payload of any may come out. An unsupported dtype and op does
  // nothing. Half types accumulate in fp32 and round once. A dst may be
  // identical to a src. `stream` (for results larger than the cache) writes
  // around the cache, but not to a dst that is also a src: its lines have just
  // been read.
  void (*reduce)(
      const ReduceArgs& args,
      void* const* dsts,
      size_t num_dsts,
      const void* const* srcs,
      size_t num_srcs,
      size_t count,
      bool stream);

  // One optimizer step on a slice: gradient = fold of the sources (UpdateArgs
  // says how), state in place, new parameters to every destination. For kLamb
  // this is its second half: the step along the direction that the moments
  // (updated by lamb_moments) and the parameters give; no gradient is read.
  void (*update)(const UpdateArgs& args, const UpdateSpans& spans);

  // The first half of LAMB: gradient and moments as in `update`, parameters
  // only read. block_sums[2 * b] and [2 * b + 1] receive the sums of squares of
  // the parameters and of the direction over block b, kSumBlock elements from
  // the start of the spans (the last block may be short).
  void (*lamb_moments)(
      const UpdateArgs& args,
      const UpdateSpans& spans,
      double* block_sums);

  // The sum of squares of a floating-point span, in fp64: kSumBlock elements at
  // a time, sums of blocks added in order. Other types: 0.
  double (*sum_squares)(DType dtype, const void* src, size_t count);

  // memcpy; `stream` writes around the cache.
  void (*copy)(void* dst, const void* src, size_t bytes, bool stream);

  // Whether any element of a floating-point (or complex) span is NaN. Other
  // types: false.
  bool (*has_nan)(DType dtype, const void* src, size_t count);

  // dst[i] = src[i], for equal types, or float32 and a half type: exact one
  // way, rounded to the nearest even the other. Other types: nothing happens.
  void (*cast)(
      DType dst_type,
      void* dst,
      DType src_type,
      const void* src,
      size_t count);

  // Finds the blocks that hold anything: bit b % 64 of bits[b / 64] tells
  // whether any bit of block b is set, so -0 and NaN count. Blocks have
  // `block_bytes`, the last one may be shorter; bits behind it are 0.
  void (*find_blocks)(
      const void* src,
      size_t bytes,
      size_t block_bytes,
      uint64_t* bits);

  // The same for elements whose magnitude is above `threshold` (rounded to the
  // compute type), or NaN. Floating-point types; others: nothing happens.
  void (*find_blocks_above)(
      DType dtype,
      const void* src,
      size_t count,
      size_t block,
      double threshold,
      uint64_t* bits);

  CompressTable compress;

  BlockFloatTable block_float;
};

// The best table this CPU runs; `name` (an option) forces a lesser one, or
// returns nullptr when this CPU or build does not have it.
const Table* table(const char* name = nullptr);

} // namespace fusedpg::kernels
