#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/options.hpp"
#include "base/rendezvous.hpp"
#include "host/hellos.hpp"
#include "host/meeting.hpp"
#include "host/reunion.hpp"

namespace fusedpg {

// Every rank says who and where it is. A listening socket is open from before
// the publication until exchange_memory ends. When a step fails on a rank, its
// peers hear why.
class Bootstrap {
 public:
  Bootstrap(int rank, int world_size, const Settings& settings);

  // Publishes this rank and reads the others (host/meeting.hpp). The store must
  // live until exchange_memory ends. Throws on all ranks if settings differ
  // that must be the same on all.
  void meet(Rendezvous& store, const Deadline& deadline);
  // In place of that, for ranks of this host that know each other: `ranks` of
  // the links, by rank. They meet when they exchange their memory.
  void meet_again(
      std::shared_ptr<Links> links,
      const std::string& name,
      const std::vector<int>& ranks);
  // In hexadecimal: the same on all ranks that have met, and another one for
  // every group.
  std::string id() const;
  // For a failure between meet and exchange_memory.
  void withdraw(const std::string& reason) noexcept;

  const std::vector<PeerInfo>& peers() const {
    return peers_;
  }
  // The ranks of every host, ascending; hosts in the order of their first rank.
  std::vector<std::vector<int>> hosts() const;
  // Ranks of this rank's host, itself included.
  std::vector<int> host_ranks() const;
  bool single_host() const {
    return host_ranks().size() == peers_.size();
  }
  // CPUs that at least one rank of this host may run on.
  int local_cpus() const;

  using Peer = fusedpg::Peer;

  // Sends this rank's memory file to every peer on this host and receives
  // theirs, in the order of host_ranks(). Refuses peers of another user, and
  // nobody who calls can make it wait beyond the deadline. This rank's entry
  // stays empty.
  std::vector<Peer> exchange_memory(int memory_fd, const Deadline& deadline);
  // After that: what groups of the same ranks can meet by, or of some of them.
  std::shared_ptr<Links> links() const {
    return links_;
  }

 private:
  const int rank_;
  const int world_size_;
  const std::string host_id_; // by option; mostly empty
  PeerInfo self_;
  Fd listener_;
  std::unique_ptr<Meeting> meeting_; // or:
  std::unique_ptr<Reunion> reunion_;
  std::shared_ptr<Links> links_;
  std::vector<PeerInfo> peers_;
};

} // namespace fusedpg
