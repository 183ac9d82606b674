// The kernels of compression over all parameters of a unit, one after the
// other, in one call: fusedpg._C.compress.unit.
//
// A unit's gradients are a list of tensors, each of one or more whole
// parameters, and `numels` the parameters' sizes; a residual is one tensor. A
// message has, kind by kind, what the parameters have of it.
#include <cstring>
#include <optional>
#include <variant>

#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/error.hpp"
#include "c10d/compress.hpp"
#include "c10d/compress_checks.hpp"
#include "compress/messages.hpp"
#include "compress/select.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::compress_unit {

namespace {

using namespace kernels;
using namespace compress_checks;
using Numbers = std::vector<int64_t>;
using Seeds = std::vector<uint64_t>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Factors = std::variant<double, std::vector<double>>;

[[noreturn]] void refuse(const char* op, const std::string& what) {
  TORCH_CHECK_VALUE(false, formatted("fused: compress.unit.{}: {}", op, what));
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

// Tensors side by side. `next` is where the parameter that follows lies.
class Spans {
 public:
  Spans(const char* op, const char* argument, const Tensors& tensors)
      : op_(op),
        argument_(argument),
        tensors_(tensors) {
    for (const at::Tensor& one : tensors) {
      check(op, argument, one, at::kFloat);
    }
  }

  float* next(int64_t numel) {
    while (which_ < tensors_.size() && begin_ == tensors_[which_].numel()) {
      ++which_;
      begin_ = 0;
    }
    if (numel == 0) {
      return nullptr;
    }
    if (which_ == tensors_.size() ||
        numel > tensors_[which_].numel() - begin_) {
      refuse(op_, formatted("{} are not made of whole parameters", argument_));
    }
    float* found = floats(tensors_[which_]) + begin_;
    begin_ += numel;
    return found;
  }

 private:
  const char* op_;
  const char* argument_;
  const Tensors& tensors_;
  size_t which_ = 0;
  int64_t begin_ = 0;
};

// Calls with each parameter's number, v, and size.
template <typename Function>
void each_v(
    const char* op,
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    double beta,
    const Factors& gammas,
    Function&& function) {
  const int64_t total = sum_of(op, "numels", numels);
  if (!grads && !residual) {
    refuse(op, "needs gradients or a residual");
  }
  if (residual) {
    check(op, "residual", *residual, at::kFloat, total);
  }
  const auto* each = std::get_if<std::vector<double>>(&gammas);
  if (each != nullptr) {
    check_parameters(op, "gamma", each->size(), numels);
  }
  const Tensors none;
  Spans spans(op, "grads", grads ? *grads : none);
  int64_t begin = 0;
  for (size_t n = 0; n < numels.size(); ++n) {
    Compensation v;
    v.grad = grads ? spans.next(numels[n]) : nullptr;
    v.residual = residual ? floats(*residual) + begin : nullptr;
    v.beta = static_cast<float>(beta);
    v.gamma = static_cast<float>(each ? (*each)[n] : std::get<double>(gammas));
    begin += numels[n];
    function(n, v, static_cast<size_t>(numels[n]));
  }
}

// A message's parts of one kind, of all ranks; `of(r)` is where the parameter
// has it that comes next.
template <typename T>
class Parts {
 public:
  Parts(
      const char* op,
      const char* argument,
      const Tensors& tensors,
      at::ScalarType type,
      int64_t numel) {
    for (const at::Tensor& one : tensors) {
      check(op, argument, one, type, numel);
      begins_.push_back(static_cast<const T*>(one.const_data_ptr()));
    }
  }

  const T* operator()(size_t r) const {
    return begins_[r];
  }

  const T* const* data() const {
    return begins_.data();
  }

  void skip(size_t count) {
    for (const T*& begin : begins_) {
      begin += count;
    }
  }

 private:
  std::vector<const T*> begins_;
};

// Calls with each parameter's number, where its result goes, and its size.
template <typename Function>
void each_out(
    const char* op,
    const Tensors& outs,
    const Numbers& numels,
    Function&& function) {
  Spans spans(op, "outs", outs);
  for (size_t n = 0; n < numels.size(); ++n) {
    float* out = spans.next(numels[n]);
    function(n, out, static_cast<size_t>(numels[n]));
  }
}

template <typename Size>
int64_t total_of(const Numbers& numels, Size&& size) {
  size_t total = 0;
  for (const int64_t numel : numels) {
    total += size(static_cast<size_t>(numel));
  }
  return static_cast<int64_t>(total);
}

at::Tensor made(int64_t count, at::ScalarType type) {
  return at::empty({count}, type);
}

// --- what is sent -----------------------------------------------------------

// Puts what was selected behind what is there.
void append(
    const compress::Selected& found,
    float*& values,
    int32_t*& indices) {
  const size_t size = found.indices.size();
  std::copy(found.values.begin(), found.values.end(), values);
  std::copy(found.indices.begin(), found.indices.end(), indices);
  values += size;
  indices += size;
}

Two topk(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    const Numbers& ks,
    double beta,
    double gamma) {
  const char* op = "topk";
  check_parameters(op, "k", ks.size(), numels);
  const int64_t total = sum_of(op, "ks", ks);
  at::Tensor values = made(total, at::kFloat);
  at::Tensor indices = made(total, at::kInt);
  float* to = floats(values);
  auto* places = indices.data_ptr<int32_t>();
  for (size_t n = 0; n < ks.size(); ++n) {
    if (ks[n] > numels[n]) {
      refuse(op, formatted("k is 0 to {}, got {}", numels[n], ks[n]));
    }
  }
  each_v(
      op,
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        compress::top_k(
            compress_table(), v, count, static_cast<size_t>(ks[n]), selected());
        append(selected(), to, places);
      });
  return {values, indices};
}

// Also how many each parameter has.
Three threshold(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    double threshold,
    const Numbers& at_least,
    double beta,
    double gamma) {
  const char* op = "threshold";
  check_parameters(op, "at_least", at_least.size(), numels);
  for (size_t n = 0; n < numels.size(); ++n) {
    if (!(threshold >= 0) || at_least[n] < 0 || at_least[n] > numels[n]) {
      refuse(
          op,
          formatted(
              "threshold is at least 0 and at_least 0 to {}, got {} and {}",
              numels[n],
              threshold,
              at_least[n]));
    }
  }
  at::Tensor counts = made(static_cast<int64_t>(numels.size()), at::kInt);
  std::vector<float> values;
  std::vector<int32_t> indices;
  each_v(
      op,
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        compress::Selected& found = selected();
        compress::above(
            compress_table(),
            v,
            count,
            static_cast<float>(threshold),
            static_cast<size_t>(at_least[n]),
            found);
        values.insert(values.end(), found.values.begin(), found.values.end());
        indices.insert(
            indices.end(), found.indices.begin(), found.indices.end());
        counts.data_ptr<int32_t>()[n] =
            static_cast<int32_t>(found.indices.size());
      });
  const auto total = static_cast<int64_t>(values.size());
  at::Tensor sent = made(total, at::kFloat);
  at::Tensor places = made(total, at::kInt);
  std::copy(values.begin(), values.end(), floats(sent));
  std::copy(indices.begin(), indices.end(), places.data_ptr<int32_t>());
  return {counts, sent, places};
}

