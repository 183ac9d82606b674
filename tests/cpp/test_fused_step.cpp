#include <cstring>
#include <string>

#include "base/ownership.hpp"
#include "collective_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr DType kF32 = DType::kFloat32;

std::vector<float> floats(size_t count, uint64_t seed) {
  const Bytes bytes = values(kF32, count, seed);
  std::vector<float> out(count);
  if (count != 0) {
    std::memcpy(out.data(), bytes.data(), bytes.size());
  }
  return out;
}

AdamwHyper hyper() {
  AdamwHyper h{};
  h.lr = 1e-2;
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.weight_decay = 0.1;
  h.eps = 1e-6;
  h.mean = true;
  return h;
}

// One parameter of the reference: the whole of it in one place.
struct Whole {
  std::vector<float> param, m, v, top;
};

// One parameter as a rank of the group has it.
struct Part {
  Buffer param;
  Buffer grad;
  std::vector<float> m, v, top;
  float step = 0;
  size_t offset; // of m, v and top in the whole
};

class Training {
 public:
  Training(
      Group& g,
      const std::vector<size_t>& counts,
      Place params,
      Place grads)
      : g_(g) {
    for (size_t t = 0; t < counts.size(); ++t) {
      const size_t n = counts[t];
      const std::vector<float> zeros(n, 0.0f);
      wholes_.push_back({floats(n, 7 + t), zeros, zeros, zeros});
      const ShardRange r = shard_range(static_cast<int64_t>(n), g.size, g.rank);
      const std::vector<float> state(static_cast<size_t>(r.length), 0.0f);
      parts_.push_back(
          {placed(g, params, n * 4),
           placed(g, grads, n * 4),
           state,
           state,
           state,
           0,
           static_cast<size_t>(r.offset)});
      parts_[t].param.assign(wholes_[t].param.data());
    }
  }

  void step(const AdamwHyper& h) {
    ++steps_;
    for (size_t t = 0; t < parts_.size(); ++t) {
      parts_[t].grad.assign(gradient(t, g_.rank).data());
    }
    g_.run([&](Context& ctx) { fused_adamw(ctx, tensors(h), h); });
  }

  // At once after step(): the result, and that gradients were only read.
  void check(const AdamwHyper& h, bool updated = true) {
    for (size_t t = 0; t < parts_.size(); ++t) {
      Part& part = parts_[t];
      CHECK(part.grad.holds(gradient(t, g_.rank).data()));
      std::memset(part.grad.data(), 0xff, part.grad.bytes());
      if (updated) {
        update(wholes_[t], t, h);
      }
      CHECK(part.param.holds(wholes_[t].param.data()));
      CHECK(same(part.m, wholes_[t].m, part.offset));
      CHECK(same(part.v, wholes_[t].v, part.offset));
      CHECK(same(part.top, wholes_[t].top, part.offset));
      CHECK_EQ(part.step, static_cast<float>(applied_ + (updated ? 1 : 0)));
    }
    applied_ += updated ? 1 : 0;
  }

  float* first_step() {
    return &parts_[0].step;
  }

  std::vector<AdamwTensor> tensors(const AdamwHyper& h) {
    std::vector<AdamwTensor> list;
    for (Part& p : parts_) {
      list.push_back(
          {p.param.as<float>(),
           p.grad.as<float>(),
           p.m.data(),
           p.v.data(),
           h.amsgrad ? p.top.data() : nullptr,
           &p.step,
           p.param.bytes() / 4,
           0});
    }
    return list;
  }

 private:
  std::vector<float> gradient(size_t tensor, int rank) const {
    return floats(
        wholes_[tensor].param.size(), steps_ * 10000 + tensor * 20 + rank);
  }

  static bool same(
      const std::vector<float>& part,
      const std::vector<float>& whole,
      size_t offset) {
    return part.empty() ||
        std::memcmp(part.data(), whole.data() + offset, part.size() * 4) == 0;
  }

  // What one process does with everybody's gradients.
  void update(Whole& w, size_t tensor, const AdamwHyper& h) {
    std::vector<std::vector<float>> grads;
    std::vector<const float*> srcs;
    for (int p = 0; p < g_.size; ++p) {
      grads.push_back(gradient(tensor, p));
      srcs.push_back(grads.back().data());
    }
    float* out = w.param.data();
    kernels::table()->adamw_f32(
        adamw_args(h, static_cast<float>(applied_ + 1), g_.size),
        &out,
        1,
        w.param.data(),
        srcs.data(),
        srcs.size(),
        w.m.data(),
        w.v.data(),
        h.amsgrad ? w.top.data() : nullptr,
        w.param.size(),
        false);
  }

