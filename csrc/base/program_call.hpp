#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/descriptor.hpp"

// A fused collective whose computation is generated code, as data: every engine
// takes it in this form.
namespace fusedpg {

struct ProgramArgs;
// `begin`: the index of the first element in the whole tensor.
using ProgramFunction =
    void (*)(const ProgramArgs* args, uint64_t begin, uint64_t count);

// Pointers are to the memory of the device that executes it.
struct ProgramCall {
  // Elements of all ranks, of this one, what is passed as it is; and of this
  // rank's rows one number each.
  enum class Operand { kFull, kPart, kAsIs, kPartOfRows };
  struct Input {
    const char* data;
    size_t element; // bytes
    Operand kind;
    size_t count = 0; // elements there
    size_t reads = 0; // of kAsIs: how many the function was made for
  };
  struct Output {
    char* data; // whole if it is gathered, else the owned slice
    size_t element;
    bool gathered;
    // Whether an input is the same memory, which is then in the cache when it
    // is written.
    bool in_place;
    bool of_rows = false; // one number a row
    bool single = false; // one number, which every rank computes
    size_t phase = 0; // in which the function writes it
  };
  ProgramFunction function = nullptr; // null: this rank has none
  uint64_t program = 0; // a hash, which all ranks must have
  DType dtype = DType::kFloat32; // of the contributions
  RedOp op = RedOp::kSum; // kSum, kMin or kMax
  const void* source = nullptr; // this rank's contribution
  size_t count = 0;
  // The function takes this for the index of the first element: the tensor may
  // be some rows of a larger one.
  uint64_t first = 0;
  // The way in which elements belong to ranks. 0: each has its shard_range.
  // Else the tensor is so many runs of equal blocks, one block for each rank in
  // every run. A block may be the first elements of a longer one in the larger
  // tensor: `spacing` is from one's first element to the next one's there.
  size_t runs = 0;
  uint64_t spacing = 0;
  // The function gets whole rows of so many elements, and memory of so many
  // bytes behind its outputs: as if that were one more. Every rank's elements
  // are whole rows, too.
  size_t row = 1;
  size_t scratch = 0;
  // Behind each phase of the function but the last, ranks combine numbers that
  // it has found of their elements: how, by phase and number. Rows have none.
  std::vector<std::vector<RedOp>> sums;
  // Values that one phase keeps of every owned element for later phases, as if
  // they were more outputs: bytes of an element.
  std::vector<size_t> kept;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<double> numbers; // alike on all ranks
  std::vector<uint64_t> seeds;
  // CUDA: a flag, 1 if this rank has no kernel; then it is set on all ranks,
  // which write nothing. Null: all are known to have one.
  float* missing = nullptr;
};

// Facts that all ranks must agree on.
OpDescriptor facts(const ProgramCall& call);

// Describes an operand that the function would read beyond its end, or as
// something else; empty if there is none.
std::string misfit(const ProgramCall& call);

// The bytes of an input or output up to an element; `first`: of the own slice.
size_t place(
    const ProgramCall::Input& input,
    size_t begin,
    size_t first,
    size_t row = 1);
size_t place(
    const ProgramCall::Output& output,
    size_t begin,
    size_t first,
    size_t row = 1);

} // namespace fusedpg
