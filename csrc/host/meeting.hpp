#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/rendezvous.hpp"

namespace fusedpg {

struct PeerInfo {
  std::string host_id;
  std::string address; // abstract unix socket
  std::string token; // proves to a listener that the caller read the store
  std::string cpus; // affinity mask
  std::string settings; // what all ranks must have the same, for people
  std::string host_name; // for people
  bool keeps_store = false; // which ends with this rank's process, or earlier
  int pid = 0;
  uint64_t start = 0; // of the process; see host/process.hpp
};

// Changes when the layout of shared memory, of what goes through sockets or of
// what lies in the store does.
constexpr uint64_t kProtocol = 7;
constexpr size_t kTokenBytes = 16;
std::string random_token();
// Throws what a rank gave as its reason not to take part.
[[noreturn]] void fail_for(int rank, const std::string& reason);

// How ranks find each other in a store in which anything of earlier groups may
// lie: of other sizes, of processes that have ended, of half a meeting.
//
// Every rank but 0 keeps an entry with a token of its own, drawn for this
// meeting. Rank 0 collects them and writes the roll: a new id and all entries.
// A rank that finds its token in the roll acknowledges the id in its entry;
// when all have, rank 0 marks the roll as final. So whoever is in a final roll
// was alive and had read it. An entry that changes gives a new roll. Each key
// has one writer and is written over, so nothing piles up.
class Meeting {
 public:
  Meeting(Rendezvous& store, int rank, int world_size, PeerInfo self);

  // All ranks, this one included. `self` has the token that the constructor
  // got.
  std::vector<PeerInfo> run(PeerInfo self, const Deadline& deadline);

  // The same on all ranks, and never again another meeting's.
  const std::string& id() const {
    return id_;
  }

  // Tells the others why this rank takes no part in what it met for. Rank 0
  // believes what changes while it waits at once, what it finds after a while:
  // it may be left from a meeting that others know nothing of.
  void withdraw(const std::string& reason) noexcept;

  // The reason that a rank has given since it was met; empty if it gave none.
  std::string reason_of(int rank, const PeerInfo& met) noexcept;

 private:
  struct Entry;
  struct Roll;

  std::optional<Entry> read_entry(int rank);
  static Entry entry_of(int rank, const std::string& value);
  std::optional<Roll> read_roll();
  void write_entry(const std::string& reason);
  void write_roll(
      uint32_t state,
      const std::string& reason,
      const std::vector<PeerInfo>& infos);
  std::vector<PeerInfo> lead(const Deadline& deadline);
  std::vector<PeerInfo> follow(const Deadline& deadline);
  void consider_refusal(int rank, const Entry& entry, bool fresh);
  bool grace_over() const;
  std::string absent(const std::vector<bool>& came) const;

  Rendezvous& store_;
  const int rank_;
  const int size_;
  PeerInfo self_;
  std::string id_; // of the roll that this rank wrote or acknowledged
  std::vector<PeerInfo> known_; // on rank 0: what it has read
  std::vector<std::string> old_tokens_; // in the roll that rank 0 found
  bool final_ = false;
  const Clock::time_point arrived_ = Clock::now();
};

} // namespace fusedpg
