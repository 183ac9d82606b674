#pragma once

#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/deadline.hpp"
#include "c10d/group.hpp"
#include "net/transport.hpp"
#include "net/ucx_transport.hpp"

namespace fusedpg {

struct Connection {
  std::unique_ptr<Transport> transport;
  std::string name; // "tcp", "ucx 1.22.0" or "gloo"
};

UcxConfig ucx_config(const Settings& settings);

// Collective: connects the ranks of a group that spans hosts, by its settings'
// transport: sockets of our own; UCX, of which all must have the same version;
// or a backend that `make_gloo` makes. `check` throws when waiting is in vain.
Connection connect_hosts(
    Group& group,
    const Deadline& deadline,
    const std::function<void()>& check,
    const std::function<c10::intrusive_ptr<c10d::Backend>()>& make_gloo);

} // namespace fusedpg
