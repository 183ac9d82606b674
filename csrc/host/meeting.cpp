#include "host/meeting.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/some_of.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

// A failure that was there before this rank came may be another meeting's.
constexpr auto kMeetingGrace = std::chrono::seconds(5);
constexpr size_t kReasonBytes = 1000;
// How errors of ranks begin whose time is over.
constexpr const char* kCreating = "fused: creating the group";
// Rank 0 says in the roll who has not come, at most so often.
constexpr std::chrono::milliseconds kTellAbsent{100};

enum State : uint32_t { kOpen, kProposed, kFinal, kFailed };

// By size: while some ranks still create a group, another may be waiting in the
// next one, of another size, under another rank.
std::string entry_key(int size, int rank) {
  return formatted("fusedpg/{}/{}", size, rank);
}

std::string roll_key(int size) {
  return formatted("fusedpg/{}/roll", size);
}

// Fields are length-prefixed: addresses and tokens hold any byte.
void append(std::string& out, const std::string& field) {
  const uint32_t n = static_cast<uint32_t>(field.size());
  out.append(reinterpret_cast<const char*>(&n), sizeof n);
  out += field;
}

void append(std::string& out, const PeerInfo& info) {
  append(out, info.host_id);
  append(out, info.address);
  append(out, info.token);
  append(out, info.cpus);
  append(out, info.settings);
  append(out, info.host_name);
  append(out, std::to_string(info.keeps_store ? 1 : 0));
  append(out, std::to_string(info.pid));
  append(out, std::to_string(info.start));
}

[[noreturn]] void fail_malformed() {
  fail(ErrorKind::kSystem, "fused: malformed entry in the store");
}

// Takes fields off the front of a value.
class Fields {
 public:
  explicit Fields(const std::string& in) : in_(in) {}

  std::string text() {
    uint32_t n = 0;
    if (in_.size() - at_ < sizeof n) {
      fail_malformed();
    }
    std::memcpy(&n, in_.data() + at_, sizeof n);
    at_ += sizeof n;
    if (in_.size() - at_ < n) {
      fail_malformed();
    }
    at_ += n;
    return in_.substr(at_ - n, n);
  }

  uint64_t number() {
    try {
      return std::stoull(text());
    } catch (const std::logic_error&) { // of stoull
      fail_malformed();
    }
  }

  PeerInfo info() {
    PeerInfo info;
    info.host_id = text();
    info.address = text();
    info.token = text();
    info.cpus = text();
    info.settings = text();
    info.host_name = text();
    info.keeps_store = number() != 0;
    info.pid = static_cast<int>(number());
    info.start = number();
    if (info.token.size() != kTokenBytes) {
      fail_malformed();
    }
    return info;
  }

  void version(int rank) {
    const std::string found = text();
    if (found != std::to_string(kProtocol)) {
      fail(
          ErrorKind::kMismatch,
          "fused: rank {} runs another version of fusedpg (shared-memory "
          "protocol {}, expected {}); install the same version everywhere",
          rank,
          found,
          kProtocol);
    }
  }

 private:
  const std::string& in_;
  size_t at_ = 0;
};

// Waits between two looks at the store.
class Pace {
 public:
  void wait(const Deadline& deadline) {
    while_waiting();
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(next_, deadline.remaining()));
    next_ = std::min<std::chrono::microseconds>(
        next_ * 3 / 2, std::chrono::milliseconds(50));
  }

 private:
  std::chrono::microseconds next_{200};
};

// Ids and tokens of meetings that failed for a rank of this process: a second
// attempt finds them in the store and must not fail for the first one's reason.
class Spent {
 public:
  void add(int rank, const std::string& mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    marks_.emplace_back(rank, mark);
    if (marks_.size() > 1000) {
      marks_.pop_front();
    }
  }
  bool has(int rank, const std::string& mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::find(marks_.begin(), marks_.end(), std::pair(rank, mark)) !=
        marks_.end();
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<int, std::string>> marks_;
};

PerProcess<Spent> spent;

// Returns the present value of the key, if it has one.
std::optional<std::string> find(Rendezvous& store, const std::string& key) {
  auto found = store.get_all({key}, std::chrono::milliseconds(0));
  return found ? std::optional(std::move(found->front())) : std::nullopt;
}

} // namespace

