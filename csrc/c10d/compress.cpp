// The kernels of compression for Python: fusedpg._C.compress.
//
// All work on a unit of gradients: a list of tensors, each of one or more whole
// parameters, and `numels`, the parameters' sizes. A residual is one tensor. A
// message has, kind by kind, what the parameters have of it, one after the
// other. A tensor without `numels` is a unit of one parameter.
#include "c10d/bindings.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <variant>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/stl.h>

#include "base/error.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/tensor_memory.hpp"
#include "compress/codecs.hpp"
#include "compress/select.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::compress_bindings {

namespace {

using namespace kernels;
using Tensors = std::vector<at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;
using Numbers = std::vector<int64_t>;
using MaybeNumbers = std::optional<Numbers>;
using Seeds = std::vector<uint64_t>;
using Two = std::tuple<at::Tensor, at::Tensor>;
template <typename T>
using OneOrEach = std::variant<T, std::vector<T>>;
using OneOrMore = OneOrEach<at::Tensor>;
using Grads = std::optional<OneOrMore>;

const CompressTable& compress_table() {
  return default_kernels().compress;
}

void check(
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

float* floats(const at::Tensor& t) {
  return static_cast<float*>(t.data_ptr());
}

// One for each thread, whose memory stays: as much as it has ever selected.
compress::Selected& selected() {
  thread_local compress::Selected found;
  return found;
}

void check_ranks(const char* op, const char* argument, size_t found, size_t n) {
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

compress::CodecPtr quantiser(
    const char* op,
    int64_t levels,
    int64_t bucket_size) {
  TORCH_CHECK_VALUE(
      levels >= 1 && levels <= 32767,
      formatted(
          "fused: compress.{}: levels is 1 to 32767, got {}", op, levels));
  TORCH_CHECK_VALUE(
      bucket_size >= 0,
      formatted(
          "fused: compress.{}: bucket_size is at least 0, got {}",
          op,
          bucket_size));
  Levels all;
  all.levels = static_cast<int>(levels);
  all.wide = levels > 127;
  return compress::quantiser(
      compress_table(), all, static_cast<size_t>(bucket_size));
}

void check_index(const char* op, int64_t index, int64_t numel) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < numel,
      formatted(
          "fused: compress.{}: index {} of {} elements", op, index, numel));
}

at::Tensor made(int64_t count, at::ScalarType type) {
  return at::empty({count}, type);
}

[[noreturn]] void refuse(const char* op, const std::string& what) {
  TORCH_CHECK_VALUE(false, formatted("fused: compress.{}: {}", op, what));
}

void check_parameters(
    const char* op,
    const char* argument,
    size_t found,
    const Numbers& numels) {
  if (found != numels.size()) {
    refuse(
        op,
        formatted(
            "{} is one of each of {} parameters, found {}",
            argument,
            numels.size(),
            found));
  }
}

int64_t sum_of(const char* op, const char* argument, const Numbers& numbers) {
  int64_t sum = 0;
  for (const int64_t number : numbers) {
    if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
      refuse(
          op,
          formatted(
              "{} are 0 to 2^31 - 1 of each parameter, found {}",
              argument,
              number));
    }
    sum += number;
  }
  return sum;
}

// An argument that is one value for all parameters, or one of each.
template <typename T>
class Each {
 public:
  Each(
      const char* op,
      const char* argument,
      const OneOrEach<T>& given,
      const Numbers& numels)
      : each_(std::get_if<std::vector<T>>(&given)) {
    if (each_ != nullptr) {
      check_parameters(op, argument, each_->size(), numels);
    } else {
      one_ = std::get<T>(given);
    }
  }

  T operator[](size_t n) const {
    return each_ == nullptr ? one_ : (*each_)[n];
  }

 private:
  const std::vector<T>* each_;
  T one_{};
};

// Tensors side by side that have all parameters.
class Spans {
 public:
  Spans(const char* op, const char* argument, const OneOrMore& tensors)
      : op_(op),
        argument_(argument),
        more_(std::get_if<Tensors>(&tensors)),
        begin_of_(more_ ? more_->data() : &std::get<at::Tensor>(tensors)),
        count_(more_ ? more_->size() : 1) {
    for (size_t n = 0; n < count_; ++n) {
      check(op, argument, begin_of_[n], at::kFloat);
    }
  }

  // The sizes of parameters: those given, or that of the one tensor.
  Numbers sizes(const MaybeNumbers& numels) const {
    if (numels) {
      sum_of(op_, "numels", *numels);
      return *numels;
    }
    if (count_ != 1) {
      refuse(op_, "several tensors need numels");
    }
    const int64_t numel = begin_of_[0].numel();
    if (numel > std::numeric_limits<int32_t>::max()) {
      refuse(
          op_,
          formatted(
              "at most 2^31 - 1 elements at once, found {}: compress smaller "
              "pieces",
              numel));
    }
    return {numel};
  }

