// The kernels of compression for Python: fusedpg._C.compress.
#include "c10d/compress.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <torch/extension.h>

#include "base/error.hpp"
#include "c10d/default_kernels.hpp"
#include "compress/select.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

namespace {

using namespace kernels;
using MaybeTensor = std::optional<at::Tensor>;

const CompressTable& table() {
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
}

float* floats(const at::Tensor& t) {
  return static_cast<float*>(t.data_ptr());
}

// v and how many elements it has.
struct Input {
  Input(
      const char* op,
      const MaybeTensor& grad,
      const MaybeTensor& residual,
      double beta,
      double gamma) {
    TORCH_CHECK_VALUE(
        grad.has_value() || residual.has_value(),
        formatted("fused: compress.{}: needs a gradient or a residual", op));
    const at::Tensor& one = grad ? *grad : *residual;
    check(op, grad ? "grad" : "residual", one, at::kFloat);
    count = static_cast<size_t>(one.numel());
    TORCH_CHECK_VALUE(
        one.numel() <= std::numeric_limits<int32_t>::max(),
        formatted(
            "fused: compress.{}: at most 2^31 - 1 elements at once, found {}: "
            "compress smaller pieces",
            op,
            one.numel()));
    if (residual) {
      check(op, "residual", *residual, at::kFloat, one.numel());
      v.residual = floats(*residual);
    }
    v.grad = grad ? floats(*grad) : nullptr;
    v.beta = static_cast<float>(beta);
    v.gamma = static_cast<float>(gamma);
  }

  // What v is once a kernel has written it.
  Compensation written() const {
    return v.residual == nullptr ? v : Compensation{nullptr, v.residual};
  }

