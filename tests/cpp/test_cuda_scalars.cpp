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
  double weight = 1;
};

// How headers lie; kOpaque: raw.
struct Form {
  DType type = DType::kOpaque;
  RedOp op = RedOp::kSum;
  bool weighted = false;
};

// What all ranks have proposed, as it arrives.
struct Headers {
  std::vector<char> data;
  Header header{};

  explicit Headers(const std::vector<Proposal>& ranks, Form form = {}) {
    const bool raw = form.type == DType::kOpaque;
    const size_t element = raw ? 1 : dtype_size(form.type);
    const size_t items = raw
        ? (header_bytes(kTensors) + 7) / 8 * 8
        : coded_elements(kTensors, form.weighted, ranks.size()) + 3;
    header.stride = items * element;
    header.hash = ranks[0].hash;
    header.type = form.type;
    header.op = form.op;
    header.weighted = form.weighted;
    header.tensors = kTensors;
    header.size = static_cast<int32_t>(ranks.size());
    std::vector<char> reduced;
    for (size_t r = 0; r < ranks.size(); ++r) {
      const Proposal& p = ranks[r];
      std::vector<char> mine(2 * header.stride, 0x5a);
      header.data = mine.data();
      header.hash = p.hash;
      header.rank = static_cast<int32_t>(r);
      run(&CudaApi::propose,
          {header,
           2,
           static_cast<uint32_t>(items),
           p.used.empty() ? nullptr : p.used.data(),
           &p.found_inf,
           p.weight});
      // Both are the same.
      CHECK(
          std::equal(
              mine.begin(),
              mine.begin() + static_cast<ptrdiff_t>(header.stride),
              mine.begin() + static_cast<ptrdiff_t>(header.stride)));
      mine.resize(header.stride);
      if (raw) {
        data.insert(data.end(), mine.begin(), mine.end());
        continue;
      }
      for (size_t i = 0; r != 0 && i < items; ++i) {
        const double a = number(form.type, data.data(), i);
        const double b = number(form.type, mine.data(), i);
        put_number(
            form.type,
            mine.data(),
            i,
            form.op == RedOp::kMin       ? std::min(a, b)
                : form.op == RedOp::kMax ? std::max(a, b)
                                         : a + b);
      }
      data = mine;
    }
    header.data = data.data();
    header.hash = ranks[0].hash;
    header.rank = 0;
  }
};

