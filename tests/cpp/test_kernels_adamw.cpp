#include "check.hpp"
#include "kernels_reference.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace {

using namespace fusedpg;
using namespace fusedpg::test;
using kernels::AdamwArgs;
using kernels::Table;

struct AdamwRun {
  std::vector<float> param, exp_avg, exp_avg_sq, max_exp_avg_sq;
  bool operator==(const AdamwRun& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
          (a.empty() ||
           std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    };
    return same(param, other.param) && same(exp_avg, other.exp_avg) &&
        same(exp_avg_sq, other.exp_avg_sq) &&
        same(max_exp_avg_sq, other.max_exp_avg_sq);
  }
};

constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8,
                 kDecay = 0.01;

AdamwArgs adamw_args(int step, size_t ranks, bool amsgrad) {
  AdamwArgs a{};
  a.decay = static_cast<float>(1 - kLr * kDecay);
  a.beta1 = static_cast<float>(kBeta1);
  a.one_minus_beta1 = static_cast<float>(1 - kBeta1);
  a.beta2 = static_cast<float>(kBeta2);
  a.one_minus_beta2 = static_cast<float>(1 - kBeta2);
  a.eps = static_cast<float>(kEps);
  a.step_size = static_cast<float>(kLr / (1 - std::pow(kBeta1, step)));
  a.bias_correction2_sqrt =
      static_cast<float>(std::sqrt(1 - std::pow(kBeta2, step)));
  a.grad_factor = 1.0f / static_cast<float>(ranks);
  a.amsgrad = amsgrad;
  return a;
}

std::vector<std::vector<float>> gradients(size_t ranks, size_t n, int step) {
  std::mt19937_64 random(static_cast<uint64_t>(step));
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> all(ranks, std::vector<float>(n));
  for (auto& grad : all) {
    for (float& x : grad) {
      x = normal(random) / static_cast<float>(step);
    }
  }
  return all;
}

// `splits` are the inner boundaries of the ranges updated one after another.
AdamwRun train(
    const Table& table,
    size_t n,
    size_t ranks,
    int steps,
    bool amsgrad,
    bool stream,
    std::vector<size_t> splits = {}) {
  AdamwRun run{
      gradients(1, n, 999)[0],
      std::vector<float>(n),
      std::vector<float>(n),
      std::vector<float>(n)};
  std::vector<float> replica(n + 16, -7.0f);
  splits.push_back(n);
  for (int step = 1; step <= steps; ++step) {
    const auto grads = gradients(ranks, n, step);
    size_t begin = 0;
    for (size_t end : splits) {
      std::vector<const float*> slices;
      for (const auto& grad : grads) {
        slices.push_back(grad.data() + begin);
      }
      float* out[] = {run.param.data() + begin, replica.data() + 3 + begin};
      table.adamw_f32(
          adamw_args(step, ranks, amsgrad),
          out,
          2,
          run.param.data() + begin,
          slices.data(),
          ranks,
          run.exp_avg.data() + begin,
          run.exp_avg_sq.data() + begin,
          amsgrad ? run.max_exp_avg_sq.data() + begin : nullptr,
          end - begin,
          stream);
      begin = end;
    }
    CHECK(
        n == 0 ||
        std::memcmp(&replica[3], run.param.data(), n * sizeof(float)) == 0);
  }
  CHECK(replica[2] == -7.0f && replica[3 + n] == -7.0f);
  return run;
}

// The whole formula in double; returns |got - oracle| / |oracle|. Only the
// decay factor is taken as the op gets it, in fp32: its rounding (as torch's)
// moves every parameter by the same 1.4e-8 a step and would hide all other
// errors.
double oracle_error(
    const AdamwRun& got,
    size_t ranks,
    int steps,
    bool amsgrad) {
  const size_t n = got.param.size();
  const std::vector<float> start = gradients(1, n, 999)[0];
  std::vector<double> p(start.begin(), start.end()), m(n), v(n), top(n);
  const double decay = adamw_args(1, ranks, amsgrad).decay;
  for (int step = 1; step <= steps; ++step) {
    const auto grads = gradients(ranks, n, step);
    for (size_t i = 0; i < n; ++i) {
      double g = 0;
      for (const auto& grad : grads) {
        g += grad[i];
      }
      g /= static_cast<double>(ranks);
      p[i] *= decay;
      m[i] = kBeta1 * m[i] + (1 - kBeta1) * g;
      v[i] = kBeta2 * v[i] + (1 - kBeta2) * g * g;
      top[i] = std::max(top[i], v[i]);
      const double second =
          (amsgrad ? top[i] : v[i]) / (1 - std::pow(kBeta2, step));
      p[i] -= kLr / (1 - std::pow(kBeta1, step)) * m[i] /
          (std::sqrt(second) + kEps);
    }
  }
  double difference = 0, norm = 0;
  for (size_t i = 0; i < n; ++i) {
    difference += (got.param[i] - p[i]) * (got.param[i] - p[i]);
    norm += p[i] * p[i];
  }
  return std::sqrt(difference / norm);
}

} // namespace

TEST(kernels_adamw_matches_fp64) {
  for (bool amsgrad : {false, true}) {
    for (size_t ranks : {1, 2, 3, 9}) {
      for (const Table* table : tables()) {
        const AdamwRun run = train(*table, 1003, ranks, 100, amsgrad, false);
        const double error = oracle_error(run, ranks, 100, amsgrad);
        CHECK(error <= 1e-6);
        CHECK(error > 0); // the oracle is not the implementation
      }
    }
  }
}

TEST(kernels_adamw_same_bits_everywhere) {
  for (bool amsgrad : {false, true}) {
    for (size_t n : {0, 1, 15, 16, 17, 2048, 2049, 5003}) {
      const AdamwRun whole = train(*tables().back(), n, 3, 4, amsgrad, false);
      for (const Table* table : tables()) {
        CHECK(train(*table, n, 3, 4, amsgrad, false) == whole);
        CHECK(train(*table, n, 3, 4, amsgrad, true) == whole);
        const std::vector<size_t> splits{n / 7, n / 3, n - n / 5};
        CHECK(train(*table, n, 3, 4, amsgrad, true, splits) == whole);
      }
    }
  }
}

TEST(kernels_adamw_keeps_nan) {
  for (const Table* table : tables()) {
    std::vector<float> param(40, 1.0f), m(40), v(40), top(40, 1.0f), grad(40);
    grad[33] = std::numeric_limits<float>::quiet_NaN();
    float* out = param.data();
    const float* grads = grad.data();
    table->adamw_f32(
        adamw_args(1, 1, true),
        &out,
        1,
        param.data(),
        &grads,
        1,
        m.data(),
        v.data(),
        top.data(),
        40,
        false);
    for (size_t i = 0; i < 40; ++i) {
      CHECK_EQ(std::isnan(param[i]), i == 33);
      CHECK_EQ(std::isnan(top[i]), i == 33);
    }
  }
}