// The part of the last message that is still in each parameter's residual: a low
// and a high value. Without such a tensor there is none, and none stays.
class Owed {
 public:
  Owed(
      const char* op,
      const std::optional<at::Tensor>& tensor,
      bool some,
      const Numbers& numels)
      : values_(tensor ? floats(*tensor) : nullptr),
        some_(some) {
    if (tensor) {
      check(
          op,
          "owed",
          *tensor,
          at::kFloat,
          2 * static_cast<int64_t>(numels.size()));
    } else if (some) {
      refuse(op, "owed is needed where something is");
    }
  }

  // Calls with what parameter n owes, and keeps or subtracts what comes of it.
  template <typename Pack>
  SignValues settle(size_t n, const Compensation& v, size_t count, Pack&& pack)
      const {
    if (values_ == nullptr) {
      const SignValues sent = pack(nullptr);
      if (v.residual != nullptr) {
        compress_table().subtract_signs(v.residual, count, sent);
      }
      return sent;
    }
    const SignValues before{values_[2 * n], values_[2 * n + 1]};
    const SignValues sent = pack(some_ ? &before : nullptr);
    values_[2 * n] = sent.low;
    values_[2 * n + 1] = sent.high;
    return sent;
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
  check(op, "residual", residual, at::kFloat, sum_of(op, "numels", numels));
  check(op, "owed", owed, at::kFloat, 2 * static_cast<int64_t>(numels.size()));
  float* to = floats(residual);
  const float* values = floats(owed);
  for (const int64_t numel : numels) {
    compress_table().subtract_signs(
        to, static_cast<size_t>(numel), {values[0], values[1]});
    to += numel;
    values += 2;
  }
}

// Scales of each parameter. With `owed` the residual becomes v, of which
// subtract_signs_ or the next call subtracts what is owed then; and what is owed
// before, if anything is.
Two signs(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    bool scaled,
    const std::optional<at::Tensor>& owed,
    bool owes,
    double beta,
    double gamma) {
  const Owed before("signs", owed, owes, numels);
  at::Tensor packed = bytes(total_of(numels, compress::bytes_of_signs));
  at::Tensor scales = made(static_cast<int64_t>(numels.size()), at::kFloat);
  auto* to = packed.data_ptr<uint8_t>();
  each_v(
      "signs",
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        const auto pack = [&](const SignValues* one) {
          return compress::pack_signs(
              compress_table(), v, one, count, scaled, to);
        };
        floats(scales)[n] = before.settle(n, v, count, pack).high;
        to += compress::bytes_of_signs(count);
      });
  return {packed, scales};
}