  // The memory of the next parameter.
  float* next(int64_t numel) {
    while (which_ < count_ && begin_ == begin_of_[which_].numel()) {
      ++which_;
      begin_ = 0;
    }
    if (numel == 0) {
      return nullptr;
    }
    if (which_ == count_ || numel > begin_of_[which_].numel() - begin_) {
      refuse(op_, formatted("{} are not made of whole parameters", argument_));
    }
    float* found = floats(begin_of_[which_]) + begin_;
    begin_ += numel;
    return found;
  }

 private:
  const char* op_;
  const char* argument_;
  const Tensors* more_;
  const at::Tensor* begin_of_;
  size_t count_;
  size_t which_ = 0;
  int64_t begin_ = 0;
};

// The values to compress, of each parameter: v = beta * residual + gamma * grad.
class Unit {
 public:
  // The arguments stay as they are while this lives.
  Unit(
      const char* op,
      const Grads& grads,
      const MaybeTensor& residual,
      double beta,
      const OneOrEach<double>& gamma,
      const MaybeNumbers& numels)
      : op_(op) {
    if (!grads && !residual) {
      refuse(op, "needs a gradient or a residual");
    }
    if (grads) {
      spans_.emplace(op, "grad", *grads);
      numels_ = spans_->sizes(numels);
    } else {
      numels_ = Spans(op, "residual", *residual).sizes(numels);
    }
    if (residual) {
      int64_t total = 0;
      for (const int64_t numel : numels_) {
        total += numel;
      }
      check(op, "residual", *residual, at::kFloat, total);
      residual_ = floats(*residual);
    }
    beta_ = static_cast<float>(beta);
    gamma_.emplace(op, "gamma", gamma, numels_);
  }

  Unit(
      const char* op,
      Grads&& grads,
      const MaybeTensor& residual,
      double beta,
      const OneOrEach<double>& gamma,
      const MaybeNumbers& numels) = delete;

  const Numbers& numels() const {
    return numels_;
  }

  int64_t parameters() const {
    return static_cast<int64_t>(numels_.size());
  }

  // Calls with each parameter's number, v, and size.
  template <typename Function>
  void each(Function&& function) {
    float* residual = residual_;
    for (size_t n = 0; n < numels_.size(); ++n) {
      const auto count = static_cast<size_t>(numels_[n]);
      Compensation v;
      v.grad = spans_ ? spans_->next(numels_[n]) : nullptr;
      v.residual = residual;
      v.beta = beta_;
      v.gamma = static_cast<float>((*gamma_)[n]);
      function(n, v, count);
      residual += residual == nullptr ? 0 : count;
    }
  }

 private:
  const char* op_;
  Numbers numels_;
  std::optional<Spans> spans_;
  std::optional<Each<double>> gamma_;
  float* residual_ = nullptr;
  float beta_ = 1;
};

// The memory of each parameter's result.
class Outs {
 public:
  Outs(const char* op, const OneOrMore& outs, const MaybeNumbers& numels)
      : spans_(op, "out", outs),
        numels_(spans_.sizes(numels)) {}

  const Numbers& numels() const {
    return numels_;
  }

  template <typename Function>
  void each(Function&& function) {
    for (size_t n = 0; n < numels_.size(); ++n) {
      float* out = spans_.next(numels_[n]);
      function(n, out, static_cast<size_t>(numels_[n]));
    }
  }

 private:
  Spans spans_;
  Numbers numels_;
};

// --- codecs: a code for each element, and some scales -----------------------

at::ScalarType type_of(const compress::Codec& codec) {
  switch (codec.type()) {
    case compress::CodeType::kInt8:
      return at::kChar;
    case compress::CodeType::kInt16:
      return at::kShort;
    default:
      return at::kByte;
  }
}

// How many codes, or scales, all parameters have.
int64_t total_of(
    const compress::Codec& codec,
    size_t (compress::Codec::*number)(size_t) const,
    const Numbers& numels) {
  size_t total = 0;
  for (const int64_t numel : numels) {
    total += (codec.*number)(static_cast<size_t>(numel));
  }
  return static_cast<int64_t>(total);
}

int64_t codes_of(const compress::Codec& codec, const Numbers& numels) {
  return total_of(codec, &compress::Codec::codes, numels);
}

int64_t scales_of(const compress::Codec& codec, const Numbers& numels) {
  return total_of(codec, &compress::Codec::scales, numels);
}

