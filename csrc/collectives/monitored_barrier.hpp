#pragma once

#include <chrono>

#include "host/domain.hpp"

namespace fusedpg {

// A barrier that names who did not come and leaves the group usable: rank 0
// waits for the others one after another (for all of them, with
// `wait_all_ranks`) and then lets them pass. Runs beside other collectives.
void monitored_barrier(
    Domain& domain,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks);

} // namespace fusedpg