void fail_for(int rank, const std::string& reason) {
  // If one rank times out a moment before the others, its text serves them all.
  const size_t late = reason.rfind(kCreating);
  if (late != std::string::npos) {
    throw Error(ErrorKind::kTimeout, reason.substr(late));
  }
  fail(
      ErrorKind::kPeerFailed,
      "fused: rank {} failed while the group was being created: {}",
      rank,
      reason);
}

std::string random_token() {
  char bytes[kTokenBytes];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) {
    fail_errno("fused: getrandom");
  }
  return std::string(bytes, sizeof bytes);
}

struct Meeting::Entry {
  int size = 0;
  PeerInfo info;
  std::string acknowledged;
  std::string reason; // not empty: this rank has given up
};

struct Meeting::Roll {
  uint32_t state = kOpen;
  int size = 0;
  std::string id;
  std::string reason;
  std::vector<PeerInfo> infos;

  bool names(int rank, const std::string& token) const {
    return static_cast<size_t>(rank) < infos.size() &&
        infos[rank].token == token;
  }
};

Meeting::Meeting(Rendezvous& store, int rank, int world_size, PeerInfo self)
    : store_(store),
      rank_(rank),
      size_(world_size),
      self_(std::move(self)),
      known_(static_cast<size_t>(world_size)) {
  for (PeerInfo& info : known_) {
    info.token.resize(kTokenBytes); // nobody's
  }
}

std::optional<Meeting::Entry> Meeting::read_entry(int rank) {
  const auto value = find(store_, entry_key(size_, rank));
  return value ? std::optional(entry_of(rank, *value)) : std::nullopt;
}

Meeting::Entry Meeting::entry_of(int rank, const std::string& value) {
  Fields fields(value);
  fields.version(rank);
  Entry entry;
  entry.size = static_cast<int>(fields.number());
  entry.info = fields.info();
  entry.acknowledged = fields.text();
  entry.reason = fields.text();
  return entry;
}

void Meeting::write_entry(const std::string& reason) {
  std::string out;
  append(out, std::to_string(kProtocol));
  append(out, std::to_string(size_));
  append(out, self_);
  append(out, id_);
  append(out, reason);
  store_.set(entry_key(size_, rank_), out);
}

std::optional<Meeting::Roll> Meeting::read_roll() {
  const auto value = find(store_, roll_key(size_));
  if (!value) {
    return std::nullopt;
  }
  Fields fields(*value);
  fields.version(0);
  Roll roll;
  roll.state = static_cast<uint32_t>(fields.number());
  roll.size = static_cast<int>(fields.number());
  roll.id = fields.text();
  roll.reason = fields.text();
  for (uint64_t n = fields.number(); n > 0; --n) {
    roll.infos.push_back(fields.info());
  }
  return roll;
}

void Meeting::write_roll(
    uint32_t state,
    const std::string& reason,
    const std::vector<PeerInfo>& infos) {
  std::string out;
  append(out, std::to_string(kProtocol));
  append(out, std::to_string(state));
  append(out, std::to_string(size_));
  append(out, id_);
  append(out, reason);
  append(out, std::to_string(infos.size()));
  for (const PeerInfo& info : infos) {
    append(out, info);
  }
  store_.set(roll_key(size_), out);
}

std::vector<PeerInfo> Meeting::run(PeerInfo self, const Deadline& deadline) {
  self_ = std::move(self);
  known_[rank_] = self_;
  if (size_ == 1) {
    id_ = random_token();
    final_ = true;
    return {self_};
  }
  auto all = rank_ == 0 ? lead(deadline) : follow(deadline);
  final_ = true;
  return all;
}