// The part of the last message that is still in each parameter's residual: a low
// and a high value. With such a tensor the residual becomes v, from which
// subtract_signs_ or the next call subtracts what is owed then; without one it is
// subtracted at once. `some`: whether anything is owed from before.
class Owed {
 public:
  Owed(
      const char* op,
      const MaybeTensor& tensor,
      bool some,
      const Numbers& numels)
      : values_(tensor ? floats(*tensor) : nullptr),
        some_(some) {
    if (tensor) {
      const auto parameters = static_cast<int64_t>(numels.size());
      check(op, "owed", *tensor, at::kFloat, 2 * parameters);
    } else if (some) {
      refuse(op, "owed is needed where something is");
    }
  }

  std::optional<SignValues> before(size_t n) const {
    return some_
        ? std::optional<SignValues>({values_[2 * n], values_[2 * n + 1]})
        : std::nullopt;
  }

  void leave(
      size_t n,
      const Compensation& v,
      size_t count,
      const SignValues& sent) const {
    if (values_ != nullptr) {
      values_[2 * n] = sent.low;
      values_[2 * n + 1] = sent.high;
    } else if (v.residual != nullptr) {
      compress_table().subtract_signs(v.residual, count, sent);
    }
  }

 private:
  float* values_;
  bool some_;
};

void subtract_signs_(
    const at::Tensor& residual,
    const Numbers& numels,
    const at::Tensor& owed) {
  const char* op = "subtract_signs_";
  const auto parameters = static_cast<int64_t>(numels.size());
  check(op, "residual", residual, at::kFloat, sum_of(op, "numels", numels));
  check(op, "owed", owed, at::kFloat, 2 * parameters);
  float* to = floats(residual);
  const float* values = floats(owed);
  for (const int64_t numel : numels) {
    compress_table().subtract_signs(
        to, static_cast<size_t>(numel), {values[0], values[1]});
    to += numel;
    values += 2;
  }
}

// Codes and scales of all parameters. `seeds` and `offset` are of what is drawn.
Two encode(
    const char* op,
    const compress::Codec& codec,
    Unit& unit,
    const OneOrEach<uint64_t>& seeds,
    uint64_t offset,
    const MaybeTensor& owed = std::nullopt,
    bool owes = false) {
  const Numbers& numels = unit.numels();
  const Each<uint64_t> seed(op, "seed", seeds, numels);
  const Owed owing(op, owed, owes, numels);
  Two sent{
      made(codes_of(codec, numels), type_of(codec)),
      made(scales_of(codec, numels), at::kFloat)};
  auto* codes = static_cast<uint8_t*>(std::get<0>(sent).data_ptr());
  float* scales = floats(std::get<1>(sent));
  const size_t width = std::get<0>(sent).itemsize();
  unit.each([&](size_t n, const Compensation& v, size_t count) {
    const auto before = owing.before(n);
    const auto left = codec.encode(
        v,
        count,
        before ? &*before : nullptr,
        {seed[n], offset},
        codes,
        scales);
    if (left) {
      owing.leave(n, v, count, *left);
    }
    codes += width * codec.codes(count);
    scales += codec.scales(count);
  });
  return sent;
}

// outs = alpha * the sum of what `codes` and `scales`, of each rank, stand for.
void decode(
    const char* op,
    const compress::Codec& codec,
    const OneOrMore& outs,
    const Tensors& codes,
    const Tensors* scales,
    double alpha,
    const MaybeNumbers& numels) {
  Outs to(op, outs, numels);
  check_ranks(
      op, "scales", scales ? scales->size() : codes.size(), codes.size());
  const int64_t wanted = codes_of(codec, to.numels());
  const int64_t wanted_scales = scales_of(codec, to.numels());
  compress::Received from{{}, {}, static_cast<float>(alpha)};
  from.codes.reserve(codes.size());
  from.scales.reserve(codes.size());
  for (size_t r = 0; r < codes.size(); ++r) {
    check(op, "codes", codes[r], type_of(codec), wanted);
    from.codes.push_back(
        static_cast<const uint8_t*>(codes[r].const_data_ptr()));
    if (scales != nullptr) {
      check(op, "scales", (*scales)[r], at::kFloat, wanted_scales);
      from.scales.push_back(floats((*scales)[r]));
    }
  }
  const size_t width = codes[0].itemsize();
  to.each([&](size_t, float* out, size_t count) {
    codec.decode(out, count, from);
    for (const uint8_t*& rank : from.codes) {
      rank += width * codec.codes(count);
    }
    for (const float*& rank : from.scales) {
      rank += codec.scales(count);
    }
  });
}

