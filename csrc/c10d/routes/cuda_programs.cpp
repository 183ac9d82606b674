// Fused functions on GPUs: their kernels, and calls of them.

#include <map>
#include <tuple>

#include "c10d/gil.hpp"
#include "c10d/routes/cuda.hpp"
#include "cuda/device.hpp"

namespace fusedpg {
namespace {

// Equal ones are one, also those that only groups hold: programs that come and
// go would fill the GPU's memory.
struct LoadedPrograms {
  using Key =
      std::tuple<const cuda::CudaApi*, int, std::string, std::string, uint32_t>;
  std::mutex mutex;
  std::map<Key, std::weak_ptr<cuda::LoadedProgram>> programs;
};
LoadedPrograms& loaded() {
  static auto* made =
      new LoadedPrograms; // its users may outlive static objects
  return *made;
}

} // namespace

WorkPtr CudaRoute::fused_program_(ProgramArguments arguments, bool async_op) {
  constexpr const char* title = "fused:fused_program";
  check_fused(title);
  const bool known = arguments.done.numel() == 0;
  TORCH_CHECK_VALUE(
      arguments.function == nullptr,
      "fused: fused_program: an address is a CPU's function; on a GPU pass "
      "what load_program() gave");
  TORCH_CHECK_VALUE(
      arguments.layout.runs == 0,
      "fused: fused_program: on a GPU a rank's elements are its shard_range");
  TORCH_CHECK_VALUE(
      arguments.layout.row == 1,
      "fused: fused_program: no kernel takes whole rows");
  TORCH_CHECK_VALUE(
      std::get<0>(arguments.phases).empty(),
      "fused: fused_program: no kernel has several phases");
  TORCH_CHECK_VALUE(
      known ? arguments.kernel != nullptr
            : arguments.done.scalar_type() == at::kFloat &&
              arguments.done.device() == arguments.source.device(),
      "fused: fused_program: `done` must be one float32 on the GPU");
  TORCH_CHECK_VALUE(
      known || !CudaStreams(arguments.source.device(), pretend_).capturing(),
      "fused: the first call of a fused function finds out whether all ranks "
      "have compiled it, which a graph cannot hold; call it once before the "
      "capture");
  group_.stats.add(OpCode::kFusedProgram, DataPath::kStaged, {});
  const auto a = std::make_shared<const ProgramArguments>(std::move(arguments));
  ProgramCall call = to_engine(*a, rank_, size_);
  call.missing = known ? nullptr : static_cast<float*>(a->done.data_ptr());
  return submit(
      a->source,
      title,
      async_op,
      a->outputs,
      std::make_shared<std::shared_ptr<const ProgramArguments>>(a),
      [&](auto& engine, const auto& submission) {
        return Operations{engine.fused_program(call, a->kernel, submission)};
      },
      nullptr);
}

int CudaRoute::program_architecture(const at::Tensor& tensor) {
  const cuda::CudaApi& api = cuda_api();
  const cuda::DeviceScope scope(
      api, CudaStreams(tensor.device(), pretend_).index());
  int number = 0;
  cuda::check(api, "cudaDeviceGetAttribute", api.architecture(&number));
  return number;
}

std::shared_ptr<cuda::LoadedProgram> CudaRoute::load_program(
    const std::string& image,
    const std::string& entry,
    uint32_t parameters,
    const at::Tensor& tensor) {
  const cuda::CudaApi& api = cuda_api();
  const int device = CudaStreams(tensor.device(), pretend_).index();
  LoadedPrograms& all = loaded();
  const LoadedPrograms::Key key{&api, device, image, entry, parameters};
  const auto find = [&]() -> std::shared_ptr<cuda::LoadedProgram> {
    const auto at = all.programs.find(key);
    return at == all.programs.end() ? nullptr : at->second.lock();
  };
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (auto known = find()) {
      return known;
    }
  }
  // Without the lock: the driver takes its time, and the deleter, which an
  // exception here would run, locks.
  auto made = std::make_unique<cuda::LoadedProgram>(
      api, device, image, entry, parameters);
  std::shared_ptr<cuda::LoadedProgram> shared(
      made.release(), [key](cuda::LoadedProgram* ending) {
        // The driver may wait for the GPU before it unloads; others go on.
        const ReleaseGil release;
        delete ending;
        LoadedPrograms& all = loaded();
        const std::lock_guard<std::mutex> lock(all.mutex);
        const auto at = all.programs.find(key);
        if (at != all.programs.end() && at->second.expired()) {
          all.programs.erase(at);
        }
      });
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (auto known = find()) { // by another thread meanwhile; ours ends unlocked
    return known;
  }
  all.programs[key] = shared;
  return shared;
}

} // namespace fusedpg
