#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels_reference.hpp"

// Optimizer steps in double, straight from the papers and torch.optim's
// documentation. Shares no code with the kernels' formulas.
namespace fusedpg::test {

using kernels::Formula;

// Elements of a dtype in guarded bytes at any alignment.
class Span {
 public:
  Span(DType type, size_t count, size_t misalign)
      : type_(type),
        count_(count),
        start_(kGuard + misalign),
        room_(count * dtype_size(type) + 2 * kGuard + misalign, 0xa5) {}

  void* data() {
    return room_.data() + start_;
  }
  size_t size() const {
    return count_;
  }
  DType type() const {
    return type_;
  }
  double get(size_t i) const {
    return number(type_, &room_[start_], i);
  }
  void set(size_t i, double x) {
    put_number(type_, data(), i, x);
  }
  void fill(std::mt19937_64& random, double scale, bool positive = false) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < count_; ++i) {
      const double x = scale * normal(random);
      set(i, positive ? x * x : x);
    }
  }
  Bytes bytes() const {
    return Bytes(
        room_.begin() + start_,
        room_.begin() + start_ + count_ * dtype_size(type_));
  }
  bool guards_intact() const {
    const size_t end = start_ + count_ * dtype_size(type_);
    for (size_t i = 0; i < room_.size(); ++i) {
      if ((i < start_ || i >= end) && room_[i] != 0xa5) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 128;

  DType type_;
  size_t count_;
  size_t start_;
  Bytes room_;
};

// Half of the last place, relative to the power of two below.
inline double rounding(DType type) {
  switch (type) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-11;
  }
}

// Below this a type rounds to absolute steps.
inline double smallest(DType type) {
  switch (type) {
    case DType::kFloat64:
      return 1e-300;
    case DType::kFloat16:
      return 0x1p-24;
    default:
      return 1e-37;
  }
}

// What a user of torch.optim writes down.
struct Hyper {
  Formula formula = Formula::kAdam;
  double lr = 0.05;
  double weight_decay = 0.1;
  double beta1 = 0.9, beta2 = 0.98, eps = 1e-6;
  bool decoupled = true, amsgrad = false;
  double momentum = 0, dampening = 0;
  bool nesterov = false;

  size_t states() const {
    if (formula == Formula::kSgd) {
      return momentum != 0 ? 1 : 0;
    }
    return amsgrad ? 3 : 2;
  }
};

// A value and the sum of the magnitudes it came from, which its rounding errors
// are relative to.
struct Sized {
  double value = 0;
  double size = 0;
};

struct Element {
  Sized param;
  Sized state[3];
  Sized direction; // LAMB's u
};

// `old` holds the values before step number `step` (from 1). For LAMB the
// parameter is left alone: it needs the norms of all elements.
inline Element reference_step(
    const Hyper& h,
    const Element& old,
    double gradient,
    int step) {
  Element now = old;
  const double theta = old.param.value;
  double g = gradient;
  double g_size = std::fabs(g);
  const auto decay_into_gradient = [&] {
    if (h.weight_decay == 0) { // of an infinite parameter neither
      return;
    }
    g += h.weight_decay * theta;
    g_size += std::fabs(h.weight_decay * theta);
  };
  if (h.formula == Formula::kSgd) {
    decay_into_gradient();
    if (h.momentum != 0) {
      const double b = old.state[0].value;
      Sized next{g, g_size};
      if (step > 1) {
        next.value = h.momentum * b + (1 - h.dampening) * g;
        next.size = std::fabs(h.momentum * b) + (1 - h.dampening) * g_size;
      }
      now.state[0] = next;
      g = h.nesterov ? g + h.momentum * next.value : next.value;
      g_size = h.nesterov ? g_size + h.momentum * next.size : next.size;
    }
    now.param = {theta - h.lr * g, std::fabs(theta) + h.lr * g_size};
    return now;
  }
  if (h.formula == Formula::kAdam && !h.decoupled) {
    decay_into_gradient();
  }
  Sized& m = now.state[0];
  Sized& v = now.state[1];
  m = {
      h.beta1 * m.value + (1 - h.beta1) * g,
      h.beta1 * std::fabs(m.value) + (1 - h.beta1) * g_size};
  v = {
      h.beta2 * v.value + (1 - h.beta2) * g * g,
      h.beta2 * v.value + (1 - h.beta2) * g_size * g_size};
  Sized second = v;
  if (h.amsgrad) {
    now.state[2] = second.value <= old.state[2].value ? old.state[2] : second;
    second = now.state[2];
  }
  const double m_hat = m.value / (1 - std::pow(h.beta1, step));
  const double v_hat = second.value / (1 - std::pow(h.beta2, step));
  const double ratio = m_hat / (std::sqrt(v_hat) + h.eps);
  // Cancellation in m and in g.
  const double ratio_size = std::fabs(m_hat) == 0
      ? 0
      : std::fabs(ratio) * (m.size / std::fabs(m.value)) *
          (second.value > 0 ? second.size / second.value : 1);
  if (h.formula == Formula::kLamb) {
    now.direction = {
        ratio + h.weight_decay * theta,
        ratio_size + std::fabs(h.weight_decay * theta)};
    return now;
  }
  const double decayed =
      h.decoupled ? theta * (1 - h.lr * h.weight_decay) : theta;
  now.param = {decayed - h.lr * ratio, std::fabs(theta) + h.lr * ratio_size};
  return now;
}

// |got - wanted| in units of what rounding allows: the result's own rounding
// (to `stored`) and a dozen of the computation's.
inline double excess(double got, const Sized& wanted, DType stored, DType c) {
  const double allowed = 1.01 * rounding(stored) * std::fabs(wanted.value) +
      12 * rounding(c) * wanted.size + smallest(stored);
  const double error = std::fabs(got - wanted.value) / allowed;
  return std::isnan(error) ? HUGE_VAL : error;
}

} // namespace fusedpg::test
