// The update kernels against the memory: each beside a plain vector loop that
// reads and writes the same streams and computes next to nothing, in turn, on
// one thread. Build and run: make bench-kernels

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <immintrin.h>

#include "kernels/kernels.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::kernels;

constexpr size_t kCount =
    12'500'000 / 64 * 64; // a rank's slice of 100 MB at P=2
constexpr int kRounds = 15;

using Buffer = std::unique_ptr<float, void (*)(void*)>;

Buffer buffer(float value) {
  const size_t count = kCount + 1024; // for what begins off its start
  auto* base =
      static_cast<float*>(std::aligned_alloc(4096, count * sizeof(float)));
  std::fill(base, base + count, value);
  return {base, &std::free};
}

// Lines are read, added and written; `streamed` goes around the cache.
struct Streams {
  std::vector<const float*> reads;
  std::vector<float*> updates; // read and written
  std::vector<float*> streamed;
};

template <size_t kReads, size_t kUpdates, size_t kStreamed>
void plain(const Streams& s, size_t n) {
  const float* r[kReads + 1];
  float* u[kUpdates + 1];
  float* w[kStreamed + 1];
  std::copy_n(s.reads.begin(), kReads, r);
  std::copy_n(s.updates.begin(), kUpdates, u);
  std::copy_n(s.streamed.begin(), kStreamed, w);
  for (size_t i = 0; i < n; i += 16) {
    __m512 sum = _mm512_loadu_ps(r[0] + i);
    for (size_t k = 1; k < kReads; ++k) {
      sum = _mm512_add_ps(sum, _mm512_loadu_ps(r[k] + i));
    }
    for (size_t k = 0; k < kUpdates; ++k) {
      _mm512_storeu_ps(u[k] + i, _mm512_add_ps(_mm512_loadu_ps(u[k] + i), sum));
    }
    for (size_t k = 0; k < kStreamed; ++k) {
      _mm512_stream_ps(w[k] + i, sum);
    }
  }
  _mm_sfence();
}

// Reads a span and keeps nothing.
void plain_read(const float* from, size_t n) {
  __m512i any[4] = {};
  for (size_t i = 0; i < n; i += 64) {
    for (size_t k = 0; k < 4; ++k) {
      any[k] = _mm512_or_si512(any[k], _mm512_loadu_si512(from + i + 16 * k));
    }
  }
  any[0] = _mm512_or_si512(
      _mm512_or_si512(any[0], any[1]), _mm512_or_si512(any[2], any[3]));
  volatile int64_t sink = _mm512_reduce_or_epi64(any[0]);
  (void)sink;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double seconds(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  return took.count();
}

void compare(
    const char* name,
    const std::function<void()>& kernel,
    const std::function<void()>& loop,
    double bytes) {
  std::vector<double> ours, limit;
  kernel();
  loop();
  for (int i = 0; i < kRounds; ++i) {
    ours.push_back(seconds(kernel));
    limit.push_back(seconds(loop));
  }
  std::printf(
      "%-28s %6.1f GB/s   plain loop %6.1f GB/s   ratio %.2f\n",
      name,
      bytes / median(ours) * 1e-9,
      bytes / median(limit) * 1e-9,
      median(limit) / median(ours));
}

} // namespace

int main(int argc, char** argv) {
  const Table* table = kernels::table(argc > 1 ? argv[1] : nullptr);
  if (table == nullptr || !__builtin_cpu_supports("avx512f")) {
    std::puts("needs AVX-512 for the plain loop, or no such table");
    return 1;
  }
  std::printf("kernels: %s, %zu elements\n", table->name, kCount);
  const Buffer param = buffer(1), grad0 = buffer(0.25), grad1 = buffer(0.5),
               exp_avg = buffer(0.01), exp_avg_sq = buffer(0.01),
               replica = buffer(1);
  float* p = param.get();
  // As in fusedpg.optim: streams that advance together at the same place of
  // their pages slow each other down.
  float* m = exp_avg.get() + 256;
  float* v = exp_avg_sq.get() + 512;

  UpdateArgs a;
  a.grad_factor = 0.5;
  a.adam = {0.9999, 0, 0.9, 0.1, 0.999, 0.001, 1e-8, 1e-3, 0.5, true, false};
  a.sgd = {1e-3, 1e-2, 0.9, 1, false, false};
  a.lamb = {0.9, 0.1, 0.999, 0.001, 1e-6, 2, 2, 0.01, 1e-3};
  void* outs[] = {p, replica.get()};
  const void* grads[] = {grad0.get(), grad1.get()};
  UpdateSpans s;
  s.params_out = outs;
  s.num_out = 2;
  s.param = p;
  s.grads = grads;
  s.num_grads = 2;
  s.state[0] = m;
  s.state[1] = v;
  s.count = kCount;
  s.stream = true;

  const Streams three{{grad0.get(), grad1.get()}, {p, m, v}, {replica.get()}};
  const Streams two{{grad0.get(), grad1.get()}, {p, m}, {replica.get()}};
  const double bytes = kCount * sizeof(float);
  compare(
      "AdamW float32, 2 ranks",
      [&] { table->update(a, s); },
      [&] { plain<2, 3, 1>(three, kCount); },
      9 * bytes);
  a.formula = Formula::kSgd;
  compare(
      "SGD momentum float32, 2 ranks",
      [&] { table->update(a, s); },
      [&] { plain<2, 2, 1>(two, kCount); },
      7 * bytes);
  a.formula = Formula::kLamb;
  std::vector<double> sums(2 * (kCount / kSumBlock + 1));
  const Streams moments{{grad0.get(), grad1.get(), p}, {m, v}, {}};
  compare(
      "LAMB first half, 2 ranks",
      [&] { table->lamb_moments(a, s, sums.data()); },
      [&] { plain<3, 2, 0>(moments, kCount); },
      7 * bytes);
  const Streams second{{m, v}, {p}, {replica.get()}};
  compare(
      "LAMB second half, 2 ranks",
      [&] { table->update(a, s); },
      [&] { plain<2, 1, 1>(second, kCount); },
      5 * bytes);
  // The same bytes with elements of twice the size.
  a.formula = Formula::kAdam;
  s.param_type = s.grad_type = s.state_type = DType::kFloat64;
  s.count = kCount / 2;
  for (float* one : {p, m, v, grad0.get(), grad1.get()}) {
    auto* wide = reinterpret_cast<double*>(one);
    std::fill(wide, wide + kCount / 2, 0.5);
  }
  compare(
      "AdamW float64, 2 ranks",
      [&] { table->update(a, s); },
      [&] { plain<2, 3, 1>(three, kCount); },
      9 * bytes);
  // All zeros, so that no block ends the search early.
  std::fill(p, p + kCount, 0.0F);
  for (const size_t block : {32, 256, 65536}) {
    std::vector<uint64_t> bits(kCount / block / 64 + 1);
    const std::string name = "blocks of " + std::to_string(block);
    compare(
        name.c_str(),
        [&] { table->find_blocks(p, kCount * 4, block * 4, bits.data()); },
        [&] { plain_read(p, kCount); },
        bytes);
  }
  return 0;
}
