#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/call.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

DType to_dtype(at::ScalarType type);

// The operation that functional collectives call by a name, such as "sum". Throws
// ValueError for other names.
c10d::ReduceOp reduction_named(std::string_view name);

// The factor of a PREMUL_SUM.
const c10d::NCCLPreMulSumSupplement& premul_of(const c10d::ReduceOp& op);

kernels::ReduceArgs to_reduce_args(
    const c10d::ReduceOp& op,
    at::ScalarType type,
    int world_size);

// Throws ValueError unless `t` is a dense CPU tensor; `op` is torch's name.
void check_tensor(const char* op, const at::Tensor& t);
// The same on any device.
void check_dense(const char* op, const at::Tensor& t);

// check_tensor() of all, which must have this type.
void check_same_type(
    const char* op,
    const std::vector<at::Tensor>& tensors,
    at::ScalarType type);
// Throws ValueError unless all have the first one's sizes and dtype.
void check_alike(const char* op, const std::vector<at::Tensor>& tensors);

// Of a tensor with these sizes. ValueError where there can be none.
size_t checked_bytes(at::IntArrayRef sizes, const at::TensorOptions& options);

// A tensor as the engine and Gloo want it: contiguous. A tensor that is not is
// copied, and copied back by finish() if it was an output; so is one that is to
// be `apart`, in memory of its own until then.
class Flat {
 public:
  static Flat input(const at::Tensor& t);
  // Throws ValueError when elements of `t` share memory.
  static Flat output(const at::Tensor& t, bool apart = false);
  // For operations that treat all elements alike: elements that share memory
  // have one value before, and one after.
  static Flat inout(const at::Tensor& t, bool apart = false);

  // What `this` holds, contiguous.
  const at::Tensor& tensor() const {
    return flat_;
  }
  Buffer buffer() const;
  void finish() const;
  // Copies what this holds to another tensor of as many elements.
  void give(const at::Tensor& to) const;

 private:
  Flat(at::Tensor original, at::Tensor flat, bool copy_back)
      : original_(std::move(original)),
        flat_(std::move(flat)),
        copy_back_(copy_back) {}

  at::Tensor original_;
  at::Tensor flat_;
  bool copy_back_;
};

std::vector<Flat> flat_inputs(const std::vector<at::Tensor>& tensors);
std::vector<Flat> flat_outputs(
    const std::vector<at::Tensor>& tensors,
    bool apart = false);
// Those of one reduction in place, apart if they share memory.
std::vector<Flat> flat_inouts(const std::vector<at::Tensor>& tensors);

// What the outputs of an operation need so that its result is that of reading
// all inputs before the first output is written, then writing the outputs in
// order: to be apart where they share memory with one another or an input.
// Memory counts from a tensor's first element to its last. This rank's input
// may be this rank's output, where the lists have one for each rank.
constexpr int kNoRank = -1; // none may
bool need_apart(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    int rank);
// The same for one tensor that holds this rank's part of another or is apart
// from it.
bool need_apart(const at::Tensor& whole, const at::Tensor& part, int rank);

// The left fold of alike tensors of this rank, which is its contribution to a
// reduction of several tensors together. One tensor is that tensor.
Flat folded(
    const kernels::Table& kernels,
    const std::vector<at::Tensor>& tensors,
    const kernels::ReduceArgs& args);
DType dtype_of(const Flat& flat);
std::vector<Buffer> buffers(const std::vector<Flat>& tensors);
void finish(const std::vector<Flat>& tensors);

// A tensor's slices along the first dimension, for `num` ranks: `splits` rows
// each, or equal parts.
std::vector<Buffer> slices(
    const Flat& whole,
    int num,
    const std::vector<int64_t>& splits = {});

} // namespace fusedpg