Two signs(
    const Grads& grads,
    const MaybeTensor& residual,
    bool scaled,
    double beta,
    double gamma,
    const MaybeNumbers& numels,
    const MaybeTensor& owed,
    bool owes) {
  Unit unit("signs", grads, residual, beta, gamma, numels);
  const auto codec = compress::signs(compress_table(), /*two=*/false, scaled);
  return encode("signs", *codec, unit, uint64_t{0}, 0, owed, owes);
}

Two onebit(
    const Grads& grads,
    const MaybeTensor& residual,
    double beta,
    double gamma,
    const MaybeNumbers& numels,
    const MaybeTensor& owed,
    bool owes) {
  Unit unit("onebit", grads, residual, beta, gamma, numels);
  const auto codec = compress::signs(compress_table(), /*two=*/true, true);
  return encode("onebit", *codec, unit, uint64_t{0}, 0, owed, owes);
}

// values: of each rank, of each parameter, a scale or with `two` two means.
void unpack_signs_(
    const OneOrMore& outs,
    const Tensors& packed,
    const Tensors& values,
    bool two,
    double alpha,
    const MaybeNumbers& numels) {
  const auto codec = compress::signs(compress_table(), two, true);
  decode("unpack_signs_", *codec, outs, packed, &values, alpha, numels);
}

Two qsgd(
    const Grads& grads,
    const MaybeTensor& residual,
    int64_t levels,
    const OneOrEach<uint64_t>& seeds,
    uint64_t offset,
    double beta,
    double gamma,
    int64_t bucket_size,
    const MaybeNumbers& numels) {
  Unit unit("qsgd", grads, residual, beta, gamma, numels);
  const auto codec = quantiser("qsgd", levels, bucket_size);
  return encode("qsgd", *codec, unit, seeds, offset);
}

void unqsgd_(
    const OneOrMore& outs,
    const Tensors& codes,
    const Tensors& norms,
    int64_t levels,
    double alpha,
    int64_t bucket_size,
    const MaybeNumbers& numels) {
  const auto codec = quantiser("unqsgd_", levels, bucket_size);
  decode("unqsgd_", *codec, outs, codes, &norms, alpha, numels);
}

Two terngrad(
    const Grads& grads,
    const MaybeTensor& residual,
    double clip_sigma,
    const OneOrEach<uint64_t>& seeds,
    uint64_t offset,
    double beta,
    double gamma,
    const MaybeNumbers& numels) {
  Unit unit("terngrad", grads, residual, beta, gamma, numels);
  const auto codec = compress::ternary(compress_table(), clip_sigma);
  return encode("terngrad", *codec, unit, seeds, offset);
}

void unterngrad_(
    const OneOrMore& outs,
    const Tensors& packed,
    const Tensors& scales,
    double alpha,
    const MaybeNumbers& numels) {
  const auto codec = compress::ternary(compress_table());
  decode("unterngrad_", *codec, outs, packed, &scales, alpha, numels);
}

at::Tensor natural(
    const Grads& grads,
    const MaybeTensor& residual,
    const OneOrEach<uint64_t>& seeds,
    uint64_t offset,
    double beta,
    double gamma,
    const MaybeNumbers& numels) {
  Unit unit("natural", grads, residual, beta, gamma, numels);
  const auto codec = compress::powers(compress_table());
  return std::get<0>(encode("natural", *codec, unit, seeds, offset));
}

void unnatural_(
    const OneOrMore& outs,
    const Tensors& codes,
    double alpha,
    const MaybeNumbers& numels) {
  const auto codec = compress::powers(compress_table());
  decode("unnatural_", *codec, outs, codes, nullptr, alpha, numels);
}

void vote_signs_(
    const at::Tensor& out,
    const at::Tensor& packed,
    double alpha) {
  check("vote_signs_", "out", out, at::kFloat);
  const int64_t stride = (out.numel() + 7) / 8;
  TORCH_CHECK_VALUE(
      packed.dim() == 2 && packed.size(0) > 0,
      "fused: compress.vote_signs_: packed has a row for each rank");
  check("vote_signs_", "packed", packed, at::kByte, stride * packed.size(0));
  compress_table().vote_signs(
      floats(out),
      packed.data_ptr<uint8_t>(),
      static_cast<size_t>(stride),
      static_cast<size_t>(packed.size(0)),
      static_cast<size_t>(out.numel()),
      static_cast<float>(alpha));
}

// --- some elements, and which these are -------------------------------------

