#pragma once

#include <ATen/ATen.h>

#include "base/error.hpp"

namespace fusedpg {

// Whether a strided tensor's storage has the bytes that its sizes need. FSDP and
// others free, or shrink, a storage whose tensor keeps its sizes and strides.
inline bool has_memory(const at::Tensor& t) {
  const int64_t numel = t.numel();
  if (numel == 0) {
    return true;
  }
  if (!t.has_storage()) {
    return false;
  }
  int64_t last = numel - 1;
  if (!t.is_contiguous()) {
    last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) {
      last += (t.size(d) - 1) * t.stride(d);
    }
  }
  const auto elements = static_cast<size_t>(t.storage_offset() + last + 1);
  return elements * t.element_size() <= t.storage().nbytes();
}

inline void check_memory(const char* op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      has_memory(t),
      formatted(
          "fused: {} got a tensor of {} {} elements whose storage has only {} "
          "bytes: it was freed or resized (as FSDP does, and "
          "untyped_storage().resize_()); gather or allocate it first",
          op,
          t.numel(),
          at::toString(t.scalar_type()),
          t.has_storage() ? t.storage().nbytes() : 0));
}

} // namespace fusedpg