// Two means of each parameter. `owed` as there.
Two onebit(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    const std::optional<at::Tensor>& owed,
    bool owes,
    double beta,
    double gamma) {
  const Owed before("onebit", owed, owes, numels);
  at::Tensor packed = bytes(total_of(numels, compress::bytes_of_signs));
  at::Tensor means = made(2 * static_cast<int64_t>(numels.size()), at::kFloat);
  auto* to = packed.data_ptr<uint8_t>();
  each_v(
      "onebit",
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        const auto pack = [&](const SignValues* one) {
          return compress::pack_sides(compress_table(), v, one, count, to);
        };
        const SignValues values = before.settle(n, v, count, pack);
        floats(means)[2 * n] = values.low;
        floats(means)[2 * n + 1] = values.high;
        to += compress::bytes_of_signs(count);
      });
  return {packed, means};
}

// Norms of each parameter's buckets.
Two qsgd(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    int64_t levels,
    const Seeds& seeds,
    int64_t bucket_size,
    double beta,
    double gamma) {
  const char* op = "qsgd";
  check_parameters(op, "seed", seeds.size(), numels);
  const Levels with = levels_of(op, levels);
  const size_t bucket = bucket_size_of(op, bucket_size);
  const auto buckets = [&](size_t count) {
    return compress::buckets_of(bucket, count);
  };
  at::Tensor codes =
      made(sum_of(op, "numels", numels), with.wide ? at::kShort : at::kChar);
  at::Tensor norms = made(total_of(numels, buckets), at::kFloat);
  auto* to = static_cast<char*>(codes.data_ptr());
  float* norm = floats(norms);
  each_v(
      op,
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        compress::quantise(
            compress_table(), v, count, with, bucket, {seeds[n], 0}, to, norm);
        to += count * (with.wide ? 2 : 1);
        norm += buckets(count);
      });
  return {codes, norms};
}

Two terngrad(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    double clip_sigma,
    const Seeds& seeds,
    double beta,
    double gamma) {
  check_parameters("terngrad", "seed", seeds.size(), numels);
  at::Tensor packed = bytes(total_of(numels, compress::bytes_of_ternary));
  at::Tensor scales = made(static_cast<int64_t>(numels.size()), at::kFloat);
  auto* to = packed.data_ptr<uint8_t>();
  each_v(
      "terngrad",
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        floats(scales)[n] = compress::pack_ternary(
            compress_table(), v, count, clip_sigma, {seeds[n], 0}, to);
        to += compress::bytes_of_ternary(count);
      });
  return {packed, scales};
}

at::Tensor natural(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    const Seeds& seeds,
    double beta,
    double gamma) {
  check_parameters("natural", "seed", seeds.size(), numels);
  at::Tensor codes = bytes(sum_of("natural", "numels", numels));
  auto* to = codes.data_ptr<uint8_t>();
  each_v(
      "natural",
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        compress_table().natural(v, count, {seeds[n], 0}, to);
        to += count;
      });
  return codes;
}

