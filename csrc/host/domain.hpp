#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "base/options.hpp"
#include "base/stats.hpp"
#include "host/arena.hpp"
#include "host/bootstrap.hpp"

namespace fusedpg {

// Bytes of one staging buffer, unless it is said how many; a rank has two for
// input and two for output.
constexpr size_t kStageBytes = size_t(512) << 10;
// Bytes through which a message travels when the arena is full.
constexpr size_t kMailReserve = size_t(64) << 10;
// Slots for small messages that travel before their receives are posted: one, or
// several that lie side by side.
constexpr size_t kMailSlots = 64;
constexpr size_t kMailSlotBytes = size_t(4) << 10;
constexpr size_t kMailSmall = size_t(64) << 10;
// 64-bit words of one operation's table; a rank has two tables.
constexpr size_t kTableEntries = 8192;
// Messages of point to point in flight from one rank to another.
constexpr size_t kInboxSlots = 32;

// A futex word that peers ring when this rank may be asleep. Waiters announce
// themselves in `sleepers`, so an awake rank costs its peers no system call.
struct alignas(64) Bell {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;

  void ring() {
    if (sleepers.load(std::memory_order_relaxed) != 0) {
      word.fetch_add(1, std::memory_order_release);
      wake();
    }
  }
  void wake();
};

// Part of a point-to-point message; see messages/mailbox.hpp.
struct alignas(64) Message {
  uint64_t id; // counts the sender's messages to this receiver
  uint32_t kind;
  int32_t tag;
  uint64_t total; // bytes of the whole message
  uint64_t offset; // of this part in the message
  uint64_t bytes; // of this part
  uint64_t location; // of this part in the sender's arena
};

// A ring with one writer (a peer) and one reader (the owner).
struct Inbox {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  Message slots[kInboxSlots];
};

// kExited: its interpreter has ended without leaving the group.
enum class RankState : uint32_t {
  kOk = 0,
  kFailed = 1,
  kLeft = 2,
  kExited = 3
};

// The head of every rank's arena. Each line has one writer, but for the bells.
struct RankControl {
  // The number of barriers this rank has arrived at.
  alignas(64) std::atomic<uint64_t> phase;
  Bell bell; // rung by arrivals
  Bell mail_bell; // rung by point to point
  Bell mail_waiter_bell; // in its place while a thread waits for a message
  alignas(64) std::atomic<uint32_t> state; // RankState
  // This rank can write to no peer's heap any more; only after a failure or
  // at its end.
  std::atomic<uint32_t> released;
  // Written before `state` becomes kFailed: barriers that this rank has passed.
  // And what happened, also before it becomes kExited.
  std::atomic<uint64_t> failed_after;
  char reason[432];
  // See collectives/monitored_barrier.cpp; rank 0 writes the second.
  alignas(64) std::atomic<uint64_t> monitored_arrived;
  alignas(64) std::atomic<uint64_t> monitored_passed;
  OpDescriptor descriptors[2];
};

// The ranks of a group that share one machine: everybody's arena mapped, a
// barrier, and the news of who has failed. If a group spans machines they are
// some of its ranks. Here they are numbered from 0 on; errors name their ranks
// in the group, group_rank().
//
// Double buffering: whatever a rank writes for its peers before barrier n goes
// to half n % 2 of a pair, is read between the barriers n and n + 1, and is
// written again only after barrier n + 1, when all have read it.
//
// Thread safety: barriers and staging belong to the one thread that executes
// the group's current collective; the rest may be called from any thread.
class Domain {
 public:
  // Collective over the ranks that `bootstrap` met.
  Domain(
      int rank,
      Bootstrap& bootstrap,
      const Settings& settings,
      const Deadline& deadline,
      size_t stage_bytes = kStageBytes);
  ~Domain();

  // Why this process cannot have the shared memory of a group of so many ranks,
  // under its limits of files and of address space; or nothing.
  static std::string refusal(int size, size_t stage_bytes = kStageBytes);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // A rank's number in the group.
  int group_rank(int rank) const {
    return group_ranks_[rank];
  }
  size_t stage_bytes() const {
    return layout_.stage_bytes;
  }
  // How long a wait spins before it sleeps.
  std::chrono::nanoseconds spin() const {
    return spin_;
  }
  const std::shared_ptr<Arena>& arena() const {
    return arena_;
  }

  // Commits what operations and messages write to: tables, staging buffers and
  // inboxes, which a group that is never used does not need. Before each of them;
  // throws Error(kOutOfMemory).
  void prepare() {
    if (!prepared_.load(std::memory_order_acquire)) {
      arena_->commit_control();
      prepared_.store(true, std::memory_order_release);
    }
  }

  // --- collectives ---------------------------------------------------------
  // The half of each pair to write to before the next barrier.
  int next_half() const {
    return static_cast<int>((phase_ + 1) & 1);
  }
  // The half that peers wrote before the last barrier.
  int half() const {
    return static_cast<int>(phase_ & 1);
  }
  OpDescriptor& descriptor(int rank, int half) {
    return control(rank).descriptors[half];
  }
  uint64_t* table(int rank, int half) {
    return reinterpret_cast<uint64_t*>(bases_[rank] + layout_.tables) +
        half * kTableEntries;
  }
  char* stage_in(int rank, int half) {
    return bases_[rank] + layout_.stage + half * layout_.stage_bytes;
  }
  char* stage_out(int rank, int half) {
    return bases_[rank] + layout_.stage + (2 + half) * layout_.stage_bytes;
  }
  // An address in a peer's arena; `offset` is what the peer's locate() said.
  char* address(int rank, uint64_t offset) const {
    return bases_[rank] + offset;
  }

