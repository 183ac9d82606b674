#include "c10d/tensors.hpp"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace fusedpg {

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kBool:
      return DType::kBool;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    default:
      return DType::kOpaque;
  }
}

kernels::ReduceArgs to_reduce_args(
    const c10d::ReduceOp& op,
    at::ScalarType type,
    int world_size) {
  kernels::ReduceArgs args;
  args.dtype = to_dtype(type);
  TORCH_CHECK_VALUE(
      args.dtype != DType::kOpaque,
      "fused: tensors of ",
      type,
      " can be moved, but not reduced; convert them first");
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      args.op = RedOp::kSum;
      return args;
    case c10d::ReduceOp::AVG:
      args.op = RedOp::kAvg;
      args.divisor = world_size;
      return args;
    case c10d::ReduceOp::PRODUCT:
      args.op = RedOp::kProduct;
      return args;
    case c10d::ReduceOp::MIN:
      args.op = RedOp::kMin;
      return args;
    case c10d::ReduceOp::MAX:
      args.op = RedOp::kMax;
      return args;
    case c10d::ReduceOp::BAND:
      args.op = RedOp::kBand;
      return args;
    case c10d::ReduceOp::BOR:
      args.op = RedOp::kBor;
      return args;
    case c10d::ReduceOp::BXOR:
      args.op = RedOp::kBxor;
      return args;
    case c10d::ReduceOp::PREMUL_SUM: {
      args.op = RedOp::kPremulSum;
      // The older of its two names: torch 2.11 has only that.
      const auto* premul =
          dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(
          premul != nullptr, "fused: PREMUL_SUM comes without its factor");
      args.factor = premul->tensor_factor.defined()
          ? premul->tensor_factor.item<double>()
          : premul->double_factor;
      return args;
    }
    default:
      TORCH_CHECK_VALUE(false, "fused: unknown reduction");
  }
}

void check_tensor(const char* op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.device().is_cpu(),
      "fused: ",
      op,
      " got a tensor on ",
      t.device(),
      "; all tensors of one call are to be on the CPU or all on one GPU");
  check_dense(op, t);
}

void check_dense(const char* op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.layout() == at::kStrided,
      "fused: ",
      op,
      " needs dense tensors, got layout ",
      t.layout());
  TORCH_CHECK_VALUE(
      !t._is_zerotensor(),
      "fused: ",
      op,
      " got a tensor without memory (ZeroTensor); clone it first");
}

namespace {

// Whether the bytes at data_ptr are the tensor's elements in order.
bool is_plain(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

at::Tensor plain_copy(const at::Tensor& t) {
  return t.detach().resolve_conj().resolve_neg().contiguous();
}

void check_writable(const at::Tensor& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    TORCH_CHECK_VALUE(
        t.size(d) < 2 || t.stride(d) != 0,
        "fused: cannot write to an expanded tensor, whose elements share "
        "memory; clone it first");
  }
}

} // namespace

Flat Flat::input(const at::Tensor& t) {
  return {t, is_plain(t) ? t : plain_copy(t), false};
}

Flat Flat::output(const at::Tensor& t) {
  if (is_plain(t)) {
    return {t, t, false};
  }
  check_writable(t);
  return {t, at::empty(t.sizes(), t.options()), true};
}

Flat Flat::inout(const at::Tensor& t) {
  if (is_plain(t)) {
    return {t, t, false};
  }
  check_writable(t);
  return {t, plain_copy(t), true};
}

Span Flat::span() const {
  return {
      flat_.numel() ? flat_.data_ptr() : nullptr,
      static_cast<size_t>(flat_.nbytes())};
}

ReduceTensor Flat::reduce_tensor() const {
  return {
      flat_.numel() ? flat_.data_ptr() : nullptr,
      static_cast<size_t>(flat_.numel())};
}

void Flat::finish() const {
  if (copy_back_) {
    // The mode is of a thread, and this one may not be the caller's.
    const c10::InferenceMode mode(original_.is_inference());
    const c10::NoGradGuard no_grad;
    original_.detach().copy_(flat_);
  }
}

std::vector<Flat> flat_inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Flat> flats;
  flats.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    flats.push_back(Flat::input(t));
  }
  return flats;
}

std::vector<Flat> flat_outputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Flat> flats;
  flats.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    flats.push_back(Flat::output(t));
  }
  return flats;
}

std::vector<Span> spans(const std::vector<Flat>& tensors) {
  std::vector<Span> all;
  all.reserve(tensors.size());
  for (const Flat& t : tensors) {
    all.push_back(t.span());
  }
  return all;
}

std::vector<ReduceTensor> reduce_tensors(const std::vector<Flat>& tensors) {
  std::vector<ReduceTensor> all;
  all.reserve(tensors.size());
  for (const Flat& t : tensors) {
    all.push_back(t.reduce_tensor());
  }
  return all;
}

void finish(const std::vector<Flat>& tensors) {
  for (const Flat& t : tensors) {
    t.finish();
  }
}

} // namespace fusedpg
