#include "host/domain.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/round_up.hpp"
#include "base/while_waiting.hpp"
#include "host/futex.hpp"

namespace fusedpg {
namespace {

// A sleeping rank looks this often whether its peers are alive.
constexpr std::chrono::microseconds kPeersPatience{20000};
// And one with something to do meanwhile, as often.
constexpr std::chrono::microseconds kIdlePeersPatience{200};

// A rank that has failed waits this long for its peers to notice.
constexpr auto kGrace = std::chrono::milliseconds(50);

std::string ranks_text(const Domain& domain, const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i ? ", " : "") << domain.group_rank(ranks[i]);
  }
  return out.str();
}

// Charges a wait to the ranks that are missing in it: the time between two
// looks to all that were missing at the first. Arrivals wake whoever sleeps, so
// that it looks at each of them.
class Waiting {
 public:
  Waiting(const Domain& domain, Waits* waits, FunctionRef<bool(int)> missing)
      : domain_(domain),
        waits_(waits),
        missing_(missing) {
    late_.clear();
    for (int p = 0; waits_ != nullptr && p < domain_.size(); ++p) {
      if (p != domain_.rank() && missing_(p)) {
        late_.push_back(p);
      }
    }
  }
  Waiting(const Waiting&) = delete;
  ~Waiting() {
    look();
  }

  Clock::time_point look() {
    const auto now = Clock::now();
    for (const int p : late_) {
      waits_->add(domain_.group_rank(p), now - since_);
    }
    since_ = now;
    late_.erase(
        std::remove_if(
            late_.begin(), late_.end(), [&](int p) { return !missing_(p); }),
        late_.end());
    return now;
  }

 private:
  const Domain& domain_;
  Waits* const waits_;
  const FunctionRef<bool(int)> missing_;
  Clock::time_point since_ = Clock::now();
  static thread_local std::vector<int> late_; // keeps its memory
};
thread_local std::vector<int> Waiting::late_;

// Peers may have created their group already: they learn in their first
// operation that this rank could not.
void declare_failed(Arena& arena, const char* reason) {
  auto& control = *reinterpret_cast<RankControl*>(arena.base());
  std::strncpy(control.reason, reason, sizeof control.reason - 1);
  // It has never written to theirs.
  control.released.store(1, std::memory_order_release);
  control.state.store(
      static_cast<uint32_t>(RankState::kFailed), std::memory_order_release);
}

std::vector<Peer> exchange(
    Bootstrap& bootstrap,
    Arena& arena,
    const Deadline& deadline) {
  try {
    return bootstrap.exchange_memory(arena.fd(), deadline);
  } catch (const std::exception& error) {
    declare_failed(arena, error.what());
    throw;
  }
}

// The peers hear why when there is no memory.
std::shared_ptr<Arena> create_arena(
    Bootstrap& bootstrap,
    size_t control_bytes,
    size_t heap_bytes,
    size_t at_once,
    const std::string& refusal) {
  try {
    if (!refusal.empty()) {
      fail(ErrorKind::kSystem, "fused: {}", refusal);
    }
    return Arena::create(control_bytes, heap_bytes, at_once);
  } catch (const std::exception& error) {
    bootstrap.withdraw(error.what());
    throw;
  }
}

} // namespace

void Bell::wake() {
  futex_wake_all(word);
}

Domain::Layout Domain::layout(int size, size_t stage_bytes) {
  Layout l;
  l.stage_bytes = round_up(stage_bytes, kPage);
  l.tables = round_up(sizeof(RankControl), kPage);
  l.stage = l.tables + round_up(2 * kTableEntries * sizeof(uint64_t), kPage);
  l.inboxes = l.stage + 4 * l.stage_bytes;
  l.mail_reserve = l.inboxes + round_up(size * sizeof(Inbox), kPage);
  l.total = l.mail_reserve + kMailReserve + kMailSlots * kMailSlotBytes;
  return l;
}

