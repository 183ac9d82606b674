#pragma once

#include <string>

namespace fusedpg {

// Two ranks whose identities are equal can share memory: same kernel, same
// process, network, user and IPC namespaces. FUSEDPG_HOST_ID replaces it.
std::string host_identity(const std::string& override_id);

// CPUs this process may run on.
int available_cpus();

} // namespace fusedpg
