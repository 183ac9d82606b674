// What ranks agree on, and the scalars of the updates.

#include "check.hpp"
#include "cuda_tiles.hpp"

namespace fusedpg::test {

namespace {

constexpr uint32_t kTensors = 5;
constexpr uint64_t kHash = 0x0123456789abcdef;

struct Proposal {
  uint64_t hash = kHash;
  std::vector<uint8_t> used;
  float found_inf = 0;
};

// What the ranks' all-reduce with MAX gives.
std::vector<uint8_t> agree(const std::vector<Proposal>& ranks) {
  std::vector<uint8_t> all(kAgreeBytes);
  for (const Proposal& p : ranks) {
    std::vector<uint8_t> mine(kAgreeBytes, 0xaa);
    run(&CudaApi::propose,
        {mine.data(),
         p.used.empty() ? nullptr : p.used.data(),
         &p.found_inf,
         p.hash,
         kTensors,
         0});
    for (uint32_t i = 0; i < kAgreeBytes; ++i) {
      all[i] = std::max(all[i], mine[i]);
    }
  }
  return all;
}

// A list of five tensors: two groups, one tensor without a counter.
struct Prepared {
  Hyper hypers[2];
  float steps[kTensors] = {0, 4, 9, 99, 7};
  std::vector<TensorInfo> tensors{kTensors};
  std::vector<TensorScalars> scalars{kTensors};
  std::vector<uint8_t> used = std::vector<uint8_t>(kTensors, 9);
  float found_inf = 0;
  uint64_t mismatch = 0;
  PrepareArgs args{};

  explicit Prepared(const std::vector<uint8_t>* agreed) {
    hypers[0] = all_variants()[3].hyper;
    hypers[1] = all_variants()[6].hyper;
    hypers[1].maximize = true;
    for (uint32_t t = 0; t < kTensors; ++t) {
      tensors[t].step = t == 4 ? nullptr : &steps[t];
      tensors[t].hyper = t % 2;
    }
    args.agree = agreed == nullptr ? nullptr : agreed->data();
    args.tensors = tensors.data();
    args.hypers = hypers;
    args.divisor = 2;
    args.scalars = scalars.data();
    args.used = used.data();
    args.found_inf = &found_inf;
    args.mismatch = &mismatch;
    args.sequence = 17;
    args.num_tensors = kTensors;
    args.size = 2;
  }
  bool steps_are(std::vector<float> wanted) const {
    return std::equal(wanted.begin(), wanted.end(), steps);
  }
};

bool same_scalars(
    const kernels::StepScalars& a,
    const kernels::StepScalars& b) {
  return a.sgd.lr == b.sgd.lr && a.sgd.momentum == b.sgd.momentum &&
      a.sgd.weight_decay == b.sgd.weight_decay &&
      a.adam.step_size == b.adam.step_size && a.adam.decay == b.adam.decay &&
      a.adam.bias_correction2_sqrt == b.adam.bias_correction2_sqrt &&
      a.adam.one_minus_beta2 == b.adam.one_minus_beta2 &&
      a.adam.amsgrad == b.adam.amsgrad &&
      a.lamb.inverse_bias_correction1 == b.lamb.inverse_bias_correction1 &&
      a.lamb.inverse_bias_correction2 == b.lamb.inverse_bias_correction2 &&
      a.lamb.weight_decay == b.lamb.weight_decay;
}

} // namespace

TEST(cuda_tiles_prepare) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  // Nothing to agree on.
  const float scale = 8;
  const float lr_single = 0.25F;
  const double lr_double = 0.7;
  for (int lrs = 0; lrs < 2; ++lrs) {
    Prepared p(nullptr);
    const void* const entries[] = {&lr_single, &lr_double};
    const DType types[] = {DType::kFloat32, DType::kFloat64};
    p.args.grad_scale = &scale;
    p.args.lrs = lrs != 0 ? entries : nullptr;
    p.args.lr_types = types;
    run(&CudaApi::prepare, p.args);
    CHECK(p.steps_are({1, 5, 10, 100, 7}));
    CHECK(p.used == std::vector<uint8_t>(kTensors, 1));
    const double step[kTensors] = {1, 5, 10, 100, 1};
    for (uint32_t t = 0; t < kTensors; ++t) {
      Hyper hyper = p.hypers[t % 2];
      if (lrs != 0) {
        hyper.lr = t % 2 == 0 ? 0.25 : 0.7;
      }
      kernels::StepScalars wanted;
      kernels::resolve_scalars(hyper, step[t], wanted);
      CHECK(same_scalars(p.scalars[t], wanted));
      CHECK_EQ(p.scalars[t].grad_factor, (t % 2 == 0 ? 1.0 : -1.0) / (8 * 2));
      CHECK(!p.scalars[t].skip);
    }
  }
}