// Ranks take what their limits leave, and then what all of them have: see
// map_peers(). Half of the address space stays for the program.
size_t Domain::heap_that_fits(const Layout& layout, size_t heap, int size) {
  const MemoryLimits limits = memory_limits();
  const size_t most = std::min(
      limits.file, limits.address_space / 2 / static_cast<size_t>(size));
  const size_t control = round_up(layout.total, Arena::kStep);
  const size_t wanted = heap;
  while (heap != 0 && control + round_up(heap, Arena::kStep) > most) {
    heap = heap < 2 * Arena::kStep ? 0 : heap / 2;
  }
  static std::atomic<bool> said{false};
  if (heap < wanted && !said.exchange(true)) {
    log_line(formatted(
        "the arena of a group has {} MiB in place of {} MiB: the limits of "
        "this "
        "process (ulimit -v, ulimit -f) leave no more",
        heap >> 20,
        wanted >> 20));
  }
  return heap;
}

std::string Domain::refusal(int size, size_t stage_bytes) {
  const MemoryLimits limits = memory_limits();
  const size_t control =
      round_up(layout(size, stage_bytes).total, Arena::kStep);
  const auto text = [](const char* limit, size_t has, size_t needs) {
    return formatted(
        "shared memory needs {} MiB where {} leaves {} MiB; raise that limit, "
        "or use the backend \"gloo\"",
        needs >> 20,
        limit,
        has >> 20);
  };
  if (control > limits.file) {
    return text("the limit of a file's size (ulimit -f)", limits.file, control);
  }
  const size_t all = control * static_cast<size_t>(size);
  if (all > limits.address_space) {
    return text(
        "the limit of address space (ulimit -v)", limits.address_space, all);
  }
  return "";
}

Domain::Domain(
    int rank,
    Bootstrap& bootstrap,
    const Settings& settings,
    const Deadline& deadline,
    size_t stage_bytes)
    : group_ranks_(bootstrap.host_ranks()),
      rank_(
          static_cast<int>(
              std::find(group_ranks_.begin(), group_ranks_.end(), rank) -
              group_ranks_.begin())),
      size_(static_cast<int>(group_ranks_.size())),
      layout_(layout(size_, stage_bytes)),
      arena_(create_arena(
          bootstrap,
          layout_.total,
          heap_that_fits(layout_, settings.arena_bytes, size_),
          layout_.tables,
          refusal(size_, stage_bytes))),
      peers_(exchange(bootstrap, *arena_, deadline)),
      mappings_(size_),
      bases_(size_) {
  bases_[rank_] = arena_->base();
  try {
    map_peers();
  } catch (const std::exception& error) {
    declare_failed(*arena_, error.what());
    throw;
  }
  // Spinning helps only while nobody else needs this core.
  const bool crowded = size_ > bootstrap.local_cpus();
  spin_ = std::chrono::microseconds(
      settings.spin_us >= 0 ? settings.spin_us : (crowded ? 0 : 5));
}

Domain::~Domain() {
  leave();
  // Shared parameters may keep a mapping.
  std::vector<std::weak_ptr<Mapping>> kept(mappings_.begin(), mappings_.end());
  mappings_.clear();
  if (std::all_of(kept.begin(), kept.end(), [](const auto& mapping) {
        return mapping.expired();
      })) {
    control(rank_).released.store(1, std::memory_order_release);
  }
}

void Domain::map_peers() {
  // All ranks see all files, and take of each what the smallest one has.
  size_t bytes = arena_->size();
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) {
      continue;
    }
    const off_t found = lseek(peers_[p].memory.get(), 0, SEEK_END);
    if (found < static_cast<off_t>(layout_.total)) {
      fail(
          ErrorKind::kSystem,
          "fused: the arena of rank {} is too small",
          group_rank(p));
    }
    bytes = std::min(bytes, static_cast<size_t>(found));
  }
  arena_->shrink(bytes);
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) {
      continue;
    }
    mappings_[p] =
        std::make_shared<Mapping>(peers_[p].memory.get(), arena_->size());
    bases_[p] = mappings_[p]->data();
    if (p == 0) {
      shared_file_ = std::move(peers_[p].memory);
    }
    peers_[p].memory.reset();
  }
}

