#pragma once

#include "base/program_call.hpp"
#include "collectives/way.hpp"

// A reduce-scatter, a generated function on the owned slice, and all-gathers of
// its results as one collective.
namespace fusedpg {

// What a generated function gets (fusedpg/fusion/generated/program.h has the
// same text). All pointers are to the first of `count` elements, but for operands
// that are passed as they are, and to the number of its row for what has one of
// each.

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
  // A function has as many phases as ProgramCall says. Only the first one gets
  // sources.
  uint64_t phase;
  // Where the phase puts what it finds of each kProgramBlock elements: so many
  // numbers a block as ranks combine after it.
  double* sums;
  // What all ranks' numbers of earlier phases came to. A call of no elements
  // writes the outputs that are computed from them and single numbers alone.
  const double* totals;
};
// A function that has sums gets blocks of so many elements, counted from the
// begin of the owned slice; only the last one may be shorter.
constexpr size_t kProgramBlock = 1024;
// A function takes contributions of at most so many ranks.
constexpr size_t kMostProgramSources = 8;

// Whether it has been done: not where a rank has no function, and then nothing
// has been written on any.
bool fused_program(Way& way, const ProgramCall& call);

} // namespace fusedpg
