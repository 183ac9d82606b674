#pragma once

#include <cstdint>

#include <functional>
#include <type_traits>

// A GPU on the CPU: the threads of a block are fibers, which run until they
// meet the others of their block, and then one of all that may go on does,
// by chance. Random numbers come from FUSEDPG_FAKE_SEED. What a GPU leaves
// undefined ends the process: a barrier that not all threads come to, lanes at
// different instructions, vectors that are not aligned (ptx.hpp).
#define FUSEDPG_SIMT

struct cudaLaunchConfig_t;

namespace fusedpg::simt {

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> run);
// While it lives, launches of this thread run at once, on no stream, as `most`
// blocks if they are to be more.
class AtOnce {
 public:
  explicit AtOnce(unsigned most);
  ~AtOnce();
  AtOnce(const AtOnce&) = delete;
};

// Between two looks at what another rank has yet to write: others run.
void yield();
// Waits for all threads of the block; whether all said so.
bool meet_block(bool vote);
void* shared(const void* key, size_t bytes);

// One T of the calling thread's block, with noise in it; of each call's place.
template <typename T, typename Place>
T& shared(Place /* place */) {
  static_assert(std::is_trivially_default_constructible_v<T>);
  static const char key = 0;
  return *static_cast<T*>(shared(&key, sizeof(T)));
}

} // namespace fusedpg::simt

namespace simt = fusedpg::simt;

// Of the fiber that runs.
#define FUSEDPG_OF_THREAD \
  extern constinit thread_local __attribute__((tls_model("initial-exec")))
FUSEDPG_OF_THREAD dim3 threadIdx;
FUSEDPG_OF_THREAD dim3 blockIdx;
FUSEDPG_OF_THREAD dim3 blockDim;
FUSEDPG_OF_THREAD dim3 gridDim;

inline void __syncthreads() {
  simt::meet_block(true);
}
inline int __syncthreads_and(int vote) {
  return simt::meet_block(vote != 0) ? 1 : 0;
}
