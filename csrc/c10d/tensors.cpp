#include "c10d/tensors.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "c10d/tensor_memory.hpp"
#include "collectives/reduction.hpp"

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

c10d::ReduceOp reduction_named(std::string_view name) {
  using Op = c10d::ReduceOp;
  constexpr std::pair<std::string_view, Op::RedOpType> kNames[] = {
      {"sum", Op::SUM},
      {"avg", Op::AVG},
      {"product", Op::PRODUCT},
      {"min", Op::MIN},
      {"max", Op::MAX},
      {"band", Op::BAND},
      {"bor", Op::BOR},
      {"bxor", Op::BXOR}};
  for (const auto& [known, op] : kNames) {
    if (name == known) {
      return op;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      formatted(
          "fused: all_reduce_: op must be \"sum\", \"avg\", \"product\", "
          "\"min\", \"max\", \"band\", \"bor\" or \"bxor\", found \"{}\"",
          name));
}

const c10d::NCCLPreMulSumSupplement& premul_of(const c10d::ReduceOp& op) {
  // The older of its two names: torch 2.11 has only that.
  const auto* premul =
      dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(
      premul != nullptr, "fused: PREMUL_SUM comes without its factor");
  return *premul;
}

kernels::ReduceArgs to_reduce_args(
    const c10d::ReduceOp& op,
    at::ScalarType type,
    int world_size) {
  kernels::ReduceArgs args;
  args.dtype = to_dtype(type);
  TORCH_CHECK_VALUE(
      args.dtype != DType::kOpaque,
      formatted(
          "fused: tensors of {} can be moved, but not reduced; convert them "
          "first",
          type));
  // c10d's numbers are ours.
  using Op = c10d::ReduceOp;
  static_assert(int(RedOp::kSum) == Op::SUM && int(RedOp::kAvg) == Op::AVG);
  static_assert(int(RedOp::kProduct) == Op::PRODUCT);
  static_assert(int(RedOp::kMin) == Op::MIN && int(RedOp::kMax) == Op::MAX);
  static_assert(int(RedOp::kBand) == Op::BAND && int(RedOp::kBor) == Op::BOR);
  static_assert(int(RedOp::kBxor) == Op::BXOR);
  static_assert(int(RedOp::kPremulSum) == Op::PREMUL_SUM);
  TORCH_CHECK_VALUE(op.op_ <= Op::PREMUL_SUM, "fused: unknown reduction");
  args.op = static_cast<RedOp>(static_cast<int>(op.op_));
  if (args.op == RedOp::kAvg) {
    args.divisor = world_size;
  } else if (args.op == RedOp::kPremulSum) {
    const auto& premul = premul_of(op);
    args.factor = premul.tensor_factor.defined()
        ? premul.tensor_factor.item<double>()
        : premul.double_factor;
  }
  return args;
}

void check_tensor(const char* op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.device().is_cpu(),
      formatted(
          "fused: {} got a tensor on {}; all tensors of one call are to be on "
          "the CPU or all on one GPU",
          op,
          t.device()));
  check_dense(op, t);
}

void check_dense(const char* op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.layout() == at::kStrided,
      formatted(
          "fused: {} needs dense tensors, got layout {}", op, t.layout()));
  TORCH_CHECK_VALUE(
      !t._is_zerotensor(),
      formatted(
          "fused: {} got a tensor without memory (ZeroTensor); clone it first",
          op));
  // Its data would be a null pointer.
  const bool of_func = t.key_set().has_any(
      c10::DispatchKeySet(
          {c10::DispatchKey::FuncTorchGradWrapper,
           c10::DispatchKey::FuncTorchBatched,
           c10::DispatchKey::Functionalize}));
  TORCH_CHECK_VALUE(
      !t.is_meta() && !t.unsafeGetTensorImpl()->is_python_dispatch() &&
          !of_func,
      formatted(
          "fused: {} got a tensor without memory of its own ({})",
          op,
          of_func
              ? "of a transformation of torch.func"
              : "on the device meta, or of a subclass such as the gradients "
                "of a fused optimizer"));
  check_memory(op, t);
}