std::optional<Domain::Place> Domain::locate_any(const void* p, size_t bytes)
    const {
  if (const auto mine = arena_->locate(p, bytes)) {
    return Place{rank_, *mine};
  }
  const char* begin = static_cast<const char*>(p);
  for (int r = 0; r < size_; ++r) {
    if (mappings_[r] && begin >= mappings_[r]->data() &&
        begin + bytes <= mappings_[r]->data() + mappings_[r]->size()) {
      return Place{r, static_cast<uint64_t>(begin - mappings_[r]->data())};
    }
  }
  return std::nullopt;
}

std::shared_ptr<const void> Domain::mapping(int rank) const {
  if (rank == rank_) {
    return arena_;
  }
  return mappings_[rank];
}

void Domain::barrier(const OpDescriptor& op, const Deadline& deadline) {
  ++phase_;
  control(rank_).phase.store(phase_, std::memory_order_release);
  // Orders the store above before the look at `sleepers`; wait() has its twin.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int p = 0; p < size_; ++p) {
    if (p != rank_) {
      control(p).bell.ring();
    }
  }
  int next = 0; // all ranks below have arrived
  const auto arrived = [&](int p) {
    return control(p).phase.load(std::memory_order_acquire) >= phase_;
  };
  const auto ready = [&] {
    while (next < size_ && arrived(next)) {
      ++next;
    }
    return next == size_;
  };
  if (!ready()) {
    wait(control(rank_).bell, op, deadline, ready, [&](int p) {
      return !arrived(p);
    });
  }
  check_arrived(op);
}

void Domain::check_arrived(const OpDescriptor& op) {
  if (failed()) {
    fail(failure_kind(), "{}", failure_reason());
  }
  const auto taken = [&](int p) {
    return control(p).state.load(std::memory_order_acquire) ==
        static_cast<uint32_t>(RankState::kFailed) &&
        control(p).failed_after.load(std::memory_order_relaxed) < phase_;
  };
  for (int p = 0; p < size_; ++p) {
    if (taken(p)) {
      check_peers(
          formatted("{}, sequence number {}", describe(op), op.sequence),
          taken);
    }
  }
  passed_.store(phase_, std::memory_order_release);
}

void Domain::wait(
    Bell& bell,
    const OpDescriptor& op,
    const Deadline& deadline,
    FunctionRef<bool()> ready,
    FunctionRef<bool(int)> missing) {
  Waiting waiting(*this, waits_, missing);
  if (spin_.count() > 0) {
    const auto end = waiting.look() + spin_;
    do {
      for (int i = 0; i < 16; ++i) {
        if (ready()) {
          return;
        }
        cpu_relax();
      }
    } while (waiting.look() < end);
  }
  // Not sched_yield(): the scheduler charges a yield as a whole time slice, so
  // that on a machine with other work every wait would cost milliseconds.
  while (true) {
    const uint32_t word = bell.word.load(std::memory_order_acquire);
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool done = ready();
    if (!done && !abort_requested()) {
      const bool busy = idle_ && idle_();
      if (!busy) {
        futex_wait(
            bell.word, word, idle_ ? kIdlePeersPatience : kPeersPatience);
      }
    }
    bell.sleepers.fetch_sub(1, std::memory_order_release);
    if (done || ready()) {
      return;
    }
    waiting.look();
    while_waiting();
    const auto what = [&] {
      return formatted("{}, sequence number {}", describe(op), op.sequence);
    };
    // A peer that did its part and then ended harms nobody: look at it first,
    // then once more whether its part has come.
    try {
      check_peers(what(), missing);
    } catch (const Error&) {
      if (ready()) {
        return;
      }
      throw;
    }
    if (deadline.expired()) {
      if (ready()) {
        return; // a signal handler has taken all the time there was
      }
      std::vector<int> late;
      for (int p = 0; p < size_; ++p) {
        if (p != rank_ && missing(p)) {
          late.push_back(p);
        }
      }
      fail(
          ErrorKind::kTimeout,
          "fused: {}, failed on rank {}: timeout after {} ms waiting for {}, "
          "which did not reach it",
          what(),
          group_ranks_[rank_],
          deadline.timeout().count(),
          ranks_text(*this, late));
    }
  }
}

