#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "base/fork.hpp"
#include "base/siphash.hpp"
#include "host/hellos.hpp"
#include "host/meeting.hpp"

namespace fusedpg {

class Reunion;

// The ranks of a group that share this host, and a connection to each: over these
// later groups of the same processes meet, without the store. They stay as long
// as the group or one that has met over them.
//
// dist.new_group() is faster by them: 0.6 ms in place of 2.4 at 2 ranks, and 5.6
// in place of 21 at 8 (medians of 40 calls on two cores beside other work; the
// slower figures are of a build in which all groups meet by the store). Gloo
// takes 19 and 95 there. More ranks have not been measured.
class Links {
 public:
  // A rank of that group. The socket is empty for this process's own.
  struct Known {
    PeerInfo info;
    Fd socket;
    std::shared_ptr<const Process> process;
  };
  // `host_id` is FUSEDPG_HOST_ID, under which they have met.
  Links(int self, std::string host_id, std::map<int, Known> known);
  Links(const Links&) = delete;

  int self() const {
    return self_;
  }
  // True if all of them are here, on which they agree. False in a forked child,
  // and after FUSEDPG_HOST_ID was changed.
  bool know(const std::vector<int>& ranks, const std::string& host_id) const;
  // Called by a rank for which know() is false as its FUSEDPG_HOST_ID was changed:
  // others may think that they meet over these links. Tells them that all meet by
  // the store.
  void decline(
      const std::string& name,
      const std::vector<int>& ranks,
      const Deadline& deadline);
  const PeerInfo& info(int rank) const {
    return peers_.at(rank).known.info;
  }

 private:
  friend class Reunion;
  enum class Kind : uint32_t { kHello, kSeen, kGone, kDeclined };
  // One message; `bytes` of text follow, and a hello brings a file.
  struct Note {
    uint64_t protocol = kProtocol;
    Kind kind = Kind::kHello;
    uint32_t bytes = 0;
    Key128 group{};
    uint64_t mine = 0; // names the sender's attempt to meet
    uint64_t yours = 0; // the attempt that kSeen answers
  };
  // The latest message of a rank about a group, and what is left of earlier ones.
  struct LastMessage {
    uint64_t attempt = 0;
    Fd memory;
    std::string settings;
    uint64_t seen = 0; // the attempt of this rank that it has seen
    std::string reason; // why it has given up
    bool declined = false; // it meets by the store
    bool now = false; // while this rank was there, too
    bool lost_memory = false; // this process had no descriptor left for it
  };
  struct Peer {
    Known known;
    bool ended = false;
    // The message that is being read.
    Note note{};
    size_t got = 0; // of it and its text
    std::string text{};
    Fd file{};
    bool lost_file = false;
    std::map<Key128, LastMessage> last_messages{}; // of groups to come
  };

  // False: there is no room, or the peer has ended.
  bool tell(int peer, Note note, const std::string& text, int file = -1);
  // Reads what has come.
  void hear(int peer);
  void take(Peer& peer);

  const int self_;
  const Origin origin_{};
  const std::string host_id_;
  std::map<int, Peer> peers_; // by rank
  std::mutex mutex_; // of the peers' members and the next one
  std::map<Key128, Reunion*> under_way_;
};

// Thrown on every rank of a group if one of them has declined: all meet by the
// store then. An exception, as it has to leave the Domain's constructor.
class MeetByStore : public std::exception {
 public:
  const char* what() const noexcept override {
    return "the ranks of this group meet by the store";
  }
};

// How the ranks of a new group meet that know each other. Each sends all others
// a hello with the file of its memory, and answers each hello. A rank that has
// the others' hellos and their answers to its own is met: so nothing that an
// earlier attempt under the same name has left can be mistaken for a rank's part
// in this one.
class Reunion {
 public:
  // `ranks` of the links, by rank of the new group; all are known. `name` is the
  // group's, and `settings` what all must have the same.
  Reunion(
      std::shared_ptr<Links> links,
      const std::string& name,
      std::vector<int> ranks,
      std::string settings);
  Reunion(const Reunion&) = delete;
  ~Reunion();

  // The others' memory, by rank. Throws on all ranks alike: Error(kMismatch)
  // where settings differ, MeetByStore if one of them has declined.
  std::vector<fusedpg::Peer> exchange(int memory_fd, const Deadline& deadline);
  // Once met: the same on all ranks, and another one for every group.
  const Key128& id() const {
    return id_;
  }
  // Tells the others why this rank takes no part.
  void withdraw(const std::string& reason) noexcept;

 private:
  friend class Links;
  struct Other {
    int rank; // of the links
    bool told = false;
    bool answered = false; // its hello
    Links::LastMessage last{};
  };

  bool step(int memory_fd);
  bool met_with(const Other& other) const;
  void check(const Other& other, const Deadline& deadline, bool quiet);
  bool wait(); // false: nothing has come

  const std::shared_ptr<Links> links_;
  const std::vector<int> ranks_;
  const std::string settings_;
  const Clock::time_point begun_ = Clock::now();
  Key128 group_{};
  uint64_t attempt_ = 0;
  std::vector<Other> others_; // and this rank itself
  bool alike_ = false; // what this rank has failed with others find as well
  Key128 id_{};
};

} // namespace fusedpg
