#include "base/dtype.hpp"

#include <iterator>

namespace fusedpg {

namespace {

enum class TypeKind : uint8_t { kInteger, kBool, kReal, kComplex, kOpaque };

struct TypeRow {
  const char* name;
  TypeKind kind;
};

// By DType.
constexpr TypeRow kTypes[] = {
    {"uint8", TypeKind::kInteger},
    {"int8", TypeKind::kInteger},
    {"int16", TypeKind::kInteger},
    {"int32", TypeKind::kInteger},
    {"int64", TypeKind::kInteger},
    {"float16", TypeKind::kReal},
    {"bfloat16", TypeKind::kReal},
    {"float32", TypeKind::kReal},
    {"float64", TypeKind::kReal},
    {"bool", TypeKind::kBool},
    {"uint16", TypeKind::kInteger},
    {"uint32", TypeKind::kInteger},
    {"uint64", TypeKind::kInteger},
    {"complex64", TypeKind::kComplex},
    {"complex128", TypeKind::kComplex},
    {"opaque", TypeKind::kOpaque}};
static_assert(std::size(kTypes) == static_cast<size_t>(DType::kOpaque) + 1);

// By RedOp.
constexpr const char* kRedOps[] = {
    "SUM",
    "AVG",
    "PRODUCT",
    "MIN",
    "MAX",
    "BAND",
    "BOR",
    "BXOR",
    "PREMUL_SUM"};
static_assert(std::size(kRedOps) == static_cast<size_t>(RedOp::kPremulSum) + 1);

// Another rank may have sent a number that is no type.
TypeRow type_row(DType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < std::size(kTypes) ? kTypes[i]
                               : TypeRow{"unknown", TypeKind::kOpaque};
}

} // namespace

const char* dtype_name(DType dtype) {
  return type_row(dtype).name;
}

const char* red_op_name(RedOp op) {
  const auto i = static_cast<size_t>(op);
  return i < std::size(kRedOps) ? kRedOps[i] : "UNKNOWN";
}

bool reduction_supported(DType dtype, RedOp op) {
  const TypeKind kind = type_row(dtype).kind;
  if (kind == TypeKind::kOpaque) {
    return false;
  }
  switch (op) {
    case RedOp::kSum:
    case RedOp::kProduct:
      return true;
    case RedOp::kAvg:
      return kind != TypeKind::kBool;
    case RedOp::kMin:
    case RedOp::kMax:
      return kind != TypeKind::kComplex;
    case RedOp::kBand:
    case RedOp::kBor:
    case RedOp::kBxor:
      return kind == TypeKind::kInteger || kind == TypeKind::kBool;
    case RedOp::kPremulSum:
      return kind == TypeKind::kReal || kind == TypeKind::kComplex;
  }
  return false;
}

} // namespace fusedpg