// What `select` leaves in selected() of each parameter, and if asked for how many
// that are. What parameters before the last have is kept aside until the number
// of all is known.
template <typename Select>
Two selected_of(Unit& unit, int32_t* counts, Select&& select) {
  compress::Selected aside;
  Two sent;
  const auto last = static_cast<size_t>(unit.parameters() - 1);
  unit.each([&](size_t n, const Compensation& v, size_t count) {
    compress::Selected& found = selected();
    select(n, v, count, found);
    const size_t size = found.indices.size();
    if (counts != nullptr) {
      counts[n] = static_cast<int32_t>(size);
    }
    if (n != last) {
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(aside.values, found.values);
      append(aside.indices, found.indices);
      return;
    }
    const auto joined = [&](const auto& first, const auto& rest, auto type) {
      at::Tensor to =
          made(static_cast<int64_t>(first.size() + rest.size()), type);
      const size_t each = to.itemsize();
      auto* bytes = static_cast<char*>(to.data_ptr());
      std::memcpy(bytes, first.data(), each * first.size());
      std::memcpy(bytes + each * first.size(), rest.data(), each * rest.size());
      return to;
    };
    std::get<0>(sent) = joined(aside.values, found.values, at::kFloat);
    std::get<1>(sent) = joined(aside.indices, found.indices, at::kInt);
  });
  return sent;
}

Two topk(
    const Grads& grads,
    const MaybeTensor& residual,
    const OneOrEach<int64_t>& ks,
    double beta,
    double gamma,
    const MaybeNumbers& numels) {
  const char* op = "topk";
  Unit unit(op, grads, residual, beta, gamma, numels);
  const Each<int64_t> k(op, "k", ks, unit.numels());
  for (size_t n = 0; n < unit.numels().size(); ++n) {
    if (k[n] < 0 || k[n] > unit.numels()[n]) {
      refuse(op, formatted("k is 0 to {}, got {}", unit.numels()[n], k[n]));
    }
  }
  return selected_of(
      unit,
      nullptr,
      [&](size_t n, const Compensation& v, size_t count, auto& found) {
        compress::top_k(
            compress_table(), v, count, static_cast<size_t>(k[n]), found);
      });
}

// With `numels` in front how many each parameter has.
Tensors threshold(
    const Grads& grads,
    const MaybeTensor& residual,
    double threshold,
    const OneOrEach<int64_t>& at_least,
    double beta,
    double gamma,
    const MaybeNumbers& numels) {
  const char* op = "threshold";
  Unit unit(op, grads, residual, beta, gamma, numels);
  const Each<int64_t> least(op, "at_least", at_least, unit.numels());
  for (size_t n = 0; n < unit.numels().size(); ++n) {
    if (!(threshold >= 0) || least[n] < 0 || least[n] > unit.numels()[n]) {
      refuse(
          op,
          formatted(
              "threshold is at least 0 and at_least 0 to {}, got {} and {}",
              unit.numels()[n],
              threshold,
              least[n]));
    }
  }
  Tensors sent;
  if (numels) {
    sent.push_back(made(unit.parameters(), at::kInt));
  }
  const auto [values, indices] = selected_of(
      unit,
      numels ? sent[0].data_ptr<int32_t>() : nullptr,
      [&](size_t n, const Compensation& v, size_t count, auto& found) {
        compress::above(
            compress_table(),
            v,
            count,
            static_cast<float>(threshold),
            static_cast<size_t>(least[n]),
            found);
      });
  sent.push_back(values);
  sent.push_back(indices);
  return sent;
}

// How many indices each parameter has: all, of one parameter.
Numbers counts_of(
    const char* op,
    const std::optional<Numbers>& counts,
    const at::Tensor& indices,
    const Numbers& numels) {
  Numbers found = counts ? *counts : Numbers{indices.numel()};
  check_parameters(op, "counts", found.size(), numels);
  check(op, "indices", indices, at::kInt, sum_of(op, "counts", found));
  return found;
}

// The elements at the first counts[0] indices of the first parameter, and so on;
// they are 0 in the residual then. With a residual all of a parameter's values
// are NaN where v is not finite everywhere: otherwise a NaN would stay until it
// is drawn, in whatever step that is.
at::Tensor pick(
    const Grads& grads,
    const MaybeTensor& residual,
    const at::Tensor& indices,
    double beta,
    double gamma,
    const MaybeNumbers& numels,
    const MaybeNumbers& given) {
  const char* op = "pick";
  Unit unit(op, grads, residual, beta, gamma, numels);
  const Numbers counts = counts_of(op, given, indices, unit.numels());
  at::Tensor values = made(indices.numel(), at::kFloat);
  float* to = floats(values);
  const auto* index = indices.const_data_ptr<int32_t>();
  unit.each([&](size_t n, const Compensation& v, size_t count) {
    if (v.residual != nullptr && v.grad != nullptr) {
      compress_table().collect(v, count, 0x7fffffff, 0, nullptr, nullptr, 0);
    }
    const float* now = v.residual != nullptr ? v.residual : v.grad;
    const float factor = v.residual != nullptr ? 1 : v.gamma;
    const bool finite = v.residual == nullptr ||
        std::isfinite(default_kernels().sum_squares(
            DType::kFloat32, now, count));
    for (int64_t k = 0; k < counts[n]; ++k) {
      check_index(op, index[k], static_cast<int64_t>(count));
      to[k] = finite ? factor * now[index[k]]
                     : std::numeric_limits<float>::quiet_NaN();
    }
    for (int64_t k = 0; k < counts[n] && v.residual != nullptr; ++k) {
      v.residual[index[k]] = 0;
    }
    to += counts[n];
    index += counts[n];
  });
  return values;
}