bool Domain::process_ended(int rank) const {
  return peers_[rank].process->ended();
}

void Domain::fail_ended(const std::string& op, int rank) {
  const bool said = control(rank).state.load(std::memory_order_acquire) ==
      static_cast<uint32_t>(RankState::kExited);
  fail(
      ErrorKind::kPeerDead,
      "fused: {}, failed on rank {}: the process of rank {} (pid {}) ended{}{}",
      op,
      group_rank(rank_),
      group_rank(rank),
      peers_[rank].pid,
      said ? ": " : "",
      said ? control(rank).reason : "");
}

bool Domain::in_doubt(int rank) {
  return rank != rank_ &&
      (control(rank).state.load(std::memory_order_acquire) !=
           static_cast<uint32_t>(RankState::kOk) ||
       process_ended(rank));
}

void Domain::check_peers(
    const std::string& op,
    FunctionRef<bool(int)> missing) {
  if (abort_requested()) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    fail(
        ErrorKind::kAborted,
        "fused: {}, {} on rank {}",
        op,
        abort_how_,
        group_rank(rank_));
  }
  for (int p = 0; p < size_; ++p) {
    // Asked once more after: its part may have come just before its end.
    if (p != rank_ && missing(p) && process_ended(p) && missing(p)) {
      fail_ended(op, p);
    }
  }
  for (int p = 0; p < size_; ++p) {
    if (p == rank_ || !missing(p)) {
      continue;
    }
    const auto state = static_cast<RankState>(
        control(p).state.load(std::memory_order_acquire));
    if (state == RankState::kExited) {
      fail_ended(op, p);
    }
    if (state == RankState::kLeft) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: {}, failed on rank {}: rank {} has left the group "
          "(destroy_process_group or shutdown)",
          op,
          group_rank(rank_),
          group_rank(p));
    }
    if (state == RankState::kFailed) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: {}, failed on rank {}: rank {} reported: {}",
          op,
          group_rank(rank_),
          group_rank(p),
          control(p).reason);
    }
  }
}

void Domain::mark_failed(const Error& error) {
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failed()) {
      first = true;
      failure_kind_ = error.kind();
      failure_reason_ = error.what();
      failed_.store(true, std::memory_order_release);
    }
  }
  if (first) {
    set_reason(error.what());
    control(rank_).failed_after.store(
        passed_.load(std::memory_order_acquire), std::memory_order_relaxed);
    control(rank_).state.store(
        static_cast<uint32_t>(RankState::kFailed), std::memory_order_release);
    ring_all();
  }
  // A caller that learns of the failure goes on with its tensors at once, so no
  // call returns while a peer could still change them.
  detach();
}