// The elements at the first counts[0] indices of the first parameter, and so on;
// they are 0 in the residual then. With a residual all of a parameter's values
// are NaN where v is not finite everywhere: otherwise a NaN would stay until it
// is drawn, in whatever step that is.
at::Tensor pick(
    const std::optional<Tensors>& grads,
    const std::optional<at::Tensor>& residual,
    const Numbers& numels,
    const at::Tensor& indices,
    const Numbers& counts,
    double beta,
    double gamma) {
  const char* op = "pick";
  check_parameters(op, "counts", counts.size(), numels);
  const int64_t total = sum_of(op, "counts", counts);
  check(op, "indices", indices, at::kInt, total);
  at::Tensor values = made(total, at::kFloat);
  float* to = floats(values);
  const auto* index = indices.const_data_ptr<int32_t>();
  each_v(
      op,
      grads,
      residual,
      numels,
      beta,
      gamma,
      [&](size_t n, const Compensation& v, size_t count) {
        if (v.residual != nullptr && v.grad != nullptr) {
          compress_table().collect(
              v, count, 0x7fffffff, 0, nullptr, nullptr, 0);
        }
        const float* now = v.residual != nullptr ? v.residual : v.grad;
        const float factor = v.residual != nullptr ? 1 : v.gamma;
        const bool finite = v.residual == nullptr ||
            std::isfinite(default_kernels().sum_squares(
                DType::kFloat32, now, count));
        for (int64_t k = 0; k < counts[n]; ++k) {
          check_index(op, index[k], numels[n]);
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
      "fused: compress.unit.seeds: as many keys as begins");
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

std::vector<double> square_sums(const Tensors& grads, const Numbers& numels) {
  std::vector<double> found;
  each_out("square_sums", grads, numels, [&](size_t, const float* v, size_t n) {
    found.push_back(default_kernels().sum_squares(DType::kFloat32, v, n));
  });
  return found;
}

void dgc_accumulate_(
    const at::Tensor& momentum_buffer,
    const at::Tensor& velocity,
    const Tensors& grads,
    const Numbers& numels,
    double momentum,
    const Factors& gammas) {
  const char* op = "dgc_accumulate_";
  check(op, "momentum_buffer", momentum_buffer, at::kFloat, velocity.numel());
  float* u = floats(momentum_buffer);
  each_v(
      op,
      grads,
      velocity,
      numels,
      1.0,
      gammas,
      [&](size_t, const Compensation& v, size_t count) {
        compress_table().dgc_accumulate(
            u,
            v.residual,
            v.grad,
            count,
            static_cast<float>(momentum),
            v.gamma);
        u += count;
      });
}

void zero_at_(
    const at::Tensor& v,
    const Numbers& numels,
    const at::Tensor& indices,
    const Numbers& counts) {
  const char* op = "zero_at_";
  check_parameters(op, "counts", counts.size(), numels);
  check(op, "v", v, at::kFloat, sum_of(op, "numels", numels));
  check(op, "indices", indices, at::kInt, sum_of(op, "counts", counts));
  float* to = floats(v);
  const auto* index = indices.const_data_ptr<int32_t>();
  for (size_t n = 0; n < numels.size(); ++n) {
    for (int64_t k = 0; k < counts[n]; ++k) {
      check_index(op, index[k], numels[n]);
      to[index[k]] = 0;
    }
    to += numels[n];
    index += counts[n];
  }
}

// --- what comes of messages -------------------------------------------------

// counts: of each rank, how many each parameter has.
void scatter_(
    const Tensors& outs,
    const Numbers& numels,
    const std::vector<Numbers>& counts,
    const Tensors& indices,
    const Tensors& values,
    double alpha) {
  const char* op = "scatter_";
  const size_t ranks = indices.size();
  check_ranks(op, "values", values.size(), ranks);
  check_ranks(op, "counts", counts.size(), ranks);
  std::vector<compress::Picked> rest(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    check_parameters(op, "counts", counts[r].size(), numels);
    const int64_t total = sum_of(op, "counts", counts[r]);
    check(op, "indices", indices[r], at::kInt, total);
    check(op, "values", values[r], at::kFloat, total);
    rest[r].indices = indices[r].const_data_ptr<int32_t>();
    rest[r].values = values[r].const_data_ptr<float>();
  }
  std::vector<compress::Picked> next(ranks);
  each_out(op, outs, numels, [&](size_t n, float* out, size_t count) {
    const auto wrong = compress::scatter(
        out,
        count,
        ranks,
        static_cast<float>(alpha),
        next.data(),
        [&](size_t r) {
          compress::Picked mine = rest[r];
          mine.count = static_cast<size_t>(counts[r][n]);
          rest[r].indices += mine.count;
          rest[r].values += mine.count;
          return mine;
        });
    if (wrong) {
      check_index(op, *wrong, numels[n]);
    }
  });
}

// values: of each rank, a scale or two means of each parameter.
void unpack_signs_(
    const Tensors& outs,
    const Numbers& numels,
    const Tensors& packed,
    const Tensors& values,
    bool scaled,
    double alpha) {
  const char* op = "unpack_signs_";
  check_ranks(op, "values", values.size(), packed.size());
  const auto parameters = static_cast<int64_t>(numels.size());
  Parts<uint8_t> bits(
      op,
      "packed",
      packed,
      at::kByte,
      total_of(numels, compress::bytes_of_signs));
  Parts<float> means(
      op, "values", values, at::kFloat, (scaled ? 1 : 2) * parameters);
  const auto factor = static_cast<float>(alpha);
  std::vector<SignValues> found(packed.size());
  each_out(op, outs, numels, [&](size_t, float* out, size_t count) {
    for (size_t r = 0; r < found.size(); ++r) {
      const float* one = means(r);
      found[r] = scaled ? SignValues{factor * -one[0], factor * one[0]}
                        : SignValues{factor * one[0], factor * one[1]};
    }
    compress_table().unpack_signs(
        out, bits.data(), found.data(), found.size(), count);
    bits.skip(compress::bytes_of_signs(count));
    means.skip(scaled ? 1 : 2);
  });
}

void unqsgd_(
    const Tensors& outs,
    const Numbers& numels,
    const Tensors& codes,
    const Tensors& norms,
    int64_t levels,
    double alpha,
    int64_t bucket_size) {
  const char* op = "unqsgd_";
  check_ranks(op, "norms", norms.size(), codes.size());
  const Levels with = levels_of(op, levels);
  const size_t bucket = bucket_size_of(op, bucket_size);
  const auto buckets = [&](size_t count) {
    return compress::buckets_of(bucket, count);
  };
  Parts<char> code(
      op,
      "codes",
      codes,
      with.wide ? at::kShort : at::kChar,
      sum_of(op, "numels", numels));
  Parts<float> norm(op, "norms", norms, at::kFloat, total_of(numels, buckets));
  each_out(op, outs, numels, [&](size_t, float* out, size_t count) {
    compress::dequantise(
        compress_table(),
        out,
        count,
        codes.size(),
        with,
        bucket,
        static_cast<float>(alpha),
        code,
        norm);
    code.skip(count * (with.wide ? 2 : 1));
    norm.skip(buckets(count));
  });
}

void unterngrad_(
    const Tensors& outs,
    const Numbers& numels,
    const Tensors& packed,
    const Tensors& scales,
    double alpha) {
  const char* op = "unterngrad_";
  check_ranks(op, "scales", scales.size(), packed.size());
  Parts<uint8_t> codes(
      op,
      "packed",
      packed,
      at::kByte,
      total_of(numels, compress::bytes_of_ternary));
  Parts<float> scale(
      op, "scales", scales, at::kFloat, static_cast<int64_t>(numels.size()));
  each_out(op, outs, numels, [&](size_t, float* out, size_t count) {
    compress::unpack_ternary(
        compress_table(),
        out,
        count,
        packed.size(),
        static_cast<float>(alpha),
        codes,
        [&](size_t r) { return *scale(r); });
    codes.skip(compress::bytes_of_ternary(count));
    scale.skip(1);
  });
}

void unnatural_(
    const Tensors& outs,
    const Numbers& numels,
    const Tensors& codes,
    double alpha) {
  const char* op = "unnatural_";
  check_ranks(op, "codes", codes.size(), codes.size());
  Parts<uint8_t> code(
      op, "codes", codes, at::kByte, sum_of(op, "numels", numels));
  each_out(op, outs, numels, [&](size_t, float* out, size_t count) {
    compress::unpack_powers(
        compress_table(),
        out,
        count,
        codes.size(),
        static_cast<float>(alpha),
        code);
    code.skip(count);
  });
}

} // namespace

void bind(py::module_& compress) {
  py::module_ m = compress.def_submodule(
      "unit", "Kernels over all parameters of a unit of gradients.");
  const py::call_guard<py::gil_scoped_release> free;
  m.def("topk", &topk, free);
  m.def("threshold", &threshold, free);
  m.def("signs", &signs, free);
  m.def("onebit", &onebit, free);
  m.def("subtract_signs_", &subtract_signs_, free);
  m.def("qsgd", &qsgd, free);
  m.def("terngrad", &terngrad, free);
  m.def("natural", &natural, free);
  m.def("pick", &pick, free);
  m.def("seeds", &seeds, free);
  m.def("drawn", &drawn, free);
  m.def("square_sums", &square_sums, free);
  m.def("dgc_accumulate_", &dgc_accumulate_, free);
  m.def("zero_at_", &zero_at_, free);
  m.def("scatter_", &scatter_, free);
  m.def("unpack_signs_", &unpack_signs_, free);
  m.def("unqsgd_", &unqsgd_, free);
  m.def("unterngrad_", &unterngrad_, free);
  m.def("unnatural_", &unnatural_, free);
}

} // namespace fusedpg::compress_unit
