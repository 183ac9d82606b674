#pragma once

#include <memory>

#include "net/ucx_worker.hpp"

namespace fusedpg {

// Ends a worker once what was sent is on its way, or after `farewell`. Peers may
// be busy with other things, for which this rank must not wait: what takes
// longer than a moment goes on on a thread, which the process' end waits for.
// Nobody's memory but UCX's own is used when this returns.
void leave(
    std::unique_ptr<UcxWorker> worker,
    const Deadline& farewell) noexcept;

} // namespace fusedpg
