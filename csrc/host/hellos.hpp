#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "host/meeting.hpp"
#include "host/memory.hpp"
#include "host/process.hpp"

namespace fusedpg {

struct Peer {
  Fd memory;
  std::shared_ptr<const Process> process;
  int pid = 0;
};

// A socket with an abstract address that the kernel picks.
Fd listen_for_hellos(int world_size, std::string& address);

// Every rank of a host calls every other one there, says who it is and hands
// over the file of its memory. One loop looks after all calls at once, those this rank makes and
// those it gets, so nobody who calls and says nothing, or keeps the queue of a
// listener full, delays what others do.
class Hellos {
 public:
  // `ranks` of this host, and who they are; a peer is a place among them.
  Hellos(
      int rank,
      const std::vector<int>& ranks,
      const std::vector<PeerInfo>& infos,
      int listener,
      int memory_fd,
      Meeting& meeting);

  std::vector<Peer> exchange(const Deadline& deadline);
  // After that: one connection to each peer, which both have.
  std::vector<Fd> connections();

 private:
  struct Hello {
    uint64_t protocol;
    int32_t rank;
    char token[kTokenBytes];
  };
  // Somebody who has called and has not said all yet.
  struct Caller {
    Fd socket;
    pid_t pid = 0;
    size_t got = 0;
    Hello hello{};
    std::vector<Fd> files{};
    bool lost_file = false; // this process had no descriptor left for it
  };
  struct Call {
    Fd socket; // open until this rank has heard from all
    bool said = false;
    bool hung_up = false;
  };

  void call(int peer);
  [[noreturn]] void fail_dead(int peer, const std::string& what);
  void accept_all();
  void drop_silent();
  void hear_all();
  // False when the caller is done with, one way or the other.
  bool hear(Caller& caller);
  void receive(Caller& caller);
  void wait();
  bool heard(int peer) const {
    return peer == rank_ || peers_[peer].process != nullptr;
  }
  bool done() const;

  const std::vector<int>& group_ranks_;
  const int rank_; // this one's place
  const int size_;
  const std::vector<PeerInfo>& infos_;
  const int listener_;
  const int memory_fd_;
  Meeting& meeting_;
  std::vector<Peer> peers_;
  std::vector<Call> calls_;
  std::list<Caller> callers_;
  std::vector<Fd> heard_; // by peer: the connection by which it has said all
};

} // namespace fusedpg
