#include "aggregate/udp_sums.hpp"

#include <algorithm>
#include <bit>

namespace fusedpg::aggregate::udp {
namespace {

// A session that has been silent for so long goes where another one needs its
// place, or the aggregator's user wants it to end.
constexpr std::chrono::minutes kIdle{10};
// The same where a worker has left: nothing can be added up any more, and who
// still needs a last result asks for it twice a second.
constexpr std::chrono::seconds kLeft{3};
// Results that a worker may answer earlier than one that was sent before them,
// as the network may change their order.
constexpr uint64_t kOvertakes = 4;

uint32_t bit_of(uint8_t rank) {
  return uint32_t{1} << rank;
}

uint32_t all_of(uint8_t workers) {
  return workers == kMostWorkers ? ~uint32_t{0} : bit_of(workers) - 1;
}

} // namespace

Sums::Sums(
    const Key128& secret,
    std::function<uint32_t(uint32_t)> most_slots,
    size_t most_sessions)
    : secret_(secret),
      most_slots_(std::move(most_slots)),
      most_sessions_(most_sessions) {}

Sums::Stats Sums::stats() const {
  Stats stats = stats_;
  stats.active = sessions_.size();
  return stats;
}

void Sums::take(
    const Address& from,
    uint8_t* bytes,
    size_t size,
    Clock::time_point now,
    const Send& send) {
  if (size == sizeof(Control) &&
      bytes[0] >= static_cast<uint8_t>(Kind::kJoin)) {
    Control said;
    std::memcpy(&said, bytes, sizeof said);
    if (said.proved(secret_)) {
      control(from, said, now, send);
      return;
    }
  } else if (
      const auto member = members_.find(from);
      member != members_.end() && size >= packet_bytes(kSmallNumel)) {
    packet(member->second, bytes, size, now, send);
    return;
  }
  ++stats_.wrong;
}

Key128 Sums::cookie(const Address& from, const Control& said) const {
  std::array<uint8_t, sizeof(Address) + 17> text{};
  std::memcpy(text.data(), &from, sizeof from);
  std::memcpy(text.data() + sizeof from, said.session.data(), 16);
  text[sizeof from + 16] = said.rank;
  return siphash(baker_, text.data(), text.size());
}

void Sums::control(
    const Address& from,
    const Control& said,
    Clock::time_point now,
    const Send& send) {
  const auto found = sessions_.find(said.session);
  if (said.kind == Kind::kLeave || said.kind == Kind::kResult) {
    const auto member = members_.find(from);
    if (found == sessions_.end() || member == members_.end() ||
        member->second.session != found->second.get()) {
      ++stats_.stale;
      return;
    }
    Session& session = *found->second;
    session.heard = now;
    if (said.kind == Kind::kResult) {
      resend(session, from, said, send);
      return;
    }
    session.left |= bit_of(member->second.rank);
    if (session.left == all_of(session.workers)) {
      remove(session, now);
    }
    return;
  }
  if (said.kind != Kind::kJoin) {
    ++stats_.wrong;
    return;
  }
  Control answer = said;
  Session* session = found == sessions_.end() ? nullptr : found->second.get();
  const bool inside = session != nullptr && members_.contains(from) &&
      members_.at(from).session == session &&
      members_.at(from).rank == said.rank;
  if (!inside && !same_secret(said.cookie, cookie(from, said))) {
    // Whoever repeats what somebody said once does not get this.
    answer.kind = Kind::kChallenge;
    answer.cookie = cookie(from, said);
  } else {
    answer.refusal = inside ? Refusal::kNone : join(from, said, now, session);
    if (answer.refusal == Refusal::kNone) {
      answer.kind = Kind::kWelcome;
      answer.slots = session->slots;
    } else {
      answer.kind = Kind::kRefused;
      ++stats_.refused;
    }
  }
  answer.prove(secret_);
  send(from, reinterpret_cast<const uint8_t*>(&answer), sizeof answer);
}

void Sums::resend(
    const Session& session,
    const Address& to,
    const Control& said,
    const Send& send) {
  const size_t slot = said.slots & ~kSecondSet;
  if (slot >= session.slots) {
    ++stats_.wrong;
    return;
  }
  const bool second = (said.slots & kSecondSet) != 0;
  const Place& place = session.places[slot + (second ? session.slots : 0)];
  if (place.complete && place.operation == said.operation &&
      place.packet == said.packet) {
    ++stats_.resent;
    send(to, place.result.data(), place.result.size());
  } else {
    ++stats_.stale;
  }
}

Refusal Sums::join(
    const Address& from,
    const Control& said,
    Clock::time_point now,
    Session*& session) {
  if (said.workers == 0 || said.workers > kMostWorkers ||
      said.rank >= said.workers || said.slots == 0 ||
      (said.numel != kSmallNumel && said.numel != kLargeNumel)) {
    return Refusal::kNonsense;
  }
  if (session == nullptr) {
    if (std::any_of(over_.begin(), over_.end(), [&](const auto& one) {
          return one.second == said.session;
        })) {
      return Refusal::kOver;
    }
    if (drains_) {
      return Refusal::kDrains;
    }
    if (sessions_.size() >= most_sessions_ && !make_room(now)) {
      return Refusal::kFull;
    }
    auto made = std::make_unique<Session>();
    made->id = said.session;
    made->key = session_key(secret_, said.session);
    made->workers = said.workers;
    made->with_seal = said.with_seal != 0;
    made->numel = said.numel;
    const uint32_t most =
        std::clamp<uint32_t>(most_slots_(said.workers), 1, kMostSlots);
    made->slots = static_cast<uint16_t>(
        std::bit_floor(std::min<uint32_t>(said.slots, most)));
    made->addresses.resize(said.workers);
    made->places.resize(size_t{2} * made->slots);
    made->sent.resize(said.workers);
    made->newest.resize(said.workers);
    made->heard = now;
    session = made.get();
    sessions_[said.session] = std::move(made);
    ++stats_.sessions;
  }
  if (session->workers != said.workers || session->numel != said.numel ||
      session->with_seal != (said.with_seal != 0)) {
    return Refusal::kDiffers;
  }
  const auto former = members_.find(from);
  if ((session->joined & bit_of(said.rank)) != 0 ||
      (former != members_.end() && former->second.session == session)) {
    return Refusal::kTaken;
  }
  if (former != members_.end()) { // its socket is somebody else's now
    Session& other = *former->second.session;
    other.left |= bit_of(former->second.rank);
    other.addresses[former->second.rank] = {};
    if (other.left == all_of(other.workers)) {
      remove(other, now);
    }
  }
  session->joined |= bit_of(said.rank);
  session->addresses[said.rank] = from;
  session->heard = now;
  members_[from] = {session, said.rank};
  return Refusal::kNone;
}

bool Sums::make_room(Clock::time_point now) {
  for (const auto& [id, session] : sessions_) {
    const auto most = session->left == 0 ? Clock::duration(kIdle) : kLeft;
    if (now - session->heard >= most) {
      remove(*session, now);
      return true;
    }
  }
  return false;
}

void Sums::tick(Clock::time_point now) {
  while (!over_.empty() && now - over_.front().first >= kIdle) {
    over_.pop_front();
  }
  while (drains_ && make_room(now)) {
  }
}

void Sums::remove(Session& session, Clock::time_point now) {
  for (const Address& address : session.addresses) {
    members_.erase(address);
  }
  over_.emplace_back(now, session.id);
  sessions_.erase(over_.back().second);
}

void Sums::packet(
    const Member& member,
    uint8_t* bytes,
    size_t size,
    Clock::time_point now,
    const Send& send) {
  Session& session = *member.session;
  const size_t packet = packet_bytes(session.numel);
  const Header header = Header::of(bytes);
  const bool second = (header.pool & kSecondSet) != 0;
  const size_t slot = header.pool & ~kSecondSet;
  // The whole number of the operation is near to the newest one's.
  const uint64_t operation = session.operation +
      static_cast<uint64_t>(static_cast<int64_t>(static_cast<int8_t>(
          static_cast<uint8_t>(header.job - session.operation))));
  if (size != packet + (session.with_seal ? kSealBytes : 0) ||
      header.type_and_size != Header::type_and_size_of(session.numel) ||
      slot >= session.slots ||
      (session.with_seal &&
       !sealed(session.key, bytes, packet, operation, member.rank))) {
    ++stats_.wrong;
    return;
  }
  session.heard = now;
  const size_t index = slot + (second ? session.slots : 0);
  Place& place = session.places[index];
  const auto older = [&] {
    return operation != place.operation ? operation < place.operation
                                        : header.packet < place.packet;
  };
  const bool same = place.begun && operation == place.operation &&
      header.packet == place.packet;
  if (!same) {
    if (place.begun && older()) {
      ++stats_.stale;
      return;
    }
    if (operation > session.operation + 1 || (place.begun && !place.complete)) {
      ++stats_.wrong; // nobody is two operations ahead, or leaves a sum behind
      return;
    }
    if (operation + 1 < session.operation) {
      ++stats_.stale;
      return;
    }
    place.begun = true;
    place.complete = false;
    place.operation = operation;
    place.packet = header.packet;
    place.seen = 0;
    place.asked = 0;
    place.exponents = {};
    place.sums.assign(session.numel, 0);
    session.operation = std::max(session.operation, operation);
  }
  const uint32_t bit = bit_of(member.rank);
  if ((place.seen & bit) != 0) {
    ++stats_.repeated;
    if (place.complete) {
      ++stats_.resent;
      send(
          session.addresses[member.rank],
          place.result.data(),
          place.result.size());
    } else if (session.with_seal) {
      Control answer;
      answer.kind = Kind::kWaiting;
      answer.session = session.id;
      answer.operation = operation;
      answer.packet = header.packet;
      answer.missing = all_of(session.workers) & ~place.seen;
      answer.left = session.left;
      answer.prove(secret_);
      send(
          session.addresses[member.rank],
          reinterpret_cast<const uint8_t*>(&answer),
          sizeof answer);
    }
    return;
  }
  ++stats_.packets;
  place.seen |= bit;
  add(place, session, bytes);
  const Place& former = other_place(session, index);
  if (former.complete && former.operation == operation) {
    uint64_t& newest = session.newest[member.rank];
    newest = std::max(newest, former.number);
    if ((place.asked & bit) == 0) {
      const auto trip = now - former.completed;
      session.trip +=
          (trip - session.trip) / (session.trip.count() == 0 ? 1 : 8);
    }
  }
  if (place.seen == all_of(session.workers)) {
    ++stats_.sums;
    place.completed = now;
    place.number = ++session.results;
    for (size_t r = 0; session.with_seal && r < session.workers; ++r) {
      session.sent[r].push_back(
          {.number = place.number,
           .operation = operation,
           .packet = header.packet,
           .place = static_cast<uint32_t>(index)});
    }
    finish(place, session, header.pool);
    for (const Address& worker : session.addresses) {
      if (worker.length != 0) {
        send(worker, place.result.data(), place.result.size());
      }
    }
  }
  ask_for_overtaken(session, member.rank, now, send);
}

Sums::Place& Sums::other_place(Session& session, size_t index) {
  const size_t slots = session.slots;
  return session.places[index < slots ? index + slots : index - slots];
}

void Sums::ask_for_overtaken(
    Session& session,
    uint8_t rank,
    Clock::time_point now,
    const Send& send) {
  auto& sent = session.sent[rank];
  while (!sent.empty() &&
         sent.front().number + kOvertakes < session.newest[rank]) {
    Sent one = sent.front();
    sent.pop_front();
    Place& next = other_place(session, one.place);
    const bool begun = next.begun && next.operation == one.operation &&
        next.packet > one.packet;
    const bool answered = begun && (next.seen & bit_of(rank)) != 0;
    if (answered || one.operation != session.operation) {
      continue;
    }
    // There may be no such packet if nobody has sent it: it is asked for once.
    const bool asks = begun ? one.asked + 3 * session.trip / 2 < now
                            : one.asked == Clock::time_point();
    if (asks) {
      ++stats_.asked;
      one.asked = now;
      next.asked |= begun ? bit_of(rank) : 0;
      Control question;
      question.kind = Kind::kNext;
      question.session = session.id;
      question.operation = one.operation;
      question.packet = one.packet;
      question.prove(secret_);
      send(
          session.addresses[rank],
          reinterpret_cast<const uint8_t*>(&question),
          sizeof question);
    }
    one.number = session.results; // it is looked at again then
    sent.push_back(one);
  }
}

void Sums::add(Place& place, const Session& session, const uint8_t* bytes)
    const {
  const auto* exponents = reinterpret_cast<const int8_t*>(bytes + kHeaderBytes);
  place.exponents.first = std::max(place.exponents.first, exponents[0]);
  place.exponents.second = std::max(place.exponents.second, exponents[1]);
  const uint8_t* from = bytes + kHeaderBytes + kExponentBytes;
  for (size_t i = 0; i < session.numel; ++i) {
    place.sums[i] += big_endian(from + 4 * i); // as a switch, modulo 2^32
  }
}

void Sums::finish(Place& place, const Session& session, uint16_t pool) {
  const size_t bytes = packet_bytes(session.numel);
  place.complete = true;
  place.result.resize(bytes + kSealRoom);
  Header header;
  header.type_and_size = Header::type_and_size_of(session.numel);
  header.job = static_cast<uint8_t>(place.operation);
  header.packet = place.packet;
  header.pool = pool;
  uint8_t* to = place.result.data();
  header.put(to);
  to[kHeaderBytes] = static_cast<uint8_t>(place.exponents.first);
  to[kHeaderBytes + 1] = static_cast<uint8_t>(place.exponents.second);
  for (size_t i = 0; i < session.numel; ++i) {
    put_big_endian(to + kHeaderBytes + kExponentBytes + 4 * i, place.sums[i]);
  }
  if (session.with_seal) {
    seal(session.key, to, bytes, place.operation, kFromAggregator);
  }
  place.result.resize(bytes + (session.with_seal ? kSealBytes : 0));
}

} // namespace fusedpg::aggregate::udp
