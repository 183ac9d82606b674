#pragma once

#include <ATen/ATen.h>

#include "collectives/context.hpp"

namespace fusedpg {

// The sum, or mean, of all ranks' coalesced torch.sparse_coo tensors: ranks
// gather all entries, and each adds them by itself. Throws Error(kMismatch)
// where sizes, dtypes or sparse dimensions differ.
at::Tensor coo_all_reduce(Context& ctx, const at::Tensor& mine, bool mean);

// A sum of `size` ranks' tensors as their mean; integers are truncated.
at::Tensor coo_mean(const at::Tensor& sum, int size);

} // namespace fusedpg
