#pragma once

#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "base/error.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/tensor_memory.hpp"
#include "compress/select.hpp"
#include "kernels/kernels.hpp"

// Checks of the arguments that Python gives the kernels of compression, for
// single gradients and for units.
namespace fusedpg::compress_checks {

using Tensors = std::vector<at::Tensor>;

inline const kernels::CompressTable& compress_table() {
  return default_kernels().compress;
}

inline void check(
    const char* op,
    const char* argument,
    const at::Tensor& t,
    at::ScalarType type,
    int64_t numel = -1) {
  const bool fits = t.device().is_cpu() && t.scalar_type() == type &&
      t.is_contiguous() && t.layout() == at::kStrided &&
      (numel < 0 || t.numel() == numel);
  TORCH_CHECK_VALUE(
      fits,
      formatted(
          "fused: compress.{}: {} is a contiguous {} tensor on the CPU{}, "
          "found {} {} of {} elements{}",
          op,
          argument,
          at::toString(type),
          numel < 0 ? "" : formatted(" of {} elements", numel),
          t.device().str(),
          at::toString(t.scalar_type()),
          t.numel(),
          t.is_contiguous() ? "" : ", not contiguous"));
  check_memory(op, t);
}

inline float* floats(const at::Tensor& t) {
  return static_cast<float*>(t.data_ptr());
}

// One for each thread, whose memory stays: as much as it has ever selected.
inline compress::Selected& selected() {
  thread_local compress::Selected found;
  return found;
}

inline at::Tensor bytes(size_t count) {
  return at::empty({static_cast<int64_t>(count)}, at::kByte);
}

inline void check_ranks(
    const char* op,
    const char* argument,
    size_t found,
    size_t n) {
  TORCH_CHECK_VALUE(
      n > 0 && found == n,
      formatted(
          "fused: compress.{}: {} is of at least one rank, as many as the "
          "other arguments ({}), found {}",
          op,
          argument,
          n,
          found));
}

inline size_t bucket_size_of(const char* op, int64_t size) {
  TORCH_CHECK_VALUE(
      size >= 0,
      formatted(
          "fused: compress.{}: bucket_size is at least 0, got {}", op, size));
  return static_cast<size_t>(size);
}

inline kernels::Levels levels_of(const char* op, int64_t levels) {
  TORCH_CHECK_VALUE(
      levels >= 1 && levels <= 32767,
      formatted(
          "fused: compress.{}: levels is 1 to 32767, got {}", op, levels));
  kernels::Levels result;
  result.levels = static_cast<int>(levels);
  result.wide = levels > 127;
  return result;
}

inline void check_index(const char* op, int64_t index, int64_t numel) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < numel,
      formatted(
          "fused: compress.{}: index {} of {} elements", op, index, numel));
}

} // namespace fusedpg::compress_checks