void zero_at_(
    const at::Tensor& v,
    const at::Tensor& indices,
    const MaybeNumbers& numels,
    const MaybeNumbers& given) {
  const char* op = "zero_at_";
  const Grads none;
  Unit unit(op, none, v, 1.0, 1.0, numels);
  const Numbers counts = counts_of(op, given, indices, unit.numels());
  const auto* index = indices.const_data_ptr<int32_t>();
  unit.each([&](size_t n, const Compensation& one, size_t count) {
    for (int64_t k = 0; k < counts[n]; ++k) {
      check_index(op, index[k], static_cast<int64_t>(count));
      one.residual[index[k]] = 0;
    }
    index += counts[n];
  });
}

// given: of each rank, how many each parameter has.
void scatter_(
    const OneOrMore& outs,
    const Tensors& indices,
    const Tensors& values,
    double alpha,
    const MaybeNumbers& numels,
    const std::optional<std::vector<Numbers>>& given) {
  const char* op = "scatter_";
  const size_t ranks = indices.size();
  Outs to(op, outs, numels);
  check_ranks(op, "values", values.size(), ranks);
  check_ranks(op, "counts", given ? given->size() : ranks, ranks);
  std::vector<Numbers> counts(ranks);
  std::vector<compress::Picked> next(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    const MaybeNumbers mine = given ? MaybeNumbers((*given)[r]) : std::nullopt;
    counts[r] = counts_of(op, mine, indices[r], to.numels());
    check(op, "values", values[r], at::kFloat, indices[r].numel());
    next[r].indices = indices[r].const_data_ptr<int32_t>();
    next[r].values = values[r].const_data_ptr<float>();
  }
  to.each([&](size_t n, float* out, size_t count) {
    for (size_t r = 0; r < ranks; ++r) {
      next[r].count = static_cast<size_t>(counts[r][n]);
    }
    const auto wrong =
        compress::scatter(out, count, static_cast<float>(alpha), next);
    if (wrong) {
      check_index(op, *wrong, static_cast<int64_t>(count));
    }
  });
}

// --- what is drawn ----------------------------------------------------------

// SplitMix64, as `mixed` in fusedpg/compress/_piece.py.
uint64_t mixed(std::initializer_list<uint64_t> numbers) {
  uint64_t state = 0;
  for (const uint64_t number : numbers) {
    state += number + 0x9E3779B97F4A7C15ULL;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ULL;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBULL;
    state ^= state >> 31;
  }
  return state >> 1;
}

// Each parameter's seed; with `own` one that is different for other numbers.
Seeds seeds(
    uint64_t seed,
    const Seeds& keys,
    const Seeds& begins,
    std::optional<uint64_t> own) {
  TORCH_CHECK_VALUE(
      keys.size() == begins.size(),
      "fused: compress.seeds: as many keys as begins");
  Seeds found;
  for (size_t n = 0; n < keys.size(); ++n) {
    const uint64_t one = mixed({seed, keys[n], begins[n]});
    found.push_back(own ? mixed({one, *own}) : one);
  }
  return found;
}

// One element of every run of numel / count, in order. Runs are not all of one
// length: where the first begins is drawn, too, so that all elements have the
// same chance. The numbers are those of torch's generator with that seed.
void draw(int64_t numel, int64_t count, uint64_t seed, int32_t* to) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const at::Tensor numbers = at::rand({count}, generator, at::kDouble);
  const auto shift = static_cast<double>(
      at::randint(std::max<int64_t>(numel, 1), {}, generator, at::kLong)
          .item<int64_t>());
  const auto* drawn = numbers.const_data_ptr<double>();
  const auto end = static_cast<double>(numel);
  const double each = end / static_cast<double>(std::max<int64_t>(count, 1));
  std::vector<double> picked(static_cast<size_t>(count));
  double first = 0;
  for (int64_t k = 0; k < count; ++k) {
    const double next =
        k + 1 < count ? std::floor(static_cast<double>(k + 1) * each) : end;
    picked[k] =
        std::min(first + std::floor(drawn[k] * (next - first)), next - 1) +
        shift;
    first = next;
  }
  // Those behind the end are the first ones.
  const auto inside = std::lower_bound(picked.begin(), picked.end(), end);
  for (auto one = inside; one != picked.end(); ++one) {
    *to++ = static_cast<int32_t>(*one - end);
  }
  for (auto one = picked.begin(); one != inside; ++one) {
    *to++ = static_cast<int32_t>(*one);
  }
}

