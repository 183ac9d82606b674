#include "c10d/errors.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/tensor_memory.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

void check_residual(const at::Tensor& tensor, const at::Tensor& residual) {
  TORCH_CHECK_VALUE(
      residual.scalar_type() == tensor.scalar_type() &&
          residual.numel() == tensor.numel() && residual.is_contiguous() &&
          residual.device() == tensor.device(),
      formatted(
          "fused: sparse_all_reduce: residual must be a contiguous tensor of "
          "{} elements of {} like the tensor, found {} of {}",
          tensor.numel(),
          tensor.scalar_type(),
          residual.numel(),
          residual.scalar_type()));
  check_memory("sparse_all_reduce", residual);
}

void check_bitmap(
    const at::Tensor& tensor,
    const at::Tensor& bitmap,
    int64_t block_size) {
  const int64_t blocks = (tensor.numel() + block_size - 1) / block_size;
  TORCH_CHECK_VALUE(
      bitmap.scalar_type() == at::kBool && bitmap.numel() == blocks &&
          bitmap.is_contiguous() && bitmap.device() == tensor.device(),
      formatted(
          "fused: sparse_all_reduce: bitmap must be a contiguous tensor of {} "
          "bools, one for each block, where the tensor is, found {} of {}",
          blocks,
          bitmap.numel(),
          bitmap.scalar_type()));
  check_memory("sparse_all_reduce", bitmap);
}

} // namespace

SkipOptions skip_options(const at::Tensor& tensor, const SkipArguments& a) {
  const auto& [op, block_size, threshold, residual, bitmap] = a;
  check_dense("sparse_all_reduce", tensor);
  translate([&] { check_block_size(block_size); });
  TORCH_CHECK_VALUE(
      threshold >= 0,
      formatted(
          "fused: sparse_all_reduce: threshold must not be negative, found {}",
          threshold));
  TORCH_CHECK_VALUE(
      (threshold > 0) == residual.has_value(),
      "fused: sparse_all_reduce: a threshold and a residual, which keeps what "
      "is not sent, go together");
  TORCH_CHECK_VALUE(
      !residual || !bitmap,
      "fused: sparse_all_reduce: either a threshold or a bitmap says which "
      "blocks are sent");
  SkipOptions options;
  options.block = static_cast<size_t>(block_size);
  if (bitmap) {
    check_bitmap(tensor, *bitmap, block_size);
    options.bitmap = static_cast<const uint8_t*>(bitmap->data_ptr());
    options.bitmap_block = options.block;
  }
  options.threshold = threshold;
  if (residual) {
    TORCH_CHECK_VALUE(
        tensor.is_floating_point(),
        formatted(
            "fused: sparse_all_reduce: a threshold needs a floating-point "
            "tensor, found {}",
            tensor.scalar_type()));
    check_residual(tensor, *residual);
    options.residual = residual->data_ptr();
  }
  return options;
}

} // namespace fusedpg
