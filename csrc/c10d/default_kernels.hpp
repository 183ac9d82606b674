#pragma once

#include "kernels/kernels.hpp"

namespace fusedpg {

// The kernels of calls without a group, as a group of this process has them:
// the best, or those of FUSEDPG_ISA. ValueError where there are none.
const kernels::Table& default_kernels();

} // namespace fusedpg
