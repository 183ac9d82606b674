#pragma once

#include <functional>
#include <memory>
#include <string>

#include "aggregate/client.hpp"
#include "base/deadline.hpp"
#include "c10d/group.hpp"
#include "net/transport.hpp"

namespace fusedpg {

struct Connection {
  std::unique_ptr<Transport> transport;
  std::string name; // "tcp" or "ucx 1.22.0"
  // Null if the group has none. It has connections of its own, by TCP.
  std::unique_ptr<aggregate::Client> aggregators{};
};

// Collective: connects the ranks of a group that spans hosts, by its settings'
// transport: sockets of our own, or UCX, of which all must have the same version.
// `check` throws when waiting is in vain.
Connection connect_hosts(
    Group& group,
    const Deadline& deadline,
    const std::function<void()>& check);

// Collective: a job of this group at each of its settings' aggregators. `alone`:
// every rank is a host of its own, or is taken for one, in the order of sums.
std::unique_ptr<aggregate::Client> connect_aggregators(
    Group& group,
    bool alone,
    const Deadline& deadline,
    const std::function<void()>& check);

// The address at which this rank listens for other hosts; empty where UCX
// chooses it, or where there is none, which the first operation reports.
std::string host_address(Group& group);

// For messages of users: one by the same transport that is connected to nobody.
std::unique_ptr<PolledTransport> open_transport(Group& group);

} // namespace fusedpg
