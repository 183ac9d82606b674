// Fused functions on GPUs: their kernels, and calls of them.

#include "c10d/cuda_group.hpp"
#include "cuda/device.hpp"

namespace fusedpg {

WorkPtr CudaGroup::fused_program(
    ProgramArguments arguments,
    const char* title,
    std::chrono::milliseconds timeout,
    bool async_op) {
  const auto a = std::make_shared<const ProgramArguments>(std::move(arguments));
  ProgramCall call = to_engine(*a, rank_, size_);
  call.kernel = reinterpret_cast<void*>(a->function);
  call.missing =
      a->done.numel() == 0 ? nullptr : static_cast<float*>(a->done.data_ptr());
  return submit(
      a->source,
      title,
      timeout,
      async_op,
      a->outputs,
      std::make_shared<std::shared_ptr<const ProgramArguments>>(a),
      [&](cuda::CudaEngine& engine,
          const cuda::CudaEngine::Submission& submission) {
        return Operations{engine.fused_program(call, submission)};
      },
      nullptr);
}

int CudaGroup::program_architecture(const at::Tensor& tensor) {
  const cuda::CudaApi& api = cuda_api();
  const cuda::DeviceScope scope(
      api, CudaStreams(tensor.device(), pretend_).index());
  int number = 0;
  cuda::check(api, "cudaDeviceGetAttribute", api.architecture(&number));
  return number;
}

uint64_t CudaGroup::load_program(
    const std::string& image,
    const std::string& entry,
    uint32_t parameters,
    const at::Tensor& tensor) {
  const cuda::CudaApi& api = cuda_api();
  const cuda::DeviceScope scope(
      api, CudaStreams(tensor.device(), pretend_).index());
  std::string log(2048, '\0');
  const cuda::ProgramLoadArgs args{
      image.c_str(),
      entry.c_str(),
      log.data(),
      static_cast<uint32_t>(log.size()),
      parameters};
  void* program = nullptr;
  const int error = api.program_load(&args, &program);
  if (error != cuda::kSuccess) {
    fail(
        ErrorKind::kSystem,
        "fused: the GPU's driver does not take the kernel: {}; {}",
        api.error_string(error),
        log.c_str());
  }
  return reinterpret_cast<uint64_t>(program);
}

} // namespace fusedpg