  // Finds the arena of the group in which a range lies: this rank's or a
  // peer's.
  struct Place {
    int rank;
    uint64_t offset; // for address()
  };
  std::optional<Place> locate_any(const void* p, size_t bytes) const;
  // Keeps a rank's arena mapped here, also after the group's end.
  std::shared_ptr<const void> mapping(int rank) const;

  // The executing thread calls `idle` now and then while it waits here for
  // others of this host, which may wait for it elsewhere. `idle` returns
  // whether there may be more to do.
  void set_idle(std::function<bool()> idle) {
    idle_ = std::move(idle);
  }

  // Counts from now on whom waits are for, by group_rank(). It lives as long.
  void set_waits(Waits* waits) {
    waits_ = waits;
  }

  // Arrives and waits for everyone. `op` names the operation in errors.
  void barrier(const OpDescriptor& op, const Deadline& deadline);

  // Waits as barrier() does, for any condition that peers make true and ring
  // `bell` for; `missing(p)` tells whether rank p still owes something.
  void wait(
      Bell& bell,
      const OpDescriptor& op,
      const Deadline& deadline,
      FunctionRef<bool()> ready,
      FunctionRef<bool(int)> missing);

  // --- point to point ------------------------------------------------------
  Inbox& inbox(int owner, int sender) {
    return *reinterpret_cast<Inbox*>(
        bases_[owner] + layout_.inboxes + sender * sizeof(Inbox));
  }
  char* mail_reserve() {
    return bases_[rank_] + layout_.mail_reserve;
  }
  char* mail_slot(size_t i) {
    return mail_reserve() + kMailReserve + i * kMailSlotBytes;
  }
  // Rings whoever moves that rank's messages.
  void ring_mail(int rank) {
    RankControl& c = control(rank);
    if (c.mail_waiter_bell.sleepers.load(std::memory_order_relaxed) != 0) {
      c.mail_waiter_bell.ring();
    } else {
      c.mail_bell.ring();
    }
  }
  RankControl& control(int rank) {
    return *reinterpret_cast<RankControl*>(bases_[rank]);
  }

  // --- failure -------------------------------------------------------------
  // Throws when this rank aborted, or when a rank for which missing(p) holds is
  // dead, has failed or has left.
  void check_peers(const std::string& op, FunctionRef<bool(int)> missing);
  // Whether check_peers() would find something about this rank.
  bool in_doubt(int rank);
  // Declares the group failed, once: tells the peers why and detaches the
  // arena. Later operations raise `reason`.
  void mark_failed(const Error& error);
  // Waits until no peer can change this rank's heap any more, nor what this
  // rank sees of memory that add_shared() has named.
  void detach();
  // A block of rank 0's arena that all ranks use. Told by every rank.
  void add_shared(uint64_t offset, size_t bytes);
  bool failed() const {
    return failed_.load(std::memory_order_acquire);
  }
  ErrorKind failure_kind() const;
  std::string failure_reason() const;
  // Throws that failure, for an operation that comes after it.
  [[noreturn]] void fail_as_before() const;
  // Makes waits on this rank throw Error(kAborted), now and later. `how` is for
  // the text: "interrupted by KeyboardInterrupt". The first one counts.
  void request_abort(const std::string& how = "aborted");
  bool abort_requested() const {
    return abort_.load(std::memory_order_acquire);
  }
  // The text that peers quote when this rank fails or refuses an operation.
  void set_reason(const std::string& reason);
  // Tells peers that this rank takes part in nothing more. `exit` says how its
  // interpreter has ended if the group has not been destroyed before.
  void leave(const std::string& exit = {});
  // Whether a rank has said so.
  bool has_left(int rank) {
    const auto state = static_cast<RankState>(
        control(rank).state.load(std::memory_order_acquire));
    return state == RankState::kLeft || state == RankState::kExited;
  }

 private:
  struct Layout {
    size_t tables; // all before that is there from the beginning
    size_t stage;
    size_t stage_bytes; // each
    size_t inboxes;
    size_t mail_reserve;
    size_t total;
  };
  static Layout layout(int size, size_t stage_bytes);
  static size_t heap_that_fits(const Layout& layout, size_t heap, int size);
  // After a barrier. A rank that fails takes its arena away, and may do so
  // between arriving and passing: then what was read from it until now is
  // worthless. Its fate after it has passed does not matter here.
  void check_arrived(const OpDescriptor& op);
  bool process_ended(int rank) const;
  [[noreturn]] void fail_ended(const std::string& op, int rank);
  void map_peers();
  void ring_all();
  // Parts of detach().
  bool release_peers();
  void own_shared(const std::function<bool()>& alone);

  const std::vector<int> group_ranks_;
  const int rank_;
  const int size_;
  const Layout layout_;
  std::shared_ptr<Arena> arena_;
  std::vector<Bootstrap::Peer> peers_;
  std::vector<std::shared_ptr<Mapping>> mappings_; // none for this rank
  std::vector<char*> bases_;
  Fd shared_file_; // rank 0's memory, on the other ranks
  uint64_t phase_ = 0;
  std::atomic<uint64_t> passed_{0}; // as phase_, once all have arrived
  std::chrono::nanoseconds spin_;
  std::function<bool()> idle_;
  Waits* waits_ = nullptr;

  std::atomic<bool> prepared_{false};
  std::atomic<bool> abort_{false};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  ErrorKind failure_kind_ = ErrorKind::kAborted;
  std::string failure_reason_;
  std::string abort_how_; // not empty once abort_ is set

  std::mutex detach_mutex_;
  bool detached_ = false;
  std::vector<Arena::Pages> shared_; // of rank 0's arena; sorted, disjoint
};

} // namespace fusedpg
