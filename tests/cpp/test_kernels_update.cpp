#include "check.hpp"
#include "update_reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

namespace {

using namespace fusedpg;
using namespace fusedpg::test;
using kernels::kSumBlock;
using kernels::Table;
using kernels::UpdateArgs;
using kernels::UpdateSpans;

struct Types {
  DType param, grad, state;
  bool master;
};

struct Shape {
  size_t count = 5000;
  size_t num_grads = 1;
  size_t num_out = 1;
  bool in_place = true; // params_out[0] is param
  bool stream = false;
  bool weighted = false;
  size_t misalign = 0; // bytes
  double grad_factor = 1;
};

DType compute_type(const Types& types) {
  return types.param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

std::vector<Hyper> variants() {
  std::vector<Hyper> all;
  for (bool decoupled : {true, false}) {
    for (bool amsgrad : {true, false}) {
      Hyper h;
      h.decoupled = decoupled;
      h.amsgrad = amsgrad;
      all.push_back(h);
    }
  }
  Hyper sgd;
  sgd.formula = Formula::kSgd;
  all.push_back(sgd);
  sgd.momentum = 0.9;
  sgd.dampening = 0.3;
  all.push_back(sgd);
  sgd.dampening = 0;
  sgd.nesterov = true;
  all.push_back(sgd);
  Hyper lamb;
  lamb.formula = Formula::kLamb;
  all.push_back(lamb);
  return all;
}

std::vector<Types> all_types(const Hyper& h) {
  constexpr DType kF64 = DType::kFloat64, kF32 = DType::kFloat32,
                  kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  std::vector<Types> all;
  for (bool master : {false, true}) {
    all.push_back({kF64, kF64, kF64, master});
    for (DType param : {kF32, kBF16, kF16}) {
      for (DType grad : {kF32, kBF16, kF16}) {
        all.push_back({param, grad, kF32, master});
        if (param != kF32 && h.formula != Formula::kLamb) {
          all.push_back({param, grad, param, master});
        }
      }
    }
  }
  return all;
}

UpdateArgs update_args(const Hyper& h, int step) {
  const double c1 = 1 - std::pow(h.beta1, step);
  const double c2 = 1 - std::pow(h.beta2, step);
  UpdateArgs a;
  a.formula = h.formula;
  a.sgd = {
      h.lr, h.weight_decay, h.momentum, 1 - h.dampening, h.nesterov, step == 1};
  a.adam = {
      1 - h.lr * h.weight_decay,
      h.weight_decay,
      h.beta1,
      1 - h.beta1,
      h.beta2,
      1 - h.beta2,
      h.eps,
      h.lr / c1,
      std::sqrt(c2),
      h.decoupled,
      h.amsgrad};
  a.lamb = {
      h.beta1,
      1 - h.beta1,
      h.beta2,
      1 - h.beta2,
      h.eps,
      1 / c1,
      1 / c2,
      h.weight_decay,
      0};
  return a;
}

// What the kernel does differently from the reference.
struct Mutation {
  std::optional<Hyper> hyper = {};
  bool divides_twice = false; // LAMB: by |u|
};

// A model's slice with everything that a step reads and writes.
class Slice {
 public:
  Slice(const Hyper& h, const Types& types, const Shape& shape)
      : hyper_(h),
        types_(types),
        shape_(shape),
        param_(span(types.param)),
        master_(span(compute_type(types))) {
    std::mt19937_64 random(5);
    param_.fill(random, 1);
    for (size_t i = 0; i < shape.count; ++i) {
      master_.set(i, param_.get(i));
    }
    for (size_t j = 0; j < shape.num_out; ++j) {
      outs_.push_back(span(types.param));
    }
    for (size_t k = 0; k < shape.num_grads; ++k) {
      grads_.push_back(span(types.grad));
      weights_.push_back(0.3 + 0.17 * static_cast<double>(k));
    }
    for (size_t k = 0; k < h.states(); ++k) {
      states_.push_back(span(types.state));
      for (size_t i = 0; i < shape.count; ++i) {
        states_[k].set(i, 0);
      }
    }
  }

  // `splits` are the inner ends of ranges given to the kernel one by one.
  void step(
      const Table& table,
      int number,
      std::vector<size_t> splits = {},
      const Mutation& mutation = {}) {
    std::mt19937_64 random(static_cast<uint64_t>(number));
    for (Span& grad : grads_) {
      grad.fill(random, 1.0 / number);
    }
    splits.push_back(shape_.count);
    const Hyper& h = mutation.hyper ? *mutation.hyper : hyper_;
    UpdateArgs args = update_args(h, number);
    args.grad_factor = shape_.grad_factor;
    args.weights = shape_.weighted ? weights_.data() : nullptr;
    block_sums.assign(2 * (shape_.count / kSumBlock + 1), -1);
    if (hyper_.formula == Formula::kLamb) {
      each_range(splits, [&](const UpdateSpans& s, size_t begin) {
        table.lamb_moments(args, s, &block_sums[2 * (begin / kSumBlock)]);
      });
      double x = 0, u = 0;
      const size_t blocks = (shape_.count + kSumBlock - 1) / kSumBlock;
      CHECK(blocks == shape_.count / kSumBlock + 1 || block_sums.back() == -1);
      for (size_t b = 0; b < blocks; ++b) {
        x += block_sums[2 * b];
        u += block_sums[2 * b + 1];
      }
      const double trust = std::sqrt(x) / std::sqrt(u);
      args.lamb.step_size =
          h.lr * trust / (mutation.divides_twice ? std::sqrt(u) : 1);
    }
    each_range(splits, [&](UpdateSpans s, size_t) {
      if (hyper_.formula == Formula::kLamb) {
        s.num_grads = 0;
      }
      table.update(args, s);
    });
    if (!shape_.in_place) { // as a caller that swaps buffers
      for (size_t i = 0; i < shape_.count; ++i) {
        param_.set(i, outs_[0].get(i));
      }
    }
  }

  // One step against the formulas, from what the slice held before it; the
  // largest error in units of what is allowed.
  double worst_error(
      const Table& table,
      int number,
      const std::vector<size_t>& splits = {},
      const Mutation& mutation = {}) {
    const size_t n = shape_.count;
    std::vector<Element> all(n);
    for (size_t i = 0; i < n; ++i) {
      all[i].param.value = types_.master ? master_.get(i) : param_.get(i);
      for (size_t k = 0; k < states_.size(); ++k) {
        all[i].state[k].value = states_[k].get(i);
        all[i].state[k].size = std::fabs(all[i].state[k].value);
      }
    }
    step(table, number, splits, mutation);
    long double norm_x = 0, norm_u = 0; // exact beside the kernels'
    for (size_t i = 0; i < n; ++i) {
      all[i] = reference_step(hyper_, all[i], gradient(i), number);
      norm_x += all[i].param.value * all[i].param.value;
      norm_u += all[i].direction.value * all[i].direction.value;
    }
    const DType c = compute_type(types_);
    double worst = 0;
    for (size_t i = 0; i < n; ++i) {
      if (hyper_.formula == Formula::kLamb) {
        const double size =
            hyper_.lr * static_cast<double>(std::sqrt(norm_x / norm_u));
        const double x = all[i].param.value;
        all[i].param = {
            x - size * all[i].direction.value,
            std::fabs(x) + size * all[i].direction.size};
      }
      const Span& stored = types_.master ? master_ : param_now();
      worst = std::max(
          worst, excess(stored.get(i), all[i].param, stored.type(), c));
      for (size_t k = 0; k < states_.size(); ++k) {
        worst = std::max(
            worst, excess(states_[k].get(i), all[i].state[k], types_.state, c));
      }
    }
    check_outputs();
    return worst;
  }

  // Somebody writes parameters, and masters are to follow or are written here.
  void write(bool follow) {
    follow_ = follow;
    for (size_t i = 0; i < shape_.count; i += 7) {
      // No parameter has such a value by itself: a master would keep its own.
      param_.set(i, 16 + static_cast<double>(i % 5));
      if (!follow) {
        master_.set(i, param_.get(i));
      }
    }
  }

  // All that the step may write.
  std::vector<Bytes> contents() const {
    std::vector<Bytes> all{param_.bytes(), master_.bytes()};
    for (const Span& out : outs_) {
      all.push_back(out.bytes());
    }
    for (const Span& state : states_) {
      all.push_back(state.bytes());
    }
    return all;
  }

  std::vector<double> block_sums;

 private:
  Span span(DType type) {
    // Different offsets for the different spans.
    return Span(type, shape_.count, ++spans_ * shape_.misalign % 64);
  }

  const Span& param_now() const {
    return shape_.in_place ? param_ : outs_[0];
  }

  // The sources in order, in the compute type: what the contract says.
  double gradient(size_t i) const {
    const auto fold = [&]<typename C>(C) -> double {
      volatile C sum = 0; // rounds everything
      for (size_t k = 0; k < grads_.size(); ++k) {
        volatile C x = static_cast<C>(grads_[k].get(i));
        if (shape_.weighted) {
          x = x * static_cast<C>(weights_[k]);
        }
        sum = k == 0 ? x : sum + x;
      }
      sum = sum * static_cast<C>(shape_.grad_factor);
      return sum;
    };
    return compute_type(types_) == DType::kFloat64 ? fold(0.0) : fold(0.0f);
  }

  // Every destination holds the rounded parameters; no guard was touched.
  void check_outputs() const {
    const Span& first = param_now();
    for (size_t j = shape_.in_place ? 1 : 0; j < outs_.size(); ++j) {
      CHECK(outs_[j].bytes() == first.bytes());
    }
    if (types_.master) {
      Span rounded = first;
      for (size_t i = 0; i < shape_.count; ++i) {
        rounded.set(i, master_.get(i));
      }
      CHECK(rounded.bytes() == first.bytes());
    }
    CHECK(param_.guards_intact() && master_.guards_intact());
    for (const auto* spans : {&outs_, &grads_, &states_}) {
      for (const Span& one : *spans) {
        CHECK(one.guards_intact());
      }
    }
  }

  template <typename F>
  void each_range(const std::vector<size_t>& ends, F run) {
    size_t begin = 0;
    for (size_t end : ends) {
      const auto from = [&](Span& span) -> void* {
        return static_cast<char*>(span.data()) +
            begin * dtype_size(span.type());
      };
      std::vector<void*> outs;
      for (Span& out : outs_) {
        outs.push_back(from(out));
      }
      if (shape_.in_place) {
        outs[0] = from(param_);
      }
      std::vector<const void*> grads;
      for (Span& grad : grads_) {
        grads.push_back(from(grad));
      }
      UpdateSpans s;
      s.param_type = types_.param;
      s.grad_type = types_.grad;
      s.state_type = types_.state;
      s.params_out = outs.data();
      s.num_out = outs.size();
      s.param = from(param_);
      s.grads = grads.data();
      s.num_grads = grads.size();
      s.master = types_.master ? from(master_) : nullptr;
      s.follow = follow_;
      for (size_t k = 0; k < states_.size(); ++k) {
        s.state[k] = from(states_[k]);
      }
      s.count = end - begin;
      s.stream = shape_.stream;
      run(s, begin);
      begin = end;
    }
  }

  Hyper hyper_;
  Types types_;
  Shape shape_;
  bool follow_ = false;
  size_t spans_ = 0;
  Span param_;
  Span master_;
  std::vector<Span> outs_, grads_, states_;
  std::vector<double> weights_;
};

// Deterministic, and every value of every field comes up with every other.
Shape mixed_shape(size_t count, uint64_t number) {
  std::mt19937_64 random(number);
  Shape shape;
  shape.count = count;
  shape.num_grads = 1 + random() % 5;
  shape.num_out = 1 + random() % 3;
  shape.in_place = random() % 2 == 0;
  shape.stream = random() % 2 == 0;
  shape.weighted = random() % 3 == 0;
  const size_t misaligns[] = {0, 1, 8, 12};
  shape.misalign = misaligns[random() % std::size(misaligns)];
  const double factors[] = {1, 1.0 / 3, -0.5};
  shape.grad_factor = factors[random() % std::size(factors)];
  return shape;
}

const Types kPlain{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};

} // namespace

TEST(kernels_update_matches_the_formulas) {
  uint64_t number = 0;
  for (const Hyper& h : variants()) {
    for (const Types& types : all_types(h)) {
      for (size_t count : {0, 1, 31, 33, 1021, 5000}) {
        const Shape shape = mixed_shape(count, ++number);
        if (kSanitized && (count > 1021 || number % 3 != 0)) {
          continue;
        }
        std::vector<Bytes> first;
        for (const Table* table : tables()) {
          Slice slice(h, types, shape);
          for (int step = 1; step <= 3; ++step) {
            if (!CHECK(slice.worst_error(*table, step) <= 1)) {
              std::cerr << table->name << " formula "
                        << static_cast<int>(h.formula) << " types "
                        << dtype_name(types.param) << " "
                        << dtype_name(types.grad) << " "
                        << dtype_name(types.state) << " master " << types.master
                        << " count " << count << " step " << step << std::endl;
              return;
            }
          }
          if (first.empty()) {
            first = slice.contents();
          }
          CHECK(slice.contents() == first);
        }
      }
    }
  }
}

TEST(kernels_update_masters_follow_parameters) {
  uint64_t number = 0;
  for (const Hyper& h : variants()) {
    for (const Types& types : all_types(h)) {
      if (!types.master || dtype_size(types.param) != 2) {
        continue;
      }
      for (size_t count : {1, 33, 5000}) {
        const Shape shape = mixed_shape(count, ++number);
        for (const Table* table : tables()) {
          Slice follows(h, types, shape);
          Slice told(h, types, shape);
          for (Slice* slice : {&follows, &told}) {
            slice->step(*table, 1);
            slice->write(slice == &follows);
            slice->step(*table, 2);
            slice->step(*table, 3);
          }
          CHECK(follows.contents() == told.contents());
        }
      }
    }
  }
}

TEST(kernels_update_same_bits_in_pieces) {
  uint64_t number = 0;
  for (const Hyper& h : variants()) {
    for (const Types& types : all_types(h)) {
      Shape shape = mixed_shape(7000, ++number);
      if (kSanitized && number % 5 != 0) {
        continue;
      }
      Slice whole(h, types, shape);
      whole.step(*tables().front(), 1);
      whole.step(*tables().front(), 2);
      for (const Table* table : tables()) {
        std::vector<size_t> splits{1, 1000, 1003, 4096, 6999};
        if (h.formula == Formula::kLamb) {
          splits = {kSumBlock, 3 * kSumBlock, 4 * kSumBlock};
        }
        shape.stream = !shape.stream;
        Slice pieces(h, types, shape);
        pieces.step(*table, 1, splits);
        pieces.step(*table, 2, splits);
        CHECK(pieces.contents() == whole.contents());
        CHECK(pieces.block_sums == whole.block_sums);
      }
    }
  }
}

// The reference would see a formula that is slightly wrong: here the kernel
// gets other scalars than the reference.
TEST(kernels_update_reference_detects_mutants) {
  for (const Table* table : tables()) {
    for (const Hyper& h : variants()) {
      const auto error = [&](double Hyper::* field, double factor) {
        Hyper wrong = h;
        wrong.*field *= factor;
        Slice slice(h, kPlain, {});
        slice.worst_error(*table, 1);
        return slice.worst_error(*table, 2, {}, {wrong});
      };
      CHECK(error(&Hyper::lr, 1) > 0); // not the same computation
      CHECK(error(&Hyper::lr, 1) <= 1);
      CHECK(error(&Hyper::lr, 1 + 1e-4) > 2);
      CHECK(error(&Hyper::weight_decay, 1 + 1e-3) > 2);
      if (h.formula != Formula::kSgd) {
        CHECK(error(&Hyper::beta1, 1 + 1e-4) > 2);
        CHECK(error(&Hyper::beta2, 1 + 1e-4) > 2);
        CHECK(error(&Hyper::eps, 2) > 2);
      } else if (h.momentum != 0) {
        CHECK(error(&Hyper::momentum, 1 + 1e-4) > 2);
      }
    }
  }
}

// A division by |u| too many, on top of the trust ratio's.
TEST(kernels_update_detects_a_lamb_mutant) {
  const Hyper lamb = variants().back();
  for (const Table* table : tables()) {
    for (const Types& types : all_types(lamb)) {
      Slice right(lamb, types, {});
      CHECK(right.worst_error(*table, 1) <= 1);
      Slice mutant(lamb, types, {});
      CHECK(mutant.worst_error(*table, 1, {}, {{}, true}) > 4);
    }
  }
}

TEST(kernels_lamb_block_sums) {
  const Hyper lamb = variants().back();
  for (size_t count : {1, 15, 16, 17, 1023, 1024, 1025, 2049, 5000}) {
    std::vector<double> first;
    for (const Table* table : tables()) {
      Shape shape;
      shape.count = count;
      Slice slice(lamb, kPlain, shape);
      slice.step(*table, 1);
      if (first.empty()) {
        first = slice.block_sums;
      }
      CHECK(slice.block_sums == first);
    }
  }
}

TEST(kernels_sum_squares) {
  std::mt19937_64 random(3);
  for (DType type :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (size_t count : {0, 1, 15, 16, 33, 1023, 1024, 1040, 5000, 20001}) {
      Span span(type, count, count % 5);
      span.fill(random, 2);
      // The order that the contract gives, and without rounding.
      long double exact = 0;
      double ordered = 0;
      for (size_t begin = 0; begin < count; begin += kSumBlock) {
        volatile double sums[16] = {};
        for (size_t i = begin; i < std::min(begin + kSumBlock, count); ++i) {
          const double x = span.get(i);
          const volatile double square = x * x;
          sums[i % 16] = sums[i % 16] + square;
          exact += static_cast<long double>(x) * x;
        }
        double block = sums[0];
        for (size_t k = 1; k < 16; ++k) {
          block += sums[k];
        }
        ordered += block;
      }
      for (const Table* table : tables()) {
        const double got = table->sum_squares(type, span.data(), count);
        CHECK_EQ(got, ordered);
        CHECK(std::fabs(got - exact) <= 1e-13 * exact);
      }
    }
  }
  for (const Table* table : tables()) {
    const int64_t integers[2] = {1, 2};
    CHECK_EQ(table->sum_squares(DType::kInt64, integers, 2), 0.0);
  }
}

TEST(kernels_update_keeps_nan) {
  for (const Table* table : tables()) {
    for (bool decoupled : {false, true}) {
      std::vector<float> param(40, 1.0f), m(40), v(40), top(40, 1.0f), grad(40);
      grad[33] = std::numeric_limits<float>::quiet_NaN();
      top[7] = grad[33];
      Hyper h;
      h.amsgrad = true;
      h.decoupled = decoupled;
      void* out = param.data();
      const void* source = grad.data();
      UpdateSpans s;
      s.params_out = &out;
      s.num_out = 1;
      s.param = out;
      s.grads = &source;
      s.num_grads = 1;
      s.state[0] = m.data();
      s.state[1] = v.data();
      s.state[2] = top.data();
      s.count = 40;
      table->update(update_args(h, 1), s);
      for (size_t i = 0; i < 40; ++i) {
        CHECK_EQ(std::isnan(param[i]), i == 33 || i == 7);
        CHECK_EQ(std::isnan(top[i]), i == 33 || i == 7);
        CHECK_EQ(std::isnan(v[i]), i == 33);
      }
    }
  }
}