namespace {

// Whether the bytes at data_ptr are the tensor's elements in order.
bool is_plain(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

at::Tensor plain_copy(const at::Tensor& t) {
  return t.detach().resolve_conj().resolve_neg().contiguous();
}

// Whether elements of `t` share memory, as those of an expanded tensor do.
bool elements_overlap(const at::Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims; // stride, size
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 0) {
      return false;
    }
    if (t.size(d) > 1) {
      dims.emplace_back(t.stride(d), t.size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t end = 1; // of the dimensions so far, in elements
  bool nested = true;
  for (const auto& [stride, size] : dims) {
    if (stride == 0) {
      return true;
    }
    nested = nested && stride >= end;
    end += (size - 1) * stride;
  }
  if (nested) {
    return false;
  }
  // Strides like 2 and 3 may interleave: count.
  const at::Tensor places =
      at::arange(end, at::kLong).as_strided(t.sizes(), t.strides(), 0);
  return std::get<0>(at::_unique(places)).numel() != t.numel();
}

void check_writable(const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      !elements_overlap(t),
      "fused: cannot write to a tensor whose elements share memory, such as "
      "an expanded one; clone it first");
}

// Memory from the first to behind the last element.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool operator==(const Extent&) const = default;
};

Extent extent(const at::Tensor& t) {
  if (t.numel() == 0) {
    return {};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) {
    last += (t.size(d) - 1) * t.stride(d);
  }
  const auto* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(t.element_size())};
}

// Sorted, without those that are empty.
std::vector<Extent> extents(const std::vector<at::Tensor>& tensors) {
  std::vector<Extent> all;
  all.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    const Extent e = extent(t);
    if (e.begin != e.end) {
      all.push_back(e);
    }
  }
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) {
    return a.begin < b.begin;
  });
  return all;
}

bool overlap(const std::vector<Extent>& sorted) {
  return std::adjacent_find(
             sorted.begin(),
             sorted.end(),
             [](const Extent& a, const Extent& b) {
               return b.begin < a.end;
             }) != sorted.end();
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin < b.end && b.begin < a.end;
}

} // namespace

void check_same_type(
    const char* op,
    const std::vector<at::Tensor>& tensors,
    at::ScalarType type) {
  for (const at::Tensor& t : tensors) {
    check_tensor(op, t);
    TORCH_CHECK_VALUE(
        t.scalar_type() == type,
        formatted(
            "fused: {}: tensors must have one dtype, found {} and {}",
            op,
            type,
            t.scalar_type()));
  }
}

void check_alike(const char* op, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_VALUE(
        t.scalar_type() == tensors[0].scalar_type() &&
            t.sizes() == tensors[0].sizes(),
        formatted(
            "fused: {}: tensors of one call must have one dtype and one size, "
            "found {} {} and {} {}",
            op,
            tensors[0].scalar_type(),
            tensors[0].sizes(),
            t.scalar_type(),
            t.sizes()));
  }
}

Flat Flat::input(const at::Tensor& t) {
  return {t, is_plain(t) ? t : plain_copy(t), false};
}

Flat Flat::output(const at::Tensor& t, bool apart) {
  if (is_plain(t) && !apart) {
    return {t, t, false};
  }
  check_writable(t);
  return {t, at::empty(t.sizes(), t.options()), true};
}

Flat Flat::inout(const at::Tensor& t, bool apart) {
  if (is_plain(t)) {
    return {t, apart ? t.detach().clone() : t, apart};
  }
  return {t, plain_copy(t), true};
}

Buffer Flat::buffer() const {
  return {
      flat_.numel() ? flat_.data_ptr() : nullptr,
      static_cast<size_t>(flat_.nbytes()) / dtype_size(dtype_of(*this))};
}

void Flat::finish() const {
  if (copy_back_) {
    give(original_);
  }
}

void Flat::give(const at::Tensor& to) const {
  // The mode is of a thread, and this one may not be the caller's.
  const c10::InferenceMode mode(to.is_inference());
  const c10::NoGradGuard no_grad;
  at::Tensor target = to.detach();
  at::Tensor source = flat_.view(to.sizes());
  for (int64_t d = 0; d < target.dim(); ++d) {
    if (target.size(d) > 1 && target.stride(d) == 0) {
      // Expanded, with one value for all.
      target = target.narrow(d, 0, 1);
      source = source.narrow(d, 0, 1);
    }
  }
  target.copy_(source);
}

std::vector<Flat> flat_inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Flat> flats;
  flats.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    flats.push_back(Flat::input(t));
  }
  return flats;
}

std::vector<Flat> flat_outputs(
    const std::vector<at::Tensor>& tensors,
    bool apart) {
  std::vector<Flat> flats;
  flats.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    flats.push_back(Flat::output(t, apart));
  }
  return flats;
}

std::vector<Flat> flat_inouts(const std::vector<at::Tensor>& tensors) {
  const bool apart = tensors.size() > 1 && overlap(extents(tensors));
  std::vector<Flat> flats;
  flats.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    flats.push_back(Flat::inout(t, apart));
  }
  return flats;
}

