#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/options.hpp"
#include "base/rendezvous.hpp"
#include "host/memory.hpp"

namespace fusedpg {

struct PeerInfo {
  std::string host_id;
  std::string address; // abstract unix socket
  std::string token; // proves to a listener that the caller read the store
  std::string cpus; // affinity mask
  int pid = 0;
};

// Every rank says who and where it is. A listening socket is open from before
// the publication until exchange_memory ends.
class Bootstrap {
 public:
  Bootstrap(int rank, int world_size, const Settings& settings);

  // Publishes this rank and reads the others. Keys carry the number of times
  // this rank has met under this store, so that a group can be built again
  // under the same one.
  void meet(Rendezvous& store, const Deadline& deadline);

  const std::vector<PeerInfo>& peers() const {
    return peers_;
  }
  bool single_host() const;
  // Whether some machine has several ranks.
  bool ranks_share_hosts() const;
  // Ranks with this rank's host identity, this one included.
  int local_world_size() const;
  // CPUs that at least one rank of this host may run on.
  int local_cpus() const;

  struct Peer {
    Fd memory;
    Fd process; // pidfd; empty before Linux 5.3
    int pid = 0;
  };

  // Sends this rank's memory file to every peer and receives theirs. Refuses
  // peers of another user. Entry `rank` stays empty.
  std::vector<Peer> exchange_memory(int memory_fd, const Deadline& deadline);

 private:
  const int rank_;
  const int world_size_;
  PeerInfo self_;
  Fd listener_;
  std::vector<PeerInfo> peers_;
};

} // namespace fusedpg
