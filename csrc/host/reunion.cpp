#include "host/reunion.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/some_of.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

constexpr size_t kMostText = 1000; // bytes of a reason, or of settings
constexpr size_t kFiles = 8; // room for more than a hello has, to close others
// A rank that has given up before this one began may be about to try again.
constexpr std::chrono::seconds kReunionGrace{5};
constexpr int kLookMs = 20;
constexpr int kRetryMs = 1;

Key128 hash(const std::string& text) {
  return siphash(Key128{}, text.data(), text.size());
}

Key128 group_key(const std::string& name, const std::vector<int>& ranks) {
  std::string what = name;
  for (const int rank : ranks) {
    what += formatted(" {}", rank);
  }
  return hash(what);
}

} // namespace

// --- links -------------------------------------------------------------------

Links::Links(int self, std::string host_id, std::map<int, Known> known)
    : self_(self),
      host_id_(std::move(host_id)) {
  for (auto& [rank, one] : known) {
    peers_[rank].known = std::move(one);
  }
}

bool Links::know(const std::vector<int>& ranks, const std::string& host_id)
    const {
  return !origin_.forked() && host_id == host_id_ &&
      std::all_of(ranks.begin(), ranks.end(), [this](int rank) {
        return peers_.count(rank) != 0;
      });
}

void Links::decline(
    const std::string& name,
    const std::vector<int>& ranks,
    const Deadline& deadline) {
  const bool known = std::all_of(ranks.begin(), ranks.end(), [this](int rank) {
    return peers_.count(rank) != 0;
  });
  if (!known || origin_.forked()) {
    return; // no rank thinks so, or a child would speak for its parent
  }
  Note note;
  note.kind = Kind::kDeclined;
  note.group = group_key(name, ranks);
  for (const int rank : ranks) {
    const auto told = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return tell(rank, note, {}) || peers_.at(rank).ended;
    };
    while (rank != self_ && !told() && !deadline.expired()) {
      while_waiting();
      std::this_thread::sleep_for(std::chrono::milliseconds(kRetryMs));
    }
  }
}