bool Meeting::grace_over() const {
  return Clock::now() - arrived_ > kMeetingGrace;
}

// On rank 0: who has not come, and who has.
std::string Meeting::absent(const std::vector<bool>& came) const {
  std::vector<std::string> missing, here;
  for (int p = 0; p < size_; ++p) {
    if (came[p]) {
      here.push_back(formatted(
          "rank {} (host {}, pid {})", p, known_[p].host_name, known_[p].pid));
    } else {
      missing.push_back(formatted("rank {}", p));
    }
  }
  return formatted(
      "{} of {} ranks have not come: {}; {} have: {}",
      missing.size(),
      size_,
      some_of(missing),
      here.size(),
      some_of(here));
}

void Meeting::consider_refusal(int rank, const Entry& entry, bool fresh) {
  const std::string& token = entry.info.token;
  if (spent.get().has(rank_, token) ||
      std::count(old_tokens_.begin(), old_tokens_.end(), token) != 0) {
    return; // it refused an earlier meeting
  }
  if (fresh || grace_over()) {
    spent.get().add(rank_, token);
    fail_for(rank, entry.reason);
  }
}

std::vector<PeerInfo> Meeting::lead(const Deadline& deadline) {
  if (const auto old = read_roll()) {
    for (const PeerInfo& info : old->infos) {
      old_tokens_.push_back(info.token);
    }
  }
  id_ = random_token();
  write_roll(kOpen, "", {});

  std::vector<PeerInfo> roll;
  std::vector<std::optional<Entry>> entries(size_);
  // Entries that were there when this rank came, with or without a reason.
  std::vector<std::string> found(size_);
  std::vector<bool> looked(size_);
  const auto agrees = [&](int p) {
    return entries[p] && entries[p]->size == size_ &&
        entries[p]->reason.empty();
  };
  const auto proposed = [&](int p) {
    return !roll.empty() && agrees(p) &&
        roll[p].token == entries[p]->info.token;
  };
  const auto acknowledged = [&](int p) {
    return proposed(p) && entries[p]->acknowledged == id_;
  };
  const auto look = [&](int p, std::optional<Entry> read) {
    entries[p] = std::move(read);
    if (!entries[p]) {
      looked[p] = true;
      return;
    }
    const Entry& entry = *entries[p];
    known_[p] = entry.info;
    const std::string mark = entry.info.token + entry.reason;
    if (!looked[p]) {
      looked[p] = true;
      found[p] = mark;
    }
    if (!entry.reason.empty()) {
      consider_refusal(p, entry, mark != found[p]);
    }
  };
  const auto all = [&](const auto& holds) {
    for (int p = 1; p < size_; ++p) {
      if (!holds(p)) {
        return false;
      }
    }
    return true;
  };

  // One question for all entries while all are there. A rank of a large group
  // is asked for less often.
  auto each = Clock::now();
  const auto look_at = [&](const std::vector<int>& ranks) {
    std::vector<std::string> keys;
    for (const int p : ranks) {
      keys.push_back(entry_key(size_, p));
    }
    const auto values = store_.get_all(keys, std::chrono::milliseconds(0));
    if (values) {
      for (size_t i = 0; i < ranks.size(); ++i) {
        look(ranks[i], entry_of(ranks[i], (*values)[i]));
      }
    } else if (Clock::now() >= each) {
      for (const int p : ranks) {
        look(p, read_entry(p));
      }
      each = Clock::now() + std::chrono::microseconds(300) * size_;
    }
  };

  std::string told; // to ranks that wait: they look at the roll anyway
  Deadline tells(kTellAbsent);
  const auto who_came = [&] {
    std::vector<bool> came(size_, true);
    for (int p = 1; p < size_; ++p) {
      came[p] = agrees(p);
    }
    return came;
  };

  for (Pace pace;; pace.wait(deadline)) {
    std::vector<int> left;
    for (int p = 1; p < size_; ++p) {
      if (!acknowledged(p)) {
        left.push_back(p);
      }
    }
    if (!left.empty()) {
      look_at(left);
    }
    if (all(acknowledged)) {
      left.resize(size_ - 1);
      std::iota(left.begin(), left.end(), 1);
      look_at(left); // the first that answered may have been replaced since
    }
    if (all(acknowledged)) {
      write_roll(kFinal, "", roll);
      return roll;
    }
    if (all(agrees) && !all(proposed)) {
      roll = known_;
      id_ = random_token();
      write_roll(kProposed, "", roll);
      pace = Pace();
    }
    if (roll.empty() && tells.expired()) {
      tells = Deadline(kTellAbsent);
      const std::string text = absent(who_came());
      if (text != told) {
        told = text;
        write_roll(kOpen, text, {});
      }
    }
    if (deadline.expired()) {
      std::vector<std::string> silent;
      for (int p = 1; p < size_; ++p) {
        if (!acknowledged(p)) {
          silent.push_back(formatted("rank {}", p));
        }
      }
      fail(
          ErrorKind::kTimeout,
          "fused: creating the group of {} timed out after {} ms on rank 0: {}",
          size_,
          deadline.timeout().count(),
          all(agrees) ? "all had come, but no answer came in the store from " +
                  some_of(silent)
                      : absent(who_came()));
    }
  }
}

