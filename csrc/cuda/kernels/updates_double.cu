#include "cuda/kernels/updates.cuh"

namespace fusedpg::cuda {

int launch_update_double(const UpdateArgs* args, Stream stream) {
  return launch_update<double>(args, stream);
}

int launch_moments_double(const MomentsArgs* args, Stream stream) {
  return launch_moments<double>(args, stream);
}

} // namespace fusedpg::cuda
