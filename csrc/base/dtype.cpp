#include "base/dtype.hpp"

namespace fusedpg {

namespace {

enum class Kind : uint8_t { kInteger, kBool, kReal, kComplex, kOpaque };

Kind kind_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return Kind::kInteger;
    case DType::kBool:
      return Kind::kBool;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return Kind::kReal;
    case DType::kComplex64:
    case DType::kComplex128:
      return Kind::kComplex;
    case DType::kOpaque:
      return Kind::kOpaque;
  }
  return Kind::kOpaque;
}

} // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kUInt16:
      return "uint16";
    case DType::kUInt32:
      return "uint32";
    case DType::kUInt64:
      return "uint64";
    case DType::kComplex64:
      return "complex64";
    case DType::kComplex128:
      return "complex128";
    case DType::kOpaque:
      return "opaque";
  }
  return "unknown";
}

const char* red_op_name(RedOp op) {
  switch (op) {
    case RedOp::kSum:
      return "SUM";
    case RedOp::kAvg:
      return "AVG";
    case RedOp::kProduct:
      return "PRODUCT";
    case RedOp::kMin:
      return "MIN";
    case RedOp::kMax:
      return "MAX";
    case RedOp::kBand:
      return "BAND";
    case RedOp::kBor:
      return "BOR";
    case RedOp::kBxor:
      return "BXOR";
    case RedOp::kPremulSum:
      return "PREMUL_SUM";
  }
  return "UNKNOWN";
}

bool reduction_supported(DType dtype, RedOp op) {
  const Kind kind = kind_of(dtype);
  if (kind == Kind::kOpaque) {
    return false;
  }
  switch (op) {
    case RedOp::kSum:
    case RedOp::kProduct:
      return true;
    case RedOp::kAvg:
      return kind != Kind::kBool;
    case RedOp::kMin:
    case RedOp::kMax:
      return kind != Kind::kComplex;
    case RedOp::kBand:
    case RedOp::kBor:
    case RedOp::kBxor:
      return kind == Kind::kInteger || kind == Kind::kBool;
    case RedOp::kPremulSum:
      return kind == Kind::kReal || kind == Kind::kComplex;
  }
  return false;
}

} // namespace fusedpg