TEST(cuda_tiles_prepare_weights) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  for (const double second : {0.0, 3.0}) {
    Prepared p(nullptr);
    const double weights[] = {second / 2, second};
    p.args.weights = weights;
    p.args.divisor = 1;
    run(&CudaApi::prepare, p.args);
    CHECK_EQ(p.scalars[0].grad_factor, second == 0 ? 0 : 1.0 / 4.5);
    CHECK_EQ(p.scalars[1].grad_factor, second == 0 ? 0 : -1.0 / 4.5);
  }
}

TEST(cuda_tiles_agreement) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  Proposal one;
  one.used = {1, 0, 0, 0, 0};
  Proposal other;
  other.used = {0, 0, 7, 0, 0};
  const auto any = agree({one, other});
  Prepared p(&any);
  run(&CudaApi::prepare, p.args);
  CHECK(p.used == (std::vector<uint8_t>{1, 0, 1, 0, 0}));
  CHECK(p.steps_are({1, 4, 10, 99, 7}));
  CHECK(!p.scalars[0].skip && p.scalars[1].skip && p.scalars[4].skip);
  CHECK(p.found_inf == 0 && p.mismatch == 0);

  // Null: all are used.
  const auto all = agree({one, Proposal()});
  Prepared whole(&all);
  run(&CudaApi::prepare, whole.args);
  CHECK(whole.used == std::vector<uint8_t>(kTensors, 1));

  other.found_inf = std::numeric_limits<float>::quiet_NaN();
  const auto infinite = agree({one, other});
  Prepared q(&infinite);
  run(&CudaApi::prepare, q.args);
  CHECK(q.found_inf == 1 && q.mismatch == 0);
  CHECK(q.steps_are({0, 4, 9, 99, 7}));
  CHECK(q.scalars[0].skip && q.scalars[2].skip);
  CHECK(q.used == (std::vector<uint8_t>{1, 0, 1, 0, 0}));

  for (const uint64_t hash : {kHash ^ 1, kHash ^ (uint64_t(1) << 63), ~kHash}) {
    other.hash = hash;
    const auto different = agree({one, other});
    Prepared r(&different);
    run(&CudaApi::prepare, r.args);
    CHECK(r.mismatch == 17 && r.found_inf == 0);
    CHECK(r.steps_are({0, 4, 9, 99, 7}));
    CHECK(r.used == std::vector<uint8_t>(kTensors, 9));
    CHECK(r.scalars[0].skip && r.scalars[1].skip);
    // Flags alone, as reduce_shards needs them.
    Prepared flags(&different);
    flags.args.tensors = nullptr;
    flags.args.num_tensors = 0;
    run(&CudaApi::prepare, flags.args);
    CHECK(flags.mismatch == 17);
  }
}

TEST(cuda_tiles_trust) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  constexpr int kRanks = 3;
  Hyper hypers[3];
  hypers[0].weight_decay = 0.1;
  hypers[1].trust_clip = true;
  hypers[1].always_adapt = true;
  TensorInfo tensors[3] = {};
  TensorScalars scalars[3];
  double gathered[kRanks * 3 * 2];
  for (uint32_t t = 0; t < 3; ++t) {
    tensors[t].hyper = t;
    scalars[t].sgd.lr = 0.5; // not that of `hypers`
    for (int p = 0; p < kRanks; ++p) {
      gathered[(p * 3 + t) * 2] = 10.0 * (p + 1) + t / 3.0;
      gathered[(p * 3 + t) * 2 + 1] = 0.1 * p + t;
    }
  }
  run(&CudaApi::trust, {gathered, tensors, hypers, scalars, 3, kRanks});
  for (uint32_t t = 0; t < 3; ++t) {
    double sums[2] = {0, 0};
    for (int i = 0; i < 2 * kRanks; ++i) {
      sums[i % 2] += gathered[(i / 2 * 3 + t) * 2 + i % 2];
    }
    CHECK_EQ(
        scalars[t].lamb.step_size,
        0.5 * kernels::trust_ratio(hypers[t], sums[0], sums[1]));
  }
  CHECK(scalars[0].lamb.step_size > 0.5);
  CHECK_EQ(scalars[2].lamb.step_size, 0.5);
}

} // namespace fusedpg::test