std::vector<Form> all_forms() {
  std::vector<Form> forms{{}};
  for (const DType type :
       {DType::kFloat32,
        DType::kFloat64,
        DType::kFloat16,
        DType::kBFloat16,
        DType::kInt32,
        DType::kInt64}) {
    for (const RedOp op : {RedOp::kSum, RedOp::kMin, RedOp::kMax}) {
      forms.push_back({type, op, false});
    }
    forms.push_back({type, RedOp::kSum, true});
  }
  return forms;
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

  explicit Prepared(const Headers* headers) {
    hypers[0] = all_variants()[3].hyper;
    hypers[1] = all_variants()[6].hyper;
    hypers[1].maximize = true;
    for (uint32_t t = 0; t < kTensors; ++t) {
      tensors[t].step = t == 4 ? nullptr : &steps[t];
      tensors[t].hyper = t % 2;
    }
    if (headers != nullptr) {
      args.from = headers->header;
    }
    args.from.tensors = kTensors;
    args.tensors = tensors.data();
    args.hypers = hypers;
    args.divisor = 2;
    args.scalars = scalars.data();
    args.used = used.data();
    args.found_inf = &found_inf;
    args.mismatch = &mismatch;
    args.sequence = 17;
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

// Every bit of them arrives.
TEST(cuda_tiles_prepare_weights) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  for (const Form& form : all_forms()) {
    if (form.type != DType::kOpaque && !form.weighted) {
      continue;
    }
    for (const double second : {0.0, 3.0, 1 / 3.0}) {
      std::vector<Proposal> ranks(3);
      ranks[0].weight = second / 7;
      ranks[1].weight = second;
      ranks[2].weight = second * 1e-9;
      const Headers headers(ranks, form);
      Prepared p(&headers);
      double weights[3] = {9, 9, 9};
      p.args.weights = weights;
      p.args.divisor = 1;
      run(&CudaApi::prepare, p.args);
      const double total =
          0.0 + ranks[0].weight + ranks[1].weight + ranks[2].weight;
      for (size_t r = 0; r < 3; ++r) {
        CHECK_EQ(weights[r], ranks[r].weight);
      }
      CHECK_EQ(p.scalars[0].grad_factor, second == 0 ? 0 : 1.0 / total);
      CHECK_EQ(p.scalars[1].grad_factor, second == 0 ? 0 : -1.0 / total);
      CHECK_EQ(p.mismatch, 0u);
    }
  }
}

TEST(cuda_tiles_agreement) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  for (const Form& form : all_forms()) {
    Proposal one;
    one.used = {1, 0, 0, 0, 0};
    Proposal other;
    other.used = {0, 0, 7, 0, 0};
    const Headers any({one, other}, form);
    Prepared p(&any);
    run(&CudaApi::prepare, p.args);
    CHECK(p.used == (std::vector<uint8_t>{1, 0, 1, 0, 0}));
    CHECK(p.steps_are({1, 4, 10, 99, 7}));
    CHECK(!p.scalars[0].skip && p.scalars[1].skip && p.scalars[4].skip);
    CHECK(p.found_inf == 0 && p.mismatch == 0);
    // Without an update, as reduce_shards needs them.
    Prepared flags(&any);
    flags.args.tensors = nullptr;
    run(&CudaApi::prepare, flags.args);
    CHECK(flags.steps_are({0, 4, 9, 99, 7}));
    CHECK(!flags.scalars[0].skip && flags.scalars[1].skip);

    // Null: all are used.
    const Headers all({one, Proposal()}, form);
    Prepared whole(&all);
    run(&CudaApi::prepare, whole.args);
    CHECK(whole.used == std::vector<uint8_t>(kTensors, 1));

    other.found_inf = std::numeric_limits<float>::quiet_NaN();
    const Headers infinite({one, other}, form);
    Prepared q(&infinite);
    run(&CudaApi::prepare, q.args);
    CHECK(q.found_inf == 1 && q.mismatch == 0);
    CHECK(q.steps_are({0, 4, 9, 99, 7}));
    CHECK(q.scalars[0].skip && q.scalars[2].skip);
    CHECK(q.used == (std::vector<uint8_t>{1, 0, 1, 0, 0}));

    for (const uint64_t hash :
         {kHash ^ 1, kHash ^ (uint64_t(1) << 63), ~kHash}) {
      other.hash = hash;
      const Headers different({one, other}, form);
      Prepared r(&different);
      run(&CudaApi::prepare, r.args);
      CHECK(r.mismatch == 17 && r.found_inf == 0);
      CHECK(r.steps_are({0, 4, 9, 99, 7}));
      CHECK(r.used == std::vector<uint8_t>(kTensors, 9));
      CHECK(r.scalars[0].skip && r.scalars[1].skip);
      // The hash alone, as the first call of a kind needs it.
      Prepared kind(&different);
      kind.args.tensors = nullptr;
      kind.args.from.tensors = 0;
      kind.args.found_inf = nullptr;
      run(&CudaApi::prepare, kind.args);
      CHECK(kind.mismatch == 17);
    }
  }
}

// More ranks than a half type can count, of which one is another; and what came
// from elsewhere.
TEST(cuda_tiles_agreement_of_many) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  for (const bool differs : {false, true}) {
    std::vector<Proposal> ranks(300);
    ranks[7].hash ^= differs ? uint64_t(1) << 40 : 0;
    ranks[280].found_inf = 1;
    const Headers headers(ranks, {DType::kBFloat16, RedOp::kSum, false});
    Prepared p(&headers);
    run(&CudaApi::prepare, p.args);
    CHECK_EQ(p.mismatch, differs ? 17u : 0u);
    CHECK_EQ(p.found_inf, differs ? 0 : 1);
  }
  for (const DType type :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const double scale : {0.0, 1.0, 2.0, 0.5}) {
      Headers headers({Proposal(), Proposal()}, {type, RedOp::kSum, false});
      char* data = headers.data.data();
      for (size_t i = 0; i < kCodedFlags; ++i) {
        put_number(type, data, i, scale * number(type, data, i));
      }
      Prepared p(&headers);
      run(&CudaApi::prepare, p.args);
      CHECK_EQ(p.mismatch, scale == 1 ? 0u : 17u);
    }
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