at::Tensor drawn(
    const Numbers& numels,
    const Numbers& counts,
    const Seeds& seeds) {
  const char* op = "drawn";
  check_parameters(op, "counts", counts.size(), numels);
  check_parameters(op, "seed", seeds.size(), numels);
  sum_of(op, "numels", numels);
  at::Tensor indices = made(sum_of(op, "counts", counts), at::kInt);
  auto* to = indices.data_ptr<int32_t>();
  for (size_t n = 0; n < numels.size(); ++n) {
    if (counts[n] > numels[n]) {
      refuse(op, formatted("counts are 0 to {}, got {}", numels[n], counts[n]));
    }
    draw(numels[n], counts[n], seeds[n], to);
    to += counts[n];
  }
  return indices;
}

// --- what is kept -----------------------------------------------------------

void accumulate_(
    const at::Tensor& residual,
    const at::Tensor& grad,
    double beta,
    double gamma) {
  const Grads grads(grad);
  Unit unit("accumulate_", grads, residual, beta, gamma, std::nullopt);
  unit.each([](size_t, const Compensation& v, size_t count) {
    compress_table().collect(v, count, 0x7fffffff, 0, nullptr, nullptr, 0);
  });
}

void dgc_accumulate_(
    const at::Tensor& momentum_buffer,
    const at::Tensor& velocity,
    const OneOrMore& grad,
    double momentum,
    const OneOrEach<double>& gamma,
    const MaybeNumbers& numels) {
  const char* op = "dgc_accumulate_";
  const Grads grads(grad);
  Unit unit(op, grads, velocity, 1.0, gamma, numels);
  check(op, "momentum_buffer", momentum_buffer, at::kFloat, velocity.numel());
  float* u = floats(momentum_buffer);
  unit.each([&](size_t, const Compensation& v, size_t count) {
    compress_table().dgc_accumulate(
        u, v.residual, v.grad, count, static_cast<float>(momentum), v.gamma);
    u += count;
  });
}

// One for each parameter.
std::vector<double> square_sums(
    const OneOrMore& grad,
    const MaybeNumbers& numels) {
  const Grads grads(grad);
  std::vector<double> found;
  Unit("square_sums", grads, std::nullopt, 1.0, 1.0, numels)
      .each([&](size_t, const Compensation& v, size_t count) {
        found.push_back(
            default_kernels().sum_squares(DType::kFloat32, v.grad, count));
      });
  return found;
}

// --- sums of integers that share an exponent a block ------------------------

// Elements of a block, and blocks.
std::pair<size_t, int64_t> blocks_of(
    const char* op,
    int64_t block,
    int64_t numel) {
  TORCH_CHECK_VALUE(
      block >= 1,
      formatted("fused: compress.{}: block is at least 1, got {}", op, block));
  return {static_cast<size_t>(block), (numel + block - 1) / block};
}

int bits_of(const char* op, int64_t ranks) {
  TORCH_CHECK_VALUE(
      ranks >= 1 && ranks <= (1 << 20),
      formatted("fused: compress.{}: ranks is 1 to 2^20, got {}", op, ranks));
  return block_float_bits(static_cast<uint32_t>(ranks));
}

at::Tensor block_exponents(const at::Tensor& v, int64_t block) {
  check("block_exponents", "v", v, at::kFloat);
  const auto [size, blocks] = blocks_of("block_exponents", block, v.numel());
  at::Tensor exponents = at::empty({blocks}, at::kInt);
  default_kernels().block_float.exponents(
      floats(v),
      static_cast<size_t>(v.numel()),
      size,
      exponents.data_ptr<int32_t>());
  return exponents;
}

at::Tensor block_quantise(
    const at::Tensor& v,
    const at::Tensor& exponents,
    int64_t block,
    int64_t ranks) {
  const char* op = "block_quantise";
  check(op, "v", v, at::kFloat);
  const auto [size, blocks] = blocks_of(op, block, v.numel());
  check(op, "exponents", exponents, at::kInt, blocks);
  at::Tensor codes = at::empty({v.numel()}, at::kInt);
  default_kernels().block_float.quantise(
      floats(v),
      static_cast<size_t>(v.numel()),
      size,
      exponents.const_data_ptr<int32_t>(),
      bits_of(op, ranks),
      codes.data_ptr<int32_t>());
  return codes;
}

