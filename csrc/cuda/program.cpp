// A fused collective of generated code: its kernel in a step's pipeline.

#include <algorithm>
#include <bit>

#include "base/ownership.hpp"
#include "cuda/run.hpp"

namespace fusedpg::cuda {

// The kernel over this rank's part of a chunk, which is one piece of the one
// tensor. Its parameters are listed in fusedpg/fusion/codegen_cuda.py.
void Run::launch_program(size_t t, bool reduced_here) {
  const ProgramCall& call = *task_.program;
  const Layout& layout = layout_->layout;
  const ChunkLayout& c = chunks()[t];
  const ShardPiece& piece = layout.pieces[layout.tiles[c.first_tile].piece];
  const size_t first = task_.tensors[0].shard * static_cast<size_t>(e_.rank_);
  const size_t begin = first + piece.begin;
  if (begin >= call.count || call.kernel == nullptr) {
    return;
  }
  const size_t count = std::min(piece.length, call.count - begin);
  std::vector<uint64_t> words;
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
    const bool to_wire = output.gathered && !alone() && !c.whole;
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
  args.program = call.kernel;
  args.words = words.data();
  args.num_words = static_cast<uint32_t>(words.size());
  args.count = count;
  check("cuLaunchKernel", cuda_.program_launch(&args, compute_));
}

CudaEngine::OperationPtr CudaEngine::fused_program(
    const ProgramCall& call,
    const Submission& submission) {
  return submit(Task(call, size_), submission);
}

} // namespace fusedpg::cuda