// Messages are short, so the kernel takes all of one or nothing.
bool Links::tell(int peer, Note note, const std::string& text, int file) {
  Peer& to = peers_.at(peer);
  const std::string said = text.substr(0, kMostText);
  note.bytes = static_cast<uint32_t>(said.size());
  iovec parts[2] = {
      {&note, sizeof note}, {const_cast<char*>(said.data()), said.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
  }
  const ssize_t sent =
      sendmsg(to.known.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent == static_cast<ssize_t>(sizeof note + said.size())) {
    return true;
  }
  const bool passes = sent < 0 &&
      (errno == EAGAIN || errno == EINTR || errno == ENOBUFS ||
       errno == ETOOMANYREFS);
  to.ended = to.ended || !passes;
  return false;
}

void Links::hear(int rank) {
  Peer& peer = peers_.at(rank);
  while (!peer.ended) {
    const bool in_text = peer.got >= sizeof peer.note;
    const size_t at = in_text ? peer.got - sizeof peer.note : peer.got;
    char* into =
        in_text ? peer.text.data() : reinterpret_cast<char*>(&peer.note);
    const size_t all = in_text ? peer.text.size() : sizeof peer.note;
    iovec part{into + at, all - at};
    alignas(cmsghdr) char control[CMSG_SPACE(kFiles * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    std::optional<NoFork> hold(std::in_place); // for the file that may come
    const ssize_t got = recvmsg(
        peer.known.socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got <= 0) {
      if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        peer.ended = true;
      }
      return;
    }
    peer.got += static_cast<size_t>(got);
    peer.lost_file = peer.lost_file || (message.msg_flags & MSG_CTRUNC) != 0;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr;
         c = CMSG_NXTHDR(&message, c)) {
      for (size_t i = 0;
           c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
           CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len;
           ++i) {
        int received = -1;
        std::memcpy(
            &received, CMSG_DATA(c) + i * sizeof received, sizeof received);
        peer.file = Fd(received, *hold);
      }
    }
    hold.reset();
    if (!in_text && peer.got == sizeof peer.note) {
      if (peer.note.protocol != kProtocol || peer.note.bytes > kMostText) {
        peer.ended = true; // it speaks otherwise
        return;
      }
      peer.text.assign(peer.note.bytes, '\0');
    }
    if (peer.got == sizeof peer.note + peer.text.size() &&
        peer.got >= sizeof peer.note) {
      take(peer);
      peer.got = 0;
      peer.text.clear();
      peer.file.reset();
      peer.lost_file = false;
    }
  }
}

void Links::take(Peer& peer) {
  const Note& note = peer.note;
  Reunion::Other* other = nullptr;
  if (const auto found = under_way_.find(note.group);
      found != under_way_.end()) {
    for (Reunion::Other& one : found->second->others_) {
      // A rank that has met this one may be at the next group of that name.
      const bool met = one.last.seen == found->second->attempt_ &&
          one.last.attempt != note.mine;
      if (&peers_.at(one.rank) == &peer && !met) {
        other = &one;
      }
    }
  }
  LastMessage* last =
      other != nullptr ? &other->last : &peer.last_messages[note.group];
  switch (note.kind) {
    case Kind::kHello: {
      // It tries again, and no longer knows what it was told.
      const bool again = last->attempt != 0 && last->attempt != note.mine;
      *last = {};
      last->attempt = note.mine;
      last->memory = std::move(peer.file);
      last->lost_memory = peer.lost_file;
      last->settings = peer.text;
      if (other != nullptr) {
        other->answered = false;
        other->told = other->told && !again;
      }
      break;
    }
    case Kind::kSeen:
      if (last->attempt == note.mine) {
        last->seen = note.yours;
      }
      break;
    case Kind::kGone:
      *last = {};
      last->attempt = note.mine;
      last->reason = peer.text.empty() ? "unknown" : peer.text;
      last->now = other != nullptr;
      break;
    case Kind::kDeclined:
      *last = {};
      last->declined = true;
      break;
  }
}

// --- a reunion ---------------------------------------------------------------

Reunion::Reunion(
    std::shared_ptr<Links> links,
    const std::string& name,
    std::vector<int> ranks,
    std::string settings)
    : links_(std::move(links)),
      ranks_(std::move(ranks)),
      settings_(std::move(settings)) {
  group_ = group_key(name, ranks_);
  while (attempt_ == 0) {
    std::memcpy(&attempt_, random_key().data(), sizeof attempt_);
  }
  const std::lock_guard<std::mutex> lock(links_->mutex_);
  if (links_->under_way_.count(group_) != 0) {
    fail(
        ErrorKind::kInvalid,
        "fused: two groups with the name \"{}\" are created at the same time",
        name);
  }
  for (const int rank : ranks_) {
    Other other{rank};
    if (rank != links_->self()) {
      links_->hear(rank); // what was said before this rank came
      auto& last_messages = links_->peers_.at(rank).last_messages;
      if (const auto said = last_messages.find(group_);
          said != last_messages.end()) {
        other.last = std::move(said->second);
        last_messages.erase(said);
      }
    }
    others_.push_back(std::move(other));
  }
  links_->under_way_.emplace(group_, this);
}

Reunion::~Reunion() {
  const std::lock_guard<std::mutex> lock(links_->mutex_);
  const auto found = links_->under_way_.find(group_);
  if (found != links_->under_way_.end() && found->second == this) {
    links_->under_way_.erase(found);
  }
}

void Reunion::withdraw(const std::string& reason) noexcept {
  if (alike_) {
    return;
  }
  try {
    const std::lock_guard<std::mutex> lock(links_->mutex_);
    for (const Other& other : others_) {
      if (other.rank != links_->self()) {
        Links::Note note;
        note.kind = Links::Kind::kGone;
        note.group = group_;
        note.mine = attempt_;
        links_->tell(other.rank, note, reason);
      }
    }
  } catch (const std::exception&) {
    // Then they wait for their deadline.
  }
}

// It may end now: nothing more is needed of it.
bool Reunion::met_with(const Other& other) const {
  return other.answered && other.last.seen == attempt_;
}

// Under the lock. True: met.
bool Reunion::step(int memory_fd) {
  bool met = true;
  for (Other& other : others_) {
    if (other.rank == links_->self()) {
      continue;
    }
    Links::Note note;
    note.group = group_;
    note.mine = attempt_;
    other.told =
        other.told || links_->tell(other.rank, note, settings_, memory_fd);
    links_->hear(other.rank);
    if (other.last.memory && !other.answered) {
      note.kind = Links::Kind::kSeen;
      note.yours = other.last.attempt;
      // In order: a hello comes before any answer.
      other.answered = other.told && links_->tell(other.rank, note, {});
    }
    met = met && met_with(other);
  }
  return met;
}

std::vector<fusedpg::Peer> Reunion::exchange(
    int memory_fd,
    const Deadline& deadline) {
  for (bool quiet = false;; quiet = !wait()) {
    const std::lock_guard<std::mutex> lock(links_->mutex_);
    if (step(memory_fd)) {
      // Another thread may hear more by now: that is for a later one.
      links_->under_way_.erase(group_);
      break;
    }
    for (const Other& other : others_) {
      check(other, deadline, quiet);
    }
  }
  std::string all;
  for (size_t p = 0; p < others_.size(); ++p) {
    const Other& other = others_[p];
    const bool self = other.rank == links_->self();
    const uint64_t attempt = self ? attempt_ : other.last.attempt;
    all.append(reinterpret_cast<const char*>(&attempt), sizeof attempt);
    if (!self && other.last.settings != settings_.substr(0, kMostText)) {
      alike_ = true;
      fail(
          ErrorKind::kMismatch,
          "fused: ranks have different settings; here: {}; rank {}: {}",
          settings_,
          p,
          other.last.settings);
    }
  }
  id_ = hash(all);
  std::vector<fusedpg::Peer> peers(others_.size());
  for (size_t p = 0; p < others_.size(); ++p) {
    const auto& known = links_->peers_.at(others_[p].rank).known;
    peers[p].memory = std::move(others_[p].last.memory);
    peers[p].process = known.process;
    peers[p].pid = known.info.pid;
  }
  return peers;
}

// Throws when waiting for this rank is in vain.
void Reunion::check(const Other& other, const Deadline& deadline, bool quiet) {
  if (other.rank == links_->self()) {
    return;
  }
  if (other.last.declined) {
    alike_ = true;
    throw MeetByStore();
  }
  const auto place = [&](const Other& one) {
    return static_cast<int>(&one - others_.data());
  };
  const auto& peer = links_->peers_.at(other.rank);
  if (!other.last.reason.empty() &&
      (other.last.now || peer.ended || Clock::now() - begun_ > kReunionGrace)) {
    fail_for(place(other), other.last.reason);
  }
  if (other.last.lost_memory) {
    errno = EMFILE;
    fail_errno(
        formatted("fused: receiving the arena of rank {}", place(other)));
  }
  if (!met_with(other) &&
      (peer.ended || (quiet && peer.known.process->ended()))) {
    fail(
        ErrorKind::kPeerDead,
        "fused: rank {} (pid {}) failed or ended while the group was being "
        "created, or has destroyed the group of all ranks",
        place(other),
        peer.known.info.pid);
  }
  if (deadline.expired()) {
    std::vector<std::string> missing, here;
    int self = 0;
    for (const Other& one : others_) {
      const std::string name = formatted("rank {}", place(one));
      const PeerInfo& info = links_->peers_.at(one.rank).known.info;
      if (one.rank == links_->self()) {
        self = place(one);
      } else if (
          one.last.seen != attempt_ && !one.last.memory &&
          one.last.reason.empty()) {
        missing.push_back(formatted("{} (pid {})", name, info.pid));
        continue;
      }
      here.push_back(
          formatted("{} (host {}, pid {})", name, info.host_name, info.pid));
    }
    fail(
        ErrorKind::kTimeout,
        "fused: creating the group of {} timed out after {} ms on rank {}: {} "
        "of {} ranks have not come: {}; {} have: {}",
        others_.size(),
        deadline.timeout().count(),
        self,
        missing.size(),
        others_.size(),
        some_of(missing),
        here.size(),
        some_of(here));
  }
}

bool Reunion::wait() {
  while_waiting();
  std::vector<pollfd> sockets;
  bool retry = false; // or another thread may read what is for this one
  {
    const std::lock_guard<std::mutex> lock(links_->mutex_);
    retry = links_->under_way_.size() > 1;
    for (const Other& other : others_) {
      if (other.rank != links_->self()) {
        sockets.push_back(
            {links_->peers_.at(other.rank).known.socket.get(), POLLIN, 0});
        retry = retry || !other.told || (other.last.memory && !other.answered);
      }
    }
  }
  return poll(sockets.data(), sockets.size(), retry ? kRetryMs : kLookMs) != 0;
}

} // namespace fusedpg
