#pragma once

#include <ATen/ATen.h>

#include "collectives/way.hpp"

namespace fusedpg {

// The sum, or mean, of all ranks' coalesced torch.sparse_coo tensors: ranks
// gather all entries, and each adds them by itself. Throws Error(kMismatch)
// where sizes, dtypes or sparse dimensions differ.
//
// Between hosts, groups that have aggregators gather the coordinates, and add
// the values of fp64, fp32, int64 and int32 by blocks, to the same bits.
at::Tensor coo_all_reduce(Way& way, const at::Tensor& mine, bool mean);

} // namespace fusedpg