void block_dequantise_(
    const at::Tensor& out,
    const at::Tensor& codes,
    const at::Tensor& exponents,
    int64_t block,
    int64_t ranks,
    double alpha) {
  const char* op = "block_dequantise_";
  check(op, "out", out, at::kFloat);
  const auto [size, blocks] = blocks_of(op, block, out.numel());
  check(op, "codes", codes, at::kInt, out.numel());
  check(op, "exponents", exponents, at::kInt, blocks);
  default_kernels().block_float.dequantise(
      floats(out),
      codes.const_data_ptr<int32_t>(),
      static_cast<size_t>(out.numel()),
      size,
      exponents.const_data_ptr<int32_t>(),
      bits_of(op, ranks),
      alpha);
}

} // namespace

void bind(py::module_& m) {
  using py::arg;
  py::module_ c = m.def_submodule("compress", "Kernels of fusedpg.compress.");
  const auto none = py::none();
  const auto beta = arg("beta") = 1.0;
  const auto gamma = arg("gamma") = 1.0;
  const auto alpha = arg("alpha") = 1.0;
  const auto offset = arg("offset") = 0;
  const auto bucket = arg("bucket_size") = 0;
  const auto numels = arg("numels") = none;
  const auto counts = arg("counts") = none;
  const auto owed = arg("owed") = none;
  const auto owes = arg("owes") = false;
  const auto least = arg("at_least") = 0;
  const auto own = arg("own") = none;
  const arg g("grad");
  const arg r("residual");
  const arg out("out");
  const arg packed("packed");
  const arg codes("codes");
  const arg indices("indices");
  const arg values("values");
  const arg levels("levels");
  const arg seed("seed");
  const arg v("v");
  const arg block("block");
  const arg ranks("ranks");
  const arg exponents("exponents");
  const auto def = [&](const char* name, auto function, const auto&... rest) {
    c.def(name, function, rest..., py::call_guard<py::gil_scoped_release>());
  };
  def("signs", &signs, g, r, arg("scaled"), beta, gamma, numels, owed, owes);
  def("onebit", &onebit, g, r, beta, gamma, numels, owed, owes);
  def("unpack_signs_",
      &unpack_signs_,
      out,
      packed,
      values,
      arg("two"),
      alpha,
      numels);
  def("subtract_signs_", &subtract_signs_, r, arg("numels"), arg("owed"));
  def("vote_signs_", &vote_signs_, out, packed, alpha);
  def("qsgd", &qsgd, g, r, levels, seed, offset, beta, gamma, bucket, numels);
  def("unqsgd_",
      &unqsgd_,
      out,
      codes,
      arg("norms"),
      levels,
      alpha,
      bucket,
      numels);
  def("terngrad",
      &terngrad,
      g,
      r,
      arg("clip_sigma"),
      seed,
      offset,
      beta,
      gamma,
      numels);
  def("unterngrad_", &unterngrad_, out, packed, arg("scale"), alpha, numels);
  def("natural", &natural, g, r, seed, offset, beta, gamma, numels);
  def("unnatural_", &unnatural_, out, codes, alpha, numels);
  def("topk", &topk, g, r, arg("k"), beta, gamma, numels);
  def("threshold",
      &threshold,
      g,
      r,
      arg("threshold"),
      least,
      beta,
      gamma,
      numels);
  def("pick", &pick, g, r, indices, beta, gamma, numels, counts);
  def("zero_at_", &zero_at_, v, indices, numels, counts);
  def("scatter_", &scatter_, out, indices, values, alpha, numels, counts);
  def("seeds", &seeds, seed, arg("keys"), arg("begins"), own);
  def("drawn", &drawn, arg("numels"), arg("counts"), arg("seeds"));
  def("accumulate_", &accumulate_, r, g, beta, gamma);
  def("dgc_accumulate_",
      &dgc_accumulate_,
      arg("momentum_buffer"),
      arg("velocity"),
      g,
      arg("momentum"),
      gamma,
      numels);
  def("square_sums", &square_sums, v, numels);
  def("block_exponents", &block_exponents, v, block);
  def("block_quantise", &block_quantise, v, exponents, block, ranks);
  def("block_dequantise_",
      &block_dequantise_,
      out,
      codes,
      exponents,
      block,
      ranks,
      alpha);
}

} // namespace fusedpg::compress_bindings