// Survivors that notice a failure give each other's memory back, and the dead
// cannot write: then there is nothing to copy. Only a peer that is stopped, or
// too busy to notice, makes this rank copy its tensors to private pages.
void Domain::detach() {
  std::lock_guard<std::mutex> lock(detach_mutex_);
  if (detached_) {
    return;
  }
  detached_ = true;
  if (release_peers()) {
    control(rank_).released.store(1, std::memory_order_release);
  }
  std::vector<bool> gone(size_);
  gone[rank_] = true;
  const auto alone = [&] {
    for (int p = 0; p < size_; ++p) {
      gone[p] = gone[p] ||
          control(p).released.load(std::memory_order_acquire) != 0 ||
          process_ended(p);
    }
    return std::find(gone.begin(), gone.end(), false) == gone.end();
  };
  const Deadline grace(kGrace);
  while (!alone() && !grace.expired()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  const auto attempt = [](const auto& part) {
    try {
      part();
    } catch (const Error& refused) {
      log_line(refused.what());
    }
  };
  attempt([&] {
    arena_->detach(alone, rank_ == 0 ? shared_ : std::vector<Arena::Pages>());
  });
  attempt([&] { own_shared(alone); });
}

// Replaces the peers' heaps, which a thread of this rank may be reading or
// writing for an operation: it fails, as failed() is set already. Memory that
// ranks share becomes a private view of what is in it now.
bool Domain::release_peers() {
  bool released = true;
  const size_t heap = arena_->heap_begin();
  for (int p = 0; p < size_; ++p) {
    if (p != rank_) {
      const int fd = p == 0 && !shared_.empty() ? shared_file_.get() : -1;
      released =
          mappings_[p]->replace(heap, mappings_[p]->size(), fd) && released;
    }
  }
  if (rank_ == 0) {
    for (const Arena::Pages& pages : shared_) {
      released = arena_->copy_on_write(pages) && released;
    }
  }
  return released;
}

// Ranks that have detached do not write to the file any more. If another may,
// copies are taken, as far as memory reaches.
void Domain::own_shared(const std::function<bool()>& alone) {
  constexpr size_t kWindow = size_t(64) << 20;
  for (const auto& [first, end] : shared_) {
    for (size_t at = first; at < end; at += kWindow) {
      const size_t bytes = std::min(kWindow, end - at);
      if (alone()) {
        return;
      }
      bool owned = false;
      try {
        const Room room(2 * bytes); // not the last there is
        owned = own_pages(bases_[0] + at, bytes);
      } catch (const Error&) {
        // The text speaks of the arena, which needs nothing.
      }
      if (!owned) {
        fail(
            ErrorKind::kOutOfMemory,
            "fused: no memory for copies of shared parameters after a failure: "
            "a rank that was stopped and continues may still change them");
      }
    }
  }
}

void Domain::add_shared(uint64_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(detach_mutex_);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  shared_.emplace_back(offset / page * page, round_up(offset + bytes, page));
  std::sort(shared_.begin(), shared_.end());
  std::vector<Arena::Pages> merged;
  for (const Arena::Pages& pages : shared_) {
    if (!merged.empty() && pages.first <= merged.back().second) {
      merged.back().second = std::max(merged.back().second, pages.second);
    } else {
      merged.push_back(pages);
    }
  }
  shared_ = std::move(merged);
}

void Domain::set_reason(const std::string& reason) {
  RankControl& mine = control(rank_);
  std::strncpy(mine.reason, reason.c_str(), sizeof mine.reason - 1);
}

ErrorKind Domain::failure_kind() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_kind_;
}

std::string Domain::failure_reason() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_reason_;
}

void Domain::fail_as_before() const {
  fail(
      failure_kind(),
      "fused: this group has failed and must be destroyed; the failure was: {}",
      failure_reason());
}

void Domain::ring_all() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int p = 0; p < size_; ++p) {
    control(p).bell.ring();
    control(p).mail_bell.ring();
    control(p).mail_waiter_bell.ring();
  }
}

void Domain::request_abort(const std::string& how) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (abort_how_.empty()) {
      abort_how_ = how;
    }
  }
  abort_.store(true, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  control(rank_).bell.ring();
  control(rank_).mail_bell.ring();
  control(rank_).mail_waiter_bell.ring();
}

void Domain::leave(const std::string& exit) {
  auto expected = static_cast<uint32_t>(RankState::kOk);
  if (!exit.empty() && !failed()) {
    set_reason(exit);
  }
  const auto left = exit.empty() ? RankState::kLeft : RankState::kExited;
  if (control(rank_).state.compare_exchange_strong(
          expected, static_cast<uint32_t>(left))) {
    ring_all();
  }
}

} // namespace fusedpg
