#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.hpp"
#include "base/hash.hpp"
#include "base/op_code.hpp"

namespace fusedpg {

constexpr uint64_t kNotInArena = ~uint64_t(0);

// A rank's facts about an operation, which it publishes when it enters it. Two
// cache lines in shared memory; peers compare everything above `flags` with
// their own.
struct alignas(64) OpDescriptor {
  uint64_t sequence = 0;
  OpCode op = OpCode::kNone;
  DType dtype = DType::kOpaque;
  RedOp red_op = RedOp::kSum;
  GpuPath path = GpuPath::kNone;
  int32_t root = -1;
  DType grad_type = DType::kOpaque; // of optimizer steps
  DType state_type = DType::kOpaque;
  uint16_t options = 0; // a set of CallOption
  uint32_t block = 0; // elements of blocks whose zeros are skipped; 0: none are
  uint64_t count = 0; // elements, over all tensors of the call
  uint64_t items = 1; // tensors
  uint64_t list_index = 0; // of this operation among those of one call
  uint64_t list_length = 1;
  uint64_t shape_hash = 0; // of what `count` does not tell
  uint64_t value_hash = 0; // hyperparameters
  // The number, on the group, of the asynchronous call of a fused function that
  // this is a part of. 0: of none.
  uint64_t async_call = 0;
  // Facts that may differ from rank to rank.
  uint64_t flags = 0;
  uint64_t table_entries = 0;
  double weight = 1; // of this rank's contribution to a weighted mean
};

// Bits of OpDescriptor::options.
enum CallOption : uint16_t {
  kWeighted = 1,
  kUsedFlags = 2, // says which tensors were used
  kMasters = 4,
  kFollow = 8, // masters follow parameters
  kReducedGrads = 16,
  kSharedParams = 32,
  kMayGoDense = 64, // skips blocks of zeros only while they are many
  kGradScale = 128, // on a device, where its value is not looked at
  kFirstCall = 256, // of a program on a GPU: whether all ranks have a kernel
};

// Sets of bits in OpDescriptor::flags.
constexpr uint64_t kReadsDirect = 1; // all inputs lie in this rank's arena
constexpr uint64_t kWritesDirect = 2; // all outputs lie in this rank's arena
constexpr uint64_t kStaged = 4; // the input is already in the staging buffer
constexpr uint64_t kFoundInf = 8; // skip the update
constexpr uint64_t kHasNan = 16; // found by the NaN check
constexpr uint64_t kNoFunction = 64; // this rank has no generated code
constexpr uint64_t kRefused = 32; // this rank cannot take part; see reason

// "all_reduce(SUM, float32, 1024 elements)"
std::string describe(const OpDescriptor& d);

// The first difference that makes two descriptors incompatible, as
// "dtype float32 here, float64 there"; empty when they agree.
std::string difference(const OpDescriptor& here, const OpDescriptor& there);

// Hash of the fields that difference() compares, without the sequence number
// and the place in a list.
uint64_t hash_of(const OpDescriptor& d);

// Throw what every rank throws where two disagree, and where the NaN check has
// found something.
void check_agreement(
    const OpDescriptor& here,
    int rank,
    const OpDescriptor& there,
    int peer);
void check_nan_flag(const OpDescriptor& there, int peer);
[[noreturn]] void fail_refused(
    const OpDescriptor& here,
    int rank,
    int peer,
    const std::string& reason);

// Throws where a rank has refused to take part, two disagree, or one has found a
// NaN: the same on all ranks, which look at all of `said` in this order.
template <typename Said, typename Reason>
void check_said(
    const OpDescriptor& here,
    int rank,
    int size,
    const Said& said,
    const Reason& reason_of) {
  for (int p = 0; p < size; ++p) {
    if ((said(p).flags & kRefused) != 0) {
      fail_refused(here, rank, p, reason_of(p));
    }
  }
  for (int p = 0; p < size; ++p) {
    check_agreement(here, rank, said(p), p);
  }
  for (int p = 0; p < size; ++p) {
    check_nan_flag(said(p), p);
  }
}

} // namespace fusedpg
