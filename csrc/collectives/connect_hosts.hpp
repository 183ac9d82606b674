#pragma once

#include <functional>
#include <memory>
#include <string>

#include "aggregate/client.hpp"
#include "base/deadline.hpp"
#include "base/rendezvous.hpp"
#include "collectives/engine.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg {

struct Connection {
  std::unique_ptr<Transport> transport;
  std::string address; // at which this rank listens
  // For messages of users, which have connections of their own: where this rank
  // listens, and the addresses of all. A peer connects whether or not this rank
  // has messages, so that it hears of this rank's end.
  std::unique_ptr<TcpEndpoint> mail{};
  std::vector<std::string> mail_addresses{};
  // Null if the group has none. It has connections of its own.
  std::unique_ptr<aggregate::Client> aggregators{};
};

// Collective, when a group that spans hosts is made: all ranks say where they
// listen. Later they need no store, and whoever waits for a rank connects to it,
// so that its end shows before its first message.
//
// `prepare` is called first; where it or listening throws on a rank, all raise
// why. `check` throws when waiting is in vain.
Connection connect_hosts(
    const GroupBase& group,
    const std::shared_ptr<Rendezvous>& store,
    const std::function<void()>& prepare,
    const Deadline& deadline,
    const std::function<void()>& check);

// Collective: a job of this group at each of its settings' aggregators. `alone`:
// every rank is a host of its own, or is taken for one, in the order of sums.
// Throws where rank 0 cannot open a job: there kSystem, elsewhere kPeerFailed.
std::unique_ptr<aggregate::Client> connect_aggregators(
    const GroupBase& group,
    const Rendezvous& store,
    Transport& transport,
    bool alone,
    const Deadline& deadline,
    const std::function<void()>& check);

// For messages of users, connected to nobody.
std::unique_ptr<TcpTransport> open_transport(
    const GroupBase& group,
    std::unique_ptr<TcpEndpoint> mail);

} // namespace fusedpg