bool need_apart(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    int rank) {
  if (outputs.empty() || inputs.empty()) {
    return outputs.size() > 1 && overlap(extents(outputs));
  }
  const std::vector<Extent> written = extents(outputs);
  if (overlap(written)) {
    return true;
  }
  const auto of_rank = [rank](const std::vector<at::Tensor>& list) {
    return list.size() == 1 ? 0 : static_cast<size_t>(rank);
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Extent read = extent(inputs[i]);
    if (rank != kNoRank && i == of_rank(inputs) &&
        read == extent(outputs[of_rank(outputs)])) {
      continue;
    }
    // The last output that begins before the input ends.
    const auto after = std::partition_point(
        written.begin(), written.end(), [&](const Extent& e) {
          return e.begin < read.end;
        });
    if (after != written.begin() && overlap(*std::prev(after), read)) {
      return true;
    }
  }
  return false;
}

bool need_apart(const at::Tensor& whole, const at::Tensor& part, int rank) {
  const Extent outer = extent(whole);
  const Extent inner = extent(part);
  const auto bytes = static_cast<ptrdiff_t>(part.nbytes());
  return overlap(outer, inner) &&
      !(is_plain(whole) && is_plain(part) &&
        inner.begin == outer.begin + rank * bytes);
}

Flat folded(
    const kernels::Table& kernels,
    const std::vector<at::Tensor>& tensors,
    const kernels::ReduceArgs& args) {
  if (tensors.size() == 1) {
    return Flat::inout(tensors[0]);
  }
  check_reduction(OpCode::kAllReduce, args.dtype, args.op);
  kernels::ReduceArgs local;
  local.dtype = args.dtype;
  local.op = args.op == RedOp::kAvg || args.op == RedOp::kPremulSum
      ? RedOp::kSum // its factor comes once, over the ranks
      : args.op;
  const std::vector<Flat> flats = flat_inputs(tensors);
  std::vector<const void*> srcs;
  for (const Flat& flat : flats) {
    srcs.push_back(flat.buffer().data);
  }
  Flat sum = Flat::output(at::empty(tensors[0].sizes(), tensors[0].options()));
  void* dst = sum.buffer().data;
  kernels.reduce(
      local,
      &dst,
      1,
      srcs.data(),
      srcs.size(),
      static_cast<size_t>(sum.tensor().numel()),
      false);
  return sum;
}

DType dtype_of(const Flat& flat) {
  return to_dtype(flat.tensor().scalar_type());
}

std::vector<Buffer> buffers(const std::vector<Flat>& tensors) {
  std::vector<Buffer> all;
  all.reserve(tensors.size());
  for (const Flat& t : tensors) {
    all.push_back(t.buffer());
  }
  return all;
}

void finish(const std::vector<Flat>& tensors) {
  for (const Flat& t : tensors) {
    t.finish();
  }
}

size_t checked_bytes(at::IntArrayRef sizes, const at::TensorOptions& options) {
  uint64_t bytes = options.dtype().itemsize();
  bool overflow = false;
  bool none = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK_VALUE(
        sizes[i] >= 0,
        formatted(
            "fused: empty: dimension {} of the sizes {} is negative",
            i,
            sizes));
    none = none || sizes[i] == 0;
    overflow =
        c10::mul_overflows(bytes, static_cast<uint64_t>(sizes[i]), &bytes) ||
        overflow;
  }
  TORCH_CHECK_VALUE(
      none ||
          (!overflow &&
           bytes <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())),
      formatted(
          "fused: empty: a tensor of sizes {} and type {} has more bytes than "
          "64 bits can count",
          sizes,
          options.dtype()));
  return none ? 0 : bytes;
}

std::vector<Buffer> slices(
    const Flat& whole,
    int num,
    const std::vector<int64_t>& splits) {
  const Buffer all = whole.buffer();
  const size_t element = dtype_size(dtype_of(whole));
  const size_t rows = splits.empty() ? 0 : whole.tensor().size(0);
  const size_t row = rows != 0 ? all.count / rows : 0;
  size_t begin = 0;
  std::vector<Buffer> parts;
  parts.reserve(num);
  for (int p = 0; p < num; ++p) {
    const size_t count =
        splits.empty() ? all.count / num : static_cast<size_t>(splits[p]) * row;
    parts.push_back({static_cast<char*>(all.data) + begin * element, count});
    begin += count;
  }
  return parts;
}

} // namespace fusedpg
