#pragma once

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.hpp"
#include "collectives/collectives.hpp"

namespace fusedpg {

DType to_dtype(at::ScalarType type);

kernels::ReduceArgs to_reduce_args(
    const c10d::ReduceOp& op,
    at::ScalarType type,
    int world_size);

// Throws ValueError unless `t` is a dense CPU tensor; `op` is torch's name.
void check_tensor(const char* op, const at::Tensor& t);
// The same on any device.
void check_dense(const char* op, const at::Tensor& t);

// A tensor as the engine wants it: contiguous. A tensor that is not is copied,
// and copied back by finish() if it was an output.
class Flat {
 public:
  static Flat input(const at::Tensor& t);
  static Flat output(const at::Tensor& t);
  static Flat inout(const at::Tensor& t);

  Span span() const;
  ReduceTensor reduce_tensor() const;
  void finish() const;

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
std::vector<Flat> flat_outputs(const std::vector<at::Tensor>& tensors);
std::vector<Span> spans(const std::vector<Flat>& tensors);
std::vector<ReduceTensor> reduce_tensors(const std::vector<Flat>& tensors);
void finish(const std::vector<Flat>& tensors);

} // namespace fusedpg
