#pragma once

#include "cuda/launch.hpp"
#include "kernels/formulas/half.hpp"
#include "kernels/kernels.hpp"

// Everything that a GPU does by an instruction of its own, and what the host
// does instead: the tests run the kernels there (tests/fake_gpu/simt), which
// must not be kinder than a GPU.
#if defined(__CUDA_ARCH__)
#define FUSEDPG_UNROLL _Pragma("unroll")
#define FUSEDPG_NO_UNROLL _Pragma("unroll 1")
#else
#define FUSEDPG_UNROLL
#define FUSEDPG_NO_UNROLL
#endif

namespace fusedpg::cuda {

FUSEDPG_HOST_DEVICE bool is_aligned(const void* p, size_t to = 16) {
  return reinterpret_cast<uintptr_t>(p) % to == 0;
}

// Tells the compiler that `p` leads to global memory, which it cannot know of
// what comes out of a structure; aligned to `to`, or a GPU stops there.
FUSEDPG_HOST_DEVICE void assume_global(const void* p, [[maybe_unused]] int to) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#else
  if (!is_aligned(p, to)) {
    __builtin_trap();
  }
#endif
}

// 8 bytes, or a multiple of 16, from or to an address aligned to that or to 16.
template <int kBytes>
FUSEDPG_HOST_DEVICE void load_words(uint32_t* words, const char* from) {
  static_assert(kBytes == 8 || kBytes % 16 == 0);
  assume_global(from, kBytes == 8 ? 8 : 16);
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x;
    words[1] = v.y;
  }
  FUSEDPG_UNROLL
  for (int k = 0; k < kBytes / 16; ++k) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[k];
    words[4 * k] = v.x;
    words[4 * k + 1] = v.y;
    words[4 * k + 2] = v.z;
    words[4 * k + 3] = v.w;
  }
#else
  __builtin_memcpy(words, from, kBytes);
#endif
}

// In assembler, because compilers merge the stores of two branches into
// narrower ones behind them.
template <int kBytes>
FUSEDPG_HOST_DEVICE void store_words(char* to, const uint32_t* words) {
  static_assert(kBytes == 8 || kBytes % 16 == 0);
#if defined(__CUDA_ARCH__)
  const size_t global = __cvta_generic_to_global(to);
  if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(global), "r"(words[0]), "r"(words[1])
                 : "memory");
  }
  FUSEDPG_UNROLL
  for (int k = 0; k < kBytes / 16; ++k) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(global + 16 * k),
                   "r"(words[4 * k]),
                   "r"(words[4 * k + 1]),
                   "r"(words[4 * k + 2]),
                   "r"(words[4 * k + 3])
                 : "memory");
  }
#else
  assume_global(to, kBytes == 8 ? 8 : 16);
  __builtin_memcpy(to, words, kBytes);
#endif
}

template <typename T>
FUSEDPG_HOST_DEVICE T load_as(const char* from) {
  assume_global(from, sizeof(T));
  return *reinterpret_cast<const T*>(from);
}

template <typename T>
FUSEDPG_HOST_DEVICE void store_as(char* to, T value) {
  assume_global(to, sizeof(T));
  *reinterpret_cast<T*>(to) = value;
}

// For other GPUs' threads: see PeerBarrier.
FUSEDPG_HOST_DEVICE void store_release(uint64_t* to, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(to)), "l"(value)
               : "memory");
#else
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#endif
}
FUSEDPG_HOST_DEVICE uint64_t load_acquire(const uint64_t* from) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
#else
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#endif
}

// Words in the host's memory, which it looks at while kernels run.
FUSEDPG_HOST_DEVICE uint64_t ask_host(const uint64_t* flag) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile uint64_t*>(flag);
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}
// Whether the host said to stop, or an earlier kernel was late. What such a
// kernel should have left is not there, so no kernel may go on behind it.
FUSEDPG_HOST_DEVICE bool stopped(const uint64_t* stop, const uint64_t* late) {
  return ask_host(stop) != 0 || ask_host(late) != 0;
}
FUSEDPG_HOST_DEVICE void tell_host(uint64_t* flag, uint64_t value) {
#if defined(__CUDA_ARCH__)
  *static_cast<volatile uint64_t*>(flag) = value;
  __threadfence_system();
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

} // namespace fusedpg::cuda

// --- what only kernels use ---------------------------------------------------

#if defined(__CUDACC__)
#include <type_traits>

namespace fusedpg::cuda {

#define FUSEDPG_SHARED(type, name) __shared__ std::type_identity_t<type> name

// Between two looks at what another GPU has yet to write.
__device__ __forceinline__ void look_again() {}

// A store to the same place of all ranks' arenas, of a multiple of 16 bytes.
template <int kBytes>
__device__ __forceinline__ void store_words_everywhere(
    [[maybe_unused]] const PeerAccess& peers,
    [[maybe_unused]] uint64_t place,
    [[maybe_unused]] const uint32_t* words) {
  static_assert(kBytes % 16 == 0);
#if __CUDA_ARCH__ >= 900
  const size_t to = __cvta_generic_to_global(peers.multicast + place);
  FUSEDPG_UNROLL
  for (int k = 0; k < kBytes / 16; ++k) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to + 16 * k),
                   "f"(kernels::bits_to_float(words[4 * k])),
                   "f"(kernels::bits_to_float(words[4 * k + 1])),
                   "f"(kernels::bits_to_float(words[4 * k + 2])),
                   "f"(kernels::bits_to_float(words[4 * k + 3]))
                 : "memory");
  }
#endif
}

} // namespace fusedpg::cuda

#elif defined(FUSEDPG_SIMT)

namespace fusedpg::cuda {

#define FUSEDPG_SHARED(type, name) \
  auto& name = simt::shared<std::type_identity_t<type>>([] {})

inline void look_again() {
  simt::yield();
}

template <int kBytes>
void store_words_everywhere(
    const PeerAccess& peers,
    uint64_t place,
    const uint32_t* words) {
  for (int rank = 0; rank < peers.size; ++rank) {
    store_words<kBytes>(peers.arenas[rank] + place, words);
  }
}

} // namespace fusedpg::cuda
#endif
