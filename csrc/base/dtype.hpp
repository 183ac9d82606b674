#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedpg {

// Element types the engine knows. Values travel between ranks inside operation
// descriptors, so they are part of the wire format: append, never reorder.
enum class DType : uint8_t {
  kUInt8 = 0,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex64,
  kComplex128,
  // Any other type: it can be moved, never reduced.
  kOpaque,
};

// Reductions, with c10d's names. kPremulSum multiplies every contribution by a
// factor before it is summed.
enum class RedOp : uint8_t {
  kSum = 0,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
};

constexpr size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
    case DType::kOpaque:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

// The type in which contributions are added.
constexpr DType wide_type(DType type, RedOp op = RedOp::kSum) {
  const bool half = type == DType::kFloat16 || type == DType::kBFloat16;
  const bool picks = op == RedOp::kMin || op == RedOp::kMax;
  return half && !picks ? DType::kFloat32 : type;
}

const char* dtype_name(DType dtype);
const char* red_op_name(RedOp op);

// Whether the engine can reduce `dtype` with `op` (bitwise ops need integers or
// bool, order needs a real type, ...).
bool reduction_supported(DType dtype, RedOp op);

} // namespace fusedpg
