// The kernels of compression for Python: fusedpg._C.compress.
#include "c10d/compress.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/error.hpp"
#include "c10d/compress_checks.hpp"
#include "c10d/default_kernels.hpp"
#include "compress/messages.hpp"
#include "compress/select.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::compress_gradient {

namespace {

using namespace kernels;
using namespace compress_checks;
using MaybeTensor = std::optional<at::Tensor>;

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

  void subtract(const SignValues& sent) const {
    if (v.residual != nullptr) {
      compress_table().subtract_signs(v.residual, count, sent);
    }
  }

  Compensation v;
  size_t count = 0;
};

using Two = std::tuple<at::Tensor, at::Tensor>;

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
  compress::top_k(
      compress_table(), in.v, in.count, static_cast<size_t>(k), selected());
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
      compress_table(),
      in.v,
      in.count,
      static_cast<float>(threshold),
      static_cast<size_t>(at_least),
      selected());
  return tensors(selected());
}

Two signs(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    bool scaled,
    double beta,
    double gamma) {
  const Input in("signs", grad, residual, beta, gamma);
  at::Tensor packed = bytes(compress::bytes_of_signs(in.count));
  const SignValues values = compress::pack_signs(
      compress_table(),
      in.v,
      nullptr,
      in.count,
      scaled,
      packed.data_ptr<uint8_t>());
  in.subtract(values);
  return {packed, at::full({1}, values.high, at::kFloat)};
}

Two onebit(
    const MaybeTensor& grad,
    const MaybeTensor& residual,
    double beta,
    double gamma) {
  const Input in("onebit", grad, residual, beta, gamma);
  at::Tensor packed = bytes(compress::bytes_of_signs(in.count));
  const SignValues values = compress::pack_sides(
      compress_table(), in.v, nullptr, in.count, packed.data_ptr<uint8_t>());
  in.subtract(values);
  at::Tensor means = at::empty({2}, at::kFloat);
  floats(means)[0] = values.low;
  floats(means)[1] = values.high;
  return {packed, means};
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
  std::vector<const uint8_t*> bits;
  std::vector<SignValues> values;
  for (size_t r = 0; r < packed.size(); ++r) {
    bits.push_back(packed[r].const_data_ptr<uint8_t>());
    values.push_back(
        {factor * static_cast<float>(low[r]),
         factor * static_cast<float>(high[r])});
  }
  compress_table().unpack_signs(
      floats(out),
      bits.data(),
      values.data(),
      bits.size(),
      static_cast<size_t>(out.numel()));
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
  const Levels with = levels_of("qsgd", levels);
  const size_t bucket = bucket_size_of("qsgd", bucket_size);
  at::Tensor codes = at::empty(
      {static_cast<int64_t>(in.count)}, with.wide ? at::kShort : at::kChar);
  at::Tensor norms = at::empty(
      {static_cast<int64_t>(compress::buckets_of(bucket, in.count))},
      at::kFloat);
  compress::quantise(
      compress_table(),
      in.v,
      in.count,
      with,
      bucket,
      {seed, offset},
      codes.data_ptr(),
      floats(norms));
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
  const Levels with = levels_of("unqsgd_", levels);
  const auto count = static_cast<size_t>(out.numel());
  const size_t bucket = bucket_size_of("unqsgd_", bucket_size);
  const auto type = with.wide ? at::kShort : at::kChar;
  const auto buckets =
      static_cast<int64_t>(compress::buckets_of(bucket, count));
  for (size_t r = 0; r < codes.size(); ++r) {
    check("unqsgd_", "codes", codes[r], type, out.numel());
    check("unqsgd_", "norms", norms[r], at::kFloat, buckets);
  }
  compress::dequantise(
      compress_table(),
      floats(out),
      count,
      codes.size(),
      with,
      bucket,
      static_cast<float>(alpha),
      [&](size_t r) {
        return static_cast<const char*>(codes[r].const_data_ptr());
      },
      [&](size_t r) { return floats(norms[r]); });
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
  at::Tensor packed = bytes(compress::bytes_of_ternary(in.count));
  const float scale = compress::pack_ternary(
      compress_table(),
      in.v,
      in.count,
      clip_sigma,
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
  compress::unpack_ternary(
      compress_table(),
      floats(out),
      static_cast<size_t>(out.numel()),
      packed.size(),
      static_cast<float>(alpha),
      [&](size_t r) { return packed[r].const_data_ptr<uint8_t>(); },
      [&](size_t r) { return static_cast<float>(scale[r]); });
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
  compress_table().natural(
      in.v, in.count, {seed, offset}, codes.data_ptr<uint8_t>());
  return codes;
}

void unnatural_(const at::Tensor& out, const Tensors& codes, double alpha) {
  check("unnatural_", "out", out, at::kFloat);
  check_ranks("unnatural_", "codes", codes.size(), codes.size());
  for (const at::Tensor& one : codes) {
    check("unnatural_", "codes", one, at::kByte, out.numel());
  }
  compress::unpack_powers(
      compress_table(),
      floats(out),
      static_cast<size_t>(out.numel()),
      codes.size(),
      static_cast<float>(alpha),
      [&](size_t r) { return codes[r].const_data_ptr<uint8_t>(); });
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

void scatter_(
    const at::Tensor& out,
    const Tensors& indices,
    const Tensors& values,
    double alpha) {
  const char* op = "scatter_";
  check(op, "out", out, at::kFloat);
  check_ranks(op, "values", values.size(), indices.size());
  for (size_t r = 0; r < indices.size(); ++r) {
    check(op, "indices", indices[r], at::kInt);
    check(op, "values", values[r], at::kFloat, indices[r].numel());
  }
  std::vector<compress::Picked> next(indices.size());
  const auto wrong = compress::scatter(
      floats(out),
      static_cast<size_t>(out.numel()),
      indices.size(),
      static_cast<float>(alpha),
      next.data(),
      [&](size_t r) {
        return compress::Picked{
            indices[r].const_data_ptr<int32_t>(),
            values[r].const_data_ptr<float>(),
            static_cast<size_t>(indices[r].numel())};
      });
  if (wrong) {
    check_index(op, *wrong, out.numel());
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
  compress_table().collect(in.v, in.count, 0x7fffffff, 0, nullptr, nullptr, 0);
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
  compress_table().dgc_accumulate(
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
  c.def("block_exponents", &block_exponents, arg("v"), arg("block"), free);
  c.def(
      "block_quantise",
      &block_quantise,
      arg("v"),
      arg("exponents"),
      arg("block"),
      arg("ranks"),
      free);
  c.def(
      "block_dequantise_",
      &block_dequantise_,
      arg("out"),
      arg("codes"),
      arg("exponents"),
      arg("block"),
      arg("ranks"),
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
  compress_unit::bind(c);
}

} // namespace fusedpg::compress_gradient
