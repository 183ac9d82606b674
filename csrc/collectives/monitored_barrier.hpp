#pragma once

#include <chrono>

#include "host/domain.hpp"
#include "messages/net_mailbox.hpp"

namespace fusedpg {

// A barrier that names who did not come and leaves the group usable: rank 0
// waits for the others one after another (for all of them, with
// `wait_all_ranks`) and then lets them pass. Runs beside other collectives.
void monitored_barrier(
    Domain& domain,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks);

// The same between machines. `number` counts the calls of a group, which meet
// by it; messages of users have tags from 0 on.
void monitored_barrier(
    NetMailbox& messages,
    int rank,
    int size,
    uint32_t number,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks);

} // namespace fusedpg
