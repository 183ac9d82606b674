#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/formulas/adamw.hpp"

// Pure functions over spans: no allocation, no locks, no errors, no I/O. Every
// pointer is to at least `count` elements; spans are either identical or
// disjoint. The functions of all instruction sets give the same bits.
namespace fusedpg::kernels {

// How the contributions of the ranks are combined.
struct ReduceArgs {
  DType dtype = DType::kFloat32;
  RedOp op = RedOp::kSum;
  // kAvg divides the sum by this.
  int64_t divisor = 1;
  // kPremulSum multiplies each contribution by this.
  double factor = 1.0;
};

struct Table {
  const char* name; // "x86-64-v2", "avx2", "avx512", "neon", "scalar"

  // dsts[j][i] = srcs[0][i] (op) srcs[1][i] (op) ... for every j: a left fold
  // in the order of `srcs`, which is rank order. MIN and MAX give NaN where any
  // source is NaN; of -0 and +0 the earlier one stays. Which NaN payload comes
  // out of several is open. An unsupported dtype and op does nothing.
  // Half types accumulate in fp32 and round once. A dst may be identical to a
  // src. `stream` (for results larger than the cache) writes around the cache,
  // but not to a dst that is also a src: its lines have just been read.
  void (*reduce)(
      const ReduceArgs& args,
      void* const* dsts,
      size_t num_dsts,
      const void* const* srcs,
      size_t num_srcs,
      size_t count,
      bool stream);

  // One AdamW update of a slice: gradient = reduce(grads) (sum in rank order,
  // times args.grad_factor), moments in place, the new parameters to every
  // params_out. params_out[j] may be identical to param.
  void (*adamw_f32)(
      const AdamwArgs& args,
      float* const* params_out,
      size_t num_out,
      const float* param,
      const float* const* grads,
      size_t num_grads,
      float* exp_avg,
      float* exp_avg_sq,
      float* max_exp_avg_sq, // nullptr unless args.amsgrad
      size_t count,
      bool stream);

  // memcpy; `stream` writes around the cache.
  void (*copy)(void* dst, const void* src, size_t bytes, bool stream);

  // Whether any element of a floating-point (or complex) span is NaN. Other
  // types: false.
  bool (*has_nan)(DType dtype, const void* src, size_t count);
};

// The best table this CPU runs; `name` (an option) forces a lesser one, or
// returns nullptr when this CPU or build does not have it.
const Table* table(const char* name = nullptr);

} // namespace fusedpg::kernels