  Compensation v;
  size_t count = 0;
};

using Two = std::tuple<at::Tensor, at::Tensor>;

// One for each thread, whose memory stays: as much as it has ever selected.
compress::Selected& selected() {
  thread_local compress::Selected found;
  return found;
}

Two tensors(const compress::Selected& found) {
  const auto size = static_cast<int64_t>(found.indices.size());
  at::Tensor values = at::empty({size}, at::kFloat);
  at::Tensor indices = at::empty({size}, at::kInt);
  std::memcpy(values.data_ptr(), found.values.data(), size * sizeof(float));
  std::memcpy(indices.data_ptr(), found.indices.data(), size * sizeof(int32_t));
  return {values, indices};
}

Two topk(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    int64_t k,
    double beta,
    double gamma) {
  const Input in("topk", grad, residual, beta, gamma);
  TORCH_CHECK_VALUE(
      k >= 0 && static_cast<size_t>(k) <= in.count,
      formatted("fused: compress.topk: k is 0 to {}, got {}", in.count, k));
  compress::top_k(table(), in.v, in.count, static_cast<size_t>(k), selected());
  return tensors(selected());
}

Two threshold(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    double threshold,
    int64_t at_least,
    double beta,
    double gamma) {
  const Input in("threshold", grad, residual, beta, gamma);
  TORCH_CHECK_VALUE(
      threshold >= 0 && at_least >= 0 &&
          static_cast<size_t>(at_least) <= in.count,
      formatted(
          "fused: compress.threshold: threshold is at least 0 and at_least 0 "
          "to {}, got {} and {}",
          in.count,
          threshold,
          at_least));
  compress::above(
      table(),
      in.v,
      in.count,
      static_cast<float>(threshold),
      static_cast<size_t>(at_least),
      selected());
  return tensors(selected());
}

at::Tensor bytes(size_t count) {
  return at::empty({static_cast<int64_t>(count)}, at::kByte);
}

Two signs(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    bool scaled,
    double beta,
    double gamma) {
  const Input in("signs", grad, residual, beta, gamma);
  const CompressSums sums = table().sums(in.v, in.count);
  const double mean = in.count == 0
      ? 0
      : (sums.high_sum - sums.low_sum) / static_cast<double>(in.count);
  // The sign of a NaN or an Inf would hide it: the scale does not.
  const double one = std::isfinite(mean) ? 1.0 : std::nan("");
  const auto scale = static_cast<float>(scaled ? mean : one);
  at::Tensor packed = bytes((in.count + 7) / 8);
  table().pack_signs(
      in.written(), in.count, -scale, scale, packed.data_ptr<uint8_t>());
  return {packed, at::full({1}, scale, at::kFloat)};
}

Two onebit(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    double beta,
    double gamma) {
  const Input in("onebit", grad, residual, beta, gamma);
  const CompressSums sums = table().sums(in.v, in.count);
  const auto mean = [](double sum, uint64_t count) {
    return static_cast<float>(
        count == 0 ? 0 : sum / static_cast<double>(count));
  };
  const float low = mean(sums.low_sum, sums.low_count);
  const float high = mean(sums.high_sum, in.count - sums.low_count);
  at::Tensor packed = bytes((in.count + 7) / 8);
  table().pack_signs(
      in.written(), in.count, low, high, packed.data_ptr<uint8_t>());
  at::Tensor means = at::empty({2}, at::kFloat);
  floats(means)[0] = low;
  floats(means)[1] = high;
  return {packed, means};
}

using Tensors = std::vector<at::Tensor>;

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

// Calls with the beginning and the length of parts of a result. Each part stays
// in the cache while the messages of all ranks are decoded into it; of a single
// rank there is one part, as a kernel writes a large result past the cache. All
// parts begin at a whole byte of packed bits.
template <typename Function>
void each_part(size_t count, size_t ranks, Function&& function) {
  constexpr size_t kPart = 1 << 15;
  const size_t part = ranks == 1 ? std::max<size_t>(count, 1) : kPart;
  for (size_t begin = 0; begin < count; begin += part) {
    function(begin, std::min(part, count - begin));
  }
}

void unpack_signs_(
    const at::Tensor& out,
    const Tensors& packed,
    const std::vector<double>& low,
    const std::vector<double>& high,
    double alpha) {
  const char* op = "unpack_signs_";
  check(op, "out", out, at::kFloat);
  check_ranks(op, "low", low.size(), packed.size());
  check_ranks(op, "high", high.size(), packed.size());
  for (const at::Tensor& one : packed) {
    check(op, "packed", one, at::kByte, (out.numel() + 7) / 8);
  }
  const auto factor = static_cast<float>(alpha);
  const auto count = static_cast<size_t>(out.numel());
  each_part(count, packed.size(), [&](size_t begin, size_t n) {
    for (size_t r = 0; r < packed.size(); ++r) {
      table().unpack_signs(
          floats(out) + begin,
          packed[r].const_data_ptr<uint8_t>() + begin / 8,
          n,
          factor * static_cast<float>(low[r]),
          factor * static_cast<float>(high[r]),
          r > 0);
    }
  });
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
  table().vote_signs(
      floats(out),
      packed.data_ptr<uint8_t>(),
      static_cast<size_t>(stride),
      static_cast<size_t>(packed.size(0)),
      static_cast<size_t>(out.numel()),
      static_cast<float>(alpha));
}

size_t bucket_of(const char* op, int64_t size, size_t count) {
  TORCH_CHECK_VALUE(
      size >= 0,
      formatted(
          "fused: compress.{}: bucket_size is at least 0, got {}", op, size));
  return size == 0 ? std::max<size_t>(count, 1) : static_cast<size_t>(size);
}

Levels levels_of(const char* op, int64_t levels) {
  TORCH_CHECK_VALUE(
      levels >= 1 && levels <= 32767,
      formatted(
          "fused: compress.{}: levels is 1 to 32767, got {}", op, levels));
  Levels result;
  result.levels = static_cast<int>(levels);
  result.wide = levels > 127;
  return result;
}

Compensation part_of(Compensation v, size_t begin) {
  v.grad += v.grad == nullptr ? 0 : begin;
  v.residual += v.residual == nullptr ? 0 : begin;
  return v;
}

Two qsgd(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    int64_t levels,
    uint64_t seed,
    uint64_t offset,
    double beta,
    double gamma,
    int64_t bucket_size) {
  const Input in("qsgd", grad, residual, beta, gamma);
  Levels with = levels_of("qsgd", levels);
  const size_t bucket = bucket_of("qsgd", bucket_size, in.count);
  at::Tensor codes = at::empty(
      {static_cast<int64_t>(in.count)}, with.wide ? at::kShort : at::kChar);
  at::Tensor norms = at::empty(
      {static_cast<int64_t>((in.count + bucket - 1) / bucket)}, at::kFloat);
  auto* to = static_cast<char*>(codes.data_ptr());
  for (size_t begin = 0; begin < in.count; begin += bucket) {
    const size_t n = std::min(bucket, in.count - begin);
    const Compensation v = part_of(in.v, begin);
    const CompressSums sums = table().sums(v, n);
    with.norm = static_cast<float>(std::sqrt(sums.square_sum));
    floats(norms)[begin / bucket] = with.norm;
    table().quantise(
        part_of(in.written(), begin),
        n,
        with,
        {seed, offset + begin},
        to + begin * (with.wide ? 2 : 1));
  }
  return {codes, norms};
}

void unqsgd_(
    const at::Tensor& out,
    const Tensors& codes,
    const Tensors& norms,
    int64_t levels,
    double alpha,
    int64_t bucket_size) {
  check("unqsgd_", "out", out, at::kFloat);
  check_ranks("unqsgd_", "norms", norms.size(), codes.size());
  Levels with = levels_of("unqsgd_", levels);
  const auto count = static_cast<size_t>(out.numel());
  const size_t bucket = bucket_of("unqsgd_", bucket_size, count);
  const auto type = with.wide ? at::kShort : at::kChar;
  const auto buckets = static_cast<int64_t>((count + bucket - 1) / bucket);
  for (size_t r = 0; r < codes.size(); ++r) {
    check("unqsgd_", "codes", codes[r], type, out.numel());
    check("unqsgd_", "norms", norms[r], at::kFloat, buckets);
  }
  for (size_t first = 0; first < count; first += bucket) {
    const size_t length = std::min(bucket, count - first);
    each_part(length, codes.size(), [&](size_t begin, size_t n) {
      const size_t at = first + begin;
      for (size_t r = 0; r < codes.size(); ++r) {
        with.norm = floats(norms[r])[first / bucket];
        table().dequantise(
            floats(out) + at,
            static_cast<const char*>(codes[r].const_data_ptr()) +
                at * (with.wide ? 2 : 1),
            n,
            with,
            static_cast<float>(alpha),
            r > 0);
      }
    });
  }
}

Two terngrad(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    double clip_sigma,
    uint64_t seed,
    uint64_t offset,
    double beta,
    double gamma) {
  const Input in("terngrad", grad, residual, beta, gamma);
  const CompressSums sums = table().sums(in.v, in.count);
  float bound = std::numeric_limits<float>::infinity();
  if (clip_sigma > 0 && in.count > 0) {
    const auto n = static_cast<double>(in.count);
    const double mean = (sums.high_sum + sums.low_sum) / n;
    const double variance = std::max(0.0, sums.square_sum / n - mean * mean);
    // About 0: of a constant, without deviation, nothing would ever be sent.
    const double sigma = std::max(std::sqrt(variance), std::abs(mean));
    bound = static_cast<float>(clip_sigma * sigma);
  }
  // With a NaN or an infinity anywhere this is not finite either.
  const float scale = std::isfinite(sums.max_abs)
      ? std::min(bound, sums.max_abs)
      : std::numeric_limits<float>::quiet_NaN();
  at::Tensor packed = bytes((in.count + 3) / 4);
  table().ternary(
      in.written(),
      in.count,
      bound,
      scale,
      {seed, offset},
      packed.data_ptr<uint8_t>());
  return {packed, at::full({1}, scale, at::kFloat)};
}

void unterngrad_(
    const at::Tensor& out,
    const Tensors& packed,
    const std::vector<double>& scale,
    double alpha) {
  check("unterngrad_", "out", out, at::kFloat);
  check_ranks("unterngrad_", "scale", scale.size(), packed.size());
  for (const at::Tensor& one : packed) {
    check("unterngrad_", "packed", one, at::kByte, (out.numel() + 3) / 4);
  }
  if (std::any_of(
          scale.begin(), scale.end(), [](double s) { return std::isnan(s); })) {
    out.fill_(std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const auto count = static_cast<size_t>(out.numel());
  each_part(count, packed.size(), [&](size_t begin, size_t n) {
    for (size_t r = 0; r < packed.size(); ++r) {
      table().unternary(
          floats(out) + begin,
          packed[r].const_data_ptr<uint8_t>() + begin / 4,
          n,
          static_cast<float>(alpha) * static_cast<float>(scale[r]),
          r > 0);
    }
  });
}

at::Tensor natural(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    uint64_t seed,
    uint64_t offset,
    double beta,
    double gamma) {
  const Input in("natural", grad, residual, beta, gamma);
  at::Tensor codes = bytes(in.count);
  table().natural(in.v, in.count, {seed, offset}, codes.data_ptr<uint8_t>());
  return codes;
}

void unnatural_(const at::Tensor& out, const Tensors& codes, double alpha) {
  check("unnatural_", "out", out, at::kFloat);
  check_ranks("unnatural_", "codes", codes.size(), codes.size());
  for (const at::Tensor& one : codes) {
    check("unnatural_", "codes", one, at::kByte, out.numel());
  }
  const auto count = static_cast<size_t>(out.numel());
  each_part(count, codes.size(), [&](size_t begin, size_t n) {
    for (size_t r = 0; r < codes.size(); ++r) {
      table().unnatural(
          floats(out) + begin,
          codes[r].const_data_ptr<uint8_t>() + begin,
          n,
          static_cast<float>(alpha),
          r > 0);
    }
  });
}

void check_index(const char* op, int64_t index, int64_t numel) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < numel,
      formatted(
          "fused: compress.{}: index {} of {} elements", op, index, numel));
}

// Calls with each index.
template <typename Function>
void each_index(
    const char* op,
    const at::Tensor& indices,
    int64_t numel,
    Function&& function) {
  check(op, "indices", indices, at::kInt);
  const auto* index = indices.data_ptr<int32_t>();
  for (int64_t n = 0; n < indices.numel(); ++n) {
    const int64_t i = index[n];
    check_index(op, i, numel);
    function(n, i);
  }
}

// Part by part, for which the indices are best in order; in any other one the
// sums are the same but for the order of ranks.
void scatter_(
    const at::Tensor& out,
    const Tensors& indices,
    const Tensors& values,
    double alpha) {
  const char* op = "scatter_";
  constexpr int64_t kPart = 1 << 15;
  check(op, "out", out, at::kFloat);
  check_ranks(op, "values", values.size(), indices.size());
  for (size_t r = 0; r < indices.size(); ++r) {
    check(op, "indices", indices[r], at::kInt);
    check(op, "values", values[r], at::kFloat, indices[r].numel());
  }
  float* to = floats(out);
  const auto factor = static_cast<float>(alpha);
  std::vector<int64_t> next(indices.size(), 0);
  for (int64_t begin = 0; begin < out.numel(); begin += kPart) {
    const int64_t end = std::min(begin + kPart, out.numel());
    std::fill(to + begin, to + end, 0.0F);
    for (size_t r = 0; r < indices.size(); ++r) {
      const auto* index = indices[r].const_data_ptr<int32_t>();
      const auto* value = values[r].const_data_ptr<float>();
      int64_t n = next[r];
      for (; n < indices[r].numel() && index[n] < end; ++n) {
        check_index(op, index[n], out.numel());
        to[index[n]] += factor * value[n];
      }
      next[r] = n;
    }
  }
  for (size_t r = 0; r < indices.size(); ++r) {
    if (next[r] < indices[r].numel()) {
      check_index(
          op, indices[r].const_data_ptr<int32_t>()[next[r]], out.numel());
    }
  }
}

at::Tensor gather(const at::Tensor& v, const at::Tensor& indices) {
  check("gather", "v", v, at::kFloat);
  at::Tensor values = at::empty({indices.numel()}, at::kFloat);
  const float* from = floats(v);
  float* to = floats(values);
  each_index("gather", indices, v.numel(), [&](int64_t n, int64_t i) {
    to[n] = from[i];
  });
  return values;
}

void zero_at_(const at::Tensor& v, const at::Tensor& indices) {
  check("zero_at_", "v", v, at::kFloat);
  float* to = floats(v);
  each_index(
      "zero_at_", indices, v.numel(), [&](int64_t, int64_t i) { to[i] = 0; });
}

void accumulate_(
    const at::Tensor& residual,
    const at::Tensor& grad,
    double beta,
    double gamma) {
  const Input in("accumulate_", grad, residual, beta, gamma);
  table().collect(in.v, in.count, 0x7fffffff, 0, nullptr, nullptr, 0);
}

void dgc_accumulate_(
    const at::Tensor& momentum_buffer,
    const at::Tensor& velocity,
    const at::Tensor& grad,
    double momentum,
    double gamma) {
  const char* op = "dgc_accumulate_";
  check(op, "grad", grad, at::kFloat);
  check(op, "momentum_buffer", momentum_buffer, at::kFloat, grad.numel());
  check(op, "velocity", velocity, at::kFloat, grad.numel());
  table().dgc_accumulate(
      floats(momentum_buffer),
      floats(velocity),
      floats(grad),
      static_cast<size_t>(grad.numel()),
      static_cast<float>(momentum),
      static_cast<float>(gamma));
}

double square_sum(const at::Tensor& v) {
  check("square_sum", "v", v, at::kFloat);
  return default_kernels().sum_squares(
      DType::kFloat32, v.data_ptr(), static_cast<size_t>(v.numel()));
}

} // namespace

