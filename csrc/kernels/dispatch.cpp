#include "kernels/tables.hpp"

#include <cstring>

namespace fusedpg::kernels {

namespace {

struct Candidate {
  const Table* table;
  bool (*runs)();
};

// Best first. The F16C check belongs to AVX2: both wide builds convert halves
// in hardware.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {&detail::avx512_table,
     [] {
       return __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
     }},
    {&detail::avx2_table,
     [] {
       return __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
     }},
    // The floor the whole library is compiled for.
    {&detail::x86_64_v2_table, [] { return true; }},
#else
    {&detail::generic_table, [] { return true; }},
#endif
};

} // namespace

const Table* table(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Candidate& candidate : kCandidates) {
    if (name != nullptr && std::strcmp(name, candidate.table->name) != 0) {
      continue;
    }
    if (candidate.runs()) {
      return candidate.table;
    }
  }
  return nullptr;
}

} // namespace fusedpg::kernels
