#pragma once

#include <string>
#include <vector>

#include "collectives/way.hpp"

// A reduce-scatter, a generated function on the owned slice, and all-gathers of
// its results as one collective.
namespace fusedpg {

// What a generated function gets (fusedpg/fusion/codegen_text.py has the same
// text). All pointers are to the first of `count` elements, but for operands
// that are passed as they are.

// Where a result goes: to all places. It may be computed in the first of them,
// or is in tiles that are then written to all, around the cache if `stream`.
struct ProgramOutput {
  void* const* to;
  uint64_t num;
  uint32_t direct;
  uint32_t stream; // also what is written to the other places of a direct one
};
struct ProgramArgs {
  // Every rank's contribution, in rank order; or, with num_sources 0, one
  // pointer to the reduced values in the wide type.
  const void* const* sources;
  uint64_t num_sources;
  const void* const* inputs; // operands
  const ProgramOutput* outputs;
  const double* numbers;
  const uint64_t* seeds;
};
// A function takes contributions of at most so many ranks.
constexpr size_t kMostProgramSources = 8;
// `begin`: the index of the first element in the whole tensor.
using ProgramFunction =
    void (*)(const ProgramArgs* args, uint64_t begin, uint64_t count);

struct ProgramCall {
  enum class Operand { kFull, kPart, kAsIs };
  struct Input {
    const char* data;
    size_t element; // bytes
    Operand kind;
  };
  struct Output {
    char* data; // whole if it is gathered, else the owned slice
    size_t element;
    bool gathered;
    // Whether an input is the same memory, which is then in the cache when it
    // is written.
    bool in_place;
  };
  ProgramFunction function = nullptr; // null: this rank has none
  uint64_t program = 0; // a hash, which all ranks must have
  DType dtype = DType::kFloat32; // of the contributions
  RedOp op = RedOp::kSum; // kSum, kMin or kMax
  const void* source = nullptr; // this rank's contribution
  size_t count = 0;
  // What the function takes for the index of the first element: these may be
  // some rows of a larger tensor.
  uint64_t first = 0;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<double> numbers; // alike on all ranks
  std::vector<uint64_t> seeds;
};

// Whether it has been done: not where a rank has no function, and then nothing
// has been written on any.
bool fused_program(Way& way, const ProgramCall& call);

} // namespace fusedpg