std::vector<PeerInfo> Meeting::follow(const Deadline& deadline) {
  const auto first = read_roll();
  write_entry("");
  bool heard = false;
  for (Pace pace;; pace.wait(deadline)) {
    const auto roll = read_roll();
    const bool mine = roll && roll->size == size_ &&
        roll->infos.size() == static_cast<size_t>(size_) &&
        roll->names(rank_, self_.token);
    if (roll && roll->size == size_ && roll->state == kFailed) {
      const bool old = spent.get().has(rank_, roll->id) ||
          (static_cast<size_t>(rank_) < roll->infos.size() &&
           spent.get().has(rank_, roll->infos[rank_].token));
      const bool fresh =
          mine || !first || first->id != roll->id || first->state != kFailed;
      if (!old && (fresh || grace_over())) {
        spent.get().add(rank_, roll->id);
        fail_for(0, roll->reason);
      }
    }
    if (mine && roll->state == kProposed && roll->id != id_) {
      heard = true;
      id_ = roll->id;
      write_entry("");
      pace = Pace();
    }
    if (mine && roll->state == kFinal && roll->id == id_) {
      return roll->infos;
    }
    if (deadline.expired()) {
      // A roll that was there when this rank came may be an earlier meeting's.
      const bool said = roll && roll->size == size_ && roll->state == kOpen &&
          !roll->reason.empty() && !(first && first->reason == roll->reason);
      fail(
          ErrorKind::kTimeout,
          "fused: creating the group of {} timed out after {} ms on rank {}: "
          "{}",
          size_,
          deadline.timeout().count(),
          rank_,
          said        ? roll->reason
              : heard ? "rank 0 was there, but it waits for others"
                      : "rank 0 did not answer in the store");
    }
  }
}

void Meeting::withdraw(const std::string& reason) noexcept {
  try {
    spent.get().add(rank_, self_.token);
    const std::string text =
        reason.empty() ? "unknown" : reason.substr(0, kReasonBytes);
    write_entry(text);
    if (rank_ == 0 && !final_) {
      write_roll(kFailed, text, known_);
    }
  } catch (const std::exception&) {
    // The store may be what failed. Then the peers wait for their deadline.
  }
}

std::string Meeting::reason_of(int rank, const PeerInfo& met) noexcept {
  try {
    const auto entry = read_entry(rank);
    return entry && entry->info.token == met.token ? entry->reason
                                                   : std::string();
  } catch (const std::exception&) {
    return {};
  }
}

} // namespace fusedpg