  Group& g_;
  std::vector<Whole> wholes_;
  std::vector<Part> parts_;
  uint64_t steps_ = 0;
  int applied_ = 0;
};

void train(Group& g) {
  const std::vector<std::vector<size_t>> lists{
      {1},
      {33, 0, 5000, 1, 129},
      {g.size == 2 && !kSanitized ? size_t{300000} : size_t{40000}, 31, 20001}};
  int turn = 0;
  for (const auto& counts : lists) {
    for (Place params : kPlaces) {
      for (Place grads : kPlaces) {
        AdamwHyper h = hyper();
        const int kind = turn++;
        float scale = 8;
        h.amsgrad = kind % 2 == 1;
        h.maximize = kind % 5 == 1;
        h.mean = kind % 3 != 2;
        h.grad_scale = kind % 4 == 3 ? &scale : nullptr;
        Training training(g, counts, params, grads);
        for (int step = 0; step < 3; ++step) {
          h.lr *= 0.9;
          training.step(h);
          training.check(h);
        }
      }
    }
  }
}

} // namespace

TEST(fused_adamw_equals_one_process) {
  with_groups(train);
}

TEST(fused_adamw_between_processes) {
  with_group(3, 2, train, true);
}

TEST(fused_adamw_many_tensors) {
  with_group(3, 1, [](Group& g) {
    for (Place place : kPlaces) {
      Training training(g, std::vector<size_t>(1500, 70), place, place);
      const AdamwHyper h = hyper();
      training.step(h);
      training.check(h);
    }
  });
}

// More than there is room for in the operation's table.
TEST(fused_adamw_too_many_tensors) {
  with_group(2, 1, [](Group& g) {
    Training training(
        g, std::vector<size_t>(5000, 1), Place::kOrdinary, Place::kOrdinary);
    const AdamwHyper h = hyper();
    expect_error(ErrorKind::kInvalid, {"fused_adamw_", "split the list"}, [&] {
      training.step(h);
    });
    training.check(h, false);
    check_usable(g);
  });
}

TEST(fused_adamw_found_inf_on_one_rank) {
  for (int size : {1, 2, 4}) {
    with_group(size, 1, [](Group& g) {
      for (Place place : {Place::kOrdinary, Place::kArena}) {
        Training training(g, {100, 40000}, place, place);
        AdamwHyper h = hyper();
        float found = 0;
        h.found_inf = &found;
        training.step(h);
        training.check(h);
        CHECK_EQ(found, 0.0f);
        for (int who = 0; who < g.size; ++who) {
          found = g.rank == who ? 1.0f : 0.0f;
          training.step(h);
          training.check(h, false);
          CHECK_EQ(found, 1.0f); // everywhere
        }
        found = 0;
        training.step(h);
        training.check(h);
      }
    });
  }
}

TEST(fused_adamw_disagreements_raise_everywhere) {
  with_group(3, 1, [](Group& g) {
    const bool odd = g.rank == 2;
    Training training(g, {100, 40000}, Place::kMixed, Place::kMixed);
    AdamwHyper good = hyper();
    training.step(good);
    training.check(good);
    const auto differ = [&](const AdamwHyper& h, const std::string& says) {
      expect_error(ErrorKind::kMismatch, {"fused_adamw_", says}, [&] {
        training.step(h);
      });
      training.check(h, false);
    };
    for (double AdamwHyper::* scalar :
         {&AdamwHyper::lr,
          &AdamwHyper::beta1,
          &AdamwHyper::beta2,
          &AdamwHyper::weight_decay,
          &AdamwHyper::eps}) {
      AdamwHyper h = good;
      h.*scalar *= odd ? 0.5 : 1;
      differ(h, "scalar arguments");
    }
    for (bool AdamwHyper::* flag :
         {&AdamwHyper::amsgrad, &AdamwHyper::maximize, &AdamwHyper::mean}) {
      AdamwHyper h = good;
      h.*flag ^= odd;
      differ(h, "scalar arguments");
    }
    const float scale = 2;
    AdamwHyper h = good;
    h.grad_scale = odd ? &scale : nullptr;
    differ(h, "scalar arguments");
    *training.first_step() += odd ? 1 : 0;
    expect_error(ErrorKind::kMismatch, {"scalar arguments"}, [&] {
      training.step(good);
    });
    *training.first_step() -= odd ? 1 : 0;
    training.check(good, false);
    training.step(good);
    training.check(good);
    Training other(
        g,
        odd ? std::vector<size_t>{40, 60} : std::vector<size_t>{60, 40},
        Place::kMixed,
        Place::kMixed);
    expect_error(ErrorKind::kMismatch, {"sizes or memory layouts"}, [&] {
      other.step(good);
    });
    check_usable(g);
  });
}