void bind_compress(py::module_& m) {
  using py::arg;
  py::module_ c = m.def_submodule("compress", "Kernels of fusedpg.compress.");
  const auto beta = arg("beta") = 1.0;
  const auto gamma = arg("gamma") = 1.0;
  const auto alpha = arg("alpha") = 1.0;
  const auto offset = arg("offset") = 0;
  const auto bucket = arg("bucket_size") = 0;
  const auto g = arg("grad");
  const auto r = arg("residual");
  const py::call_guard<py::gil_scoped_release> free;
  c.def("topk", &topk, g, r, arg("k"), beta, gamma, free);
  c.def(
      "threshold",
      &threshold,
      g,
      r,
      arg("threshold"),
      arg("at_least") = 0,
      beta,
      gamma,
      free);
  c.def("signs", &signs, g, r, arg("scaled"), beta, gamma, free);
  c.def("onebit", &onebit, g, r, beta, gamma, free);
  c.def(
      "unpack_signs_",
      &unpack_signs_,
      arg("out"),
      arg("packed"),
      arg("low"),
      arg("high"),
      alpha,
      free);
  c.def("vote_signs_", &vote_signs_, arg("out"), arg("packed"), alpha, free);
  c.def(
      "qsgd",
      &qsgd,
      g,
      r,
      arg("levels"),
      arg("seed"),
      offset,
      beta,
      gamma,
      bucket,
      free);
  c.def(
      "unqsgd_",
      &unqsgd_,
      arg("out"),
      arg("codes"),
      arg("norms"),
      arg("levels"),
      alpha,
      bucket,
      free);
  c.def(
      "terngrad",
      &terngrad,
      g,
      r,
      arg("clip_sigma"),
      arg("seed"),
      offset,
      beta,
      gamma,
      free);
  c.def(
      "unterngrad_",
      &unterngrad_,
      arg("out"),
      arg("packed"),
      arg("scale"),
      alpha,
      free);
  c.def("natural", &natural, g, r, arg("seed"), offset, beta, gamma, free);
  c.def("unnatural_", &unnatural_, arg("out"), arg("codes"), alpha, free);
  c.def(
      "scatter_",
      &scatter_,
      arg("out"),
      arg("indices"),
      arg("values"),
      alpha,
      free);
  c.def("gather", &gather, arg("v"), arg("indices"), free);
  c.def("zero_at_", &zero_at_, arg("v"), arg("indices"), free);
  c.def("accumulate_", &accumulate_, r, g, beta, gamma, free);
  c.def(
      "dgc_accumulate_",
      &dgc_accumulate_,
      arg("momentum_buffer"),
      arg("velocity"),
      g,
      arg("momentum"),
      gamma,
      free);
  c.def("square_sum", &square_sum, arg("v"), free);
}

} // namespace fusedpg
