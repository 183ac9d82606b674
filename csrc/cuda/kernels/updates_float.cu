#include "cuda/kernels/updates.cuh"

namespace fusedpg::cuda {

int launch_update_float(const UpdateArgs* args, Stream stream) {
  return launch_update<float>(args, stream);
}

int launch_moments_float(const MomentsArgs* args, Stream stream) {
  return launch_moments<float>(args, stream);
}

} // namespace fusedpg::cuda
