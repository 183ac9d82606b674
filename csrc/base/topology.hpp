#pragma once

#include <string>

namespace fusedpg {

// Two ranks whose identities are equal can share memory: same kernel, same
// process, network and user namespaces. FUSEDPG_HOST_ID replaces it.
std::string host_identity(const std::string& override_id);

// For people.
std::string host_name();

// The CPUs this process may run on, as a string of '0' and '1'.
std::string cpu_mask();
// How many they are.
int available_cpus();

} // namespace fusedpg
