#pragma once

#include <string>
#include <vector>

#include "collectives/way.hpp"

// A reduce-scatter, a generated function on the owned slice, and all-gathers of
// its results as one collective.
namespace fusedpg {

// What a generated function gets (fusedpg/fusion/codegen.py has the same text).
// All pointers are to the first of `count` elements, but for operands that are
// passed as they are.
struct ProgramArgs {
  const void* const* inputs; // the reduced values in the wide type, operands
  void* const* outputs;
  const double* numbers;
  const uint64_t* seeds;
};
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
    // Of a gathered one: whether an input is the same memory, which has been
    // read when it is written.
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
