// A fused collective of generated code: its kernel, and that in a step's
// pipeline.

#include <algorithm>
#include <bit>

#include "base/ownership.hpp"
#include "cuda/device.hpp"
#include "cuda/loaded_program.hpp"
#include "cuda/run.hpp"

namespace fusedpg::cuda {
namespace {

// Besides values and numbers: the flag, the sum, and which elements.
constexpr size_t kOwnWords = 4;

size_t words_of(const ProgramCall& call) {
  return kOwnWords + call.inputs.size() + call.outputs.size() +
      call.numbers.size() + call.seeds.size();
}

} // namespace

LoadedProgram::LoadedProgram(
    const CudaApi& cuda,
    int device,
    const std::string& image,
    const std::string& entry,
    uint32_t parameters)
    : cuda_(cuda),
      device_(device),
      parameters_(parameters) {
  const DeviceScope scope(cuda_, device_);
  std::string log(2048, '\0');
  const ProgramLoadArgs args{
      image.c_str(),
      entry.c_str(),
      log.data(),
      static_cast<uint32_t>(log.size()),
      parameters};
  const int error = cuda_.program_load(&args, &kernel_);
  if (error != kSuccess) {
    fail(
        ErrorKind::kSystem,
        "fused: the GPU's driver does not take the kernel: {}; {}",
        cuda_.error_string(error),
        log.c_str());
  }
}

LoadedProgram::~LoadedProgram() {
  // Whichever thread holds it last. Of errors nothing would follow.
  int before = 0;
  cuda_.get_device(&before);
  cuda_.set_device(device_);
  cuda_.program_unload(kernel_);
  cuda_.set_device(before);
}

// The kernel over this rank's part of a chunk, which is one piece of the one
// tensor. Its parameters are listed in fusedpg/fusion/codegen_cuda.py.
void Run::launch_program(size_t t, bool reduced_here) {
  const ProgramCall& call = *task_.program;
  const Layout& layout = layout_->layout;
  const ChunkLayout& c = chunks()[t];
  if (c.num_tiles == 0) {
    return;
  }
  const ShardPiece& piece = layout.pieces[layout.tiles[c.first_tile].piece];
  const size_t first = task_.tensors[0].shard * static_cast<size_t>(e_.rank_);
  const size_t begin = first + piece.begin;
  if (begin >= call.count || task_.kernel == nullptr) {
    return;
  }
  const size_t count = std::min(piece.length, call.count - begin);
  std::vector<uint64_t> words;
  words.reserve(words_of(call));
  const auto add = [&](const void* pointer) {
    words.push_back(reinterpret_cast<uintptr_t>(pointer));
  };
  add(&device<TensorScalars>(scalars_)->skip);
  add(reduced_here ? grad_block(t, e_.rank_)
                   : static_cast<const char*>(call.source) +
              begin * dtype_size(call.dtype));
  for (const ProgramCall::Input& input : call.inputs) {
    add(input.data + place(input, begin, first));
  }
  size_t result = 0;
  for (const ProgramCall::Output& output : call.outputs) {
    const bool to_wire = output.gathered && !alone();
    add(to_wire ? param_block(t, e_.rank_, result)
                : output.data + place(output, begin, first));
    result += output.gathered ? 1 : 0;
  }
  for (const double number : call.numbers) {
    words.push_back(std::bit_cast<uint64_t>(number));
  }
  words.insert(words.end(), call.seeds.begin(), call.seeds.end());
  words.push_back(call.first + begin);
  words.push_back(count);
  ProgramLaunchArgs args{};
  args.program = task_.kernel->kernel();
  args.words = words.data();
  args.num_words = static_cast<uint32_t>(words.size());
  args.count = count;
  check("cuLaunchKernel", cuda_.program_launch(&args, compute_));
}

CudaEngine::OperationPtr CudaEngine::fused_program(
    const ProgramCall& call,
    const std::shared_ptr<const LoadedProgram>& kernel,
    const Submission& submission) {
  // Before anything is enqueued: the driver would end the group, or read
  // whatever follows the words.
  if (kernel && kernel->device() != device_) {
    fail(
        ErrorKind::kInvalid,
        "fused: fused_program: the kernel was loaded for GPU {}, but rank {} "
        "of this group works on GPU {}; load it with a tensor on that GPU",
        kernel->device(),
        rank_,
        device_);
  }
  if (kernel && kernel->parameters() != words_of(call)) {
    fail(
        ErrorKind::kInvalid,
        "fused: fused_program: the kernel has {} parameters, but the call "
        "gives {}: {} operands, {} results, {} numbers, {} seeds and periods, "
        "and {} of every kernel; pass what the kernel's own source lists",
        kernel->parameters(),
        words_of(call),
        call.inputs.size(),
        call.outputs.size(),
        call.numbers.size(),
        call.seeds.size(),
        kOwnWords);
  }
  const std::string wrong = misfit(call);
  if (!wrong.empty()) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}, on rank {}: {}",
        describe(facts(call)),
        rank_,
        wrong);
  }
  Task task(call, size_);
  task.kernel = kernel.get();
  if (kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    programs_.insert(kernel);
  }
  return submit(task, submission);
}

} // namespace fusedpg::cuda
