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
  const Visit visit{from, now, send};
  const auto member = members_.find(from);
  if (const auto said = Control::of(bytes, size, secret_)) {
    control(visit, *said);
  } else if (member != members_.end() && size >= packet_bytes(kSmallNumel)) {
    packet(visit, member->second, bytes, size);
  } else {
    ++stats_.wrong;
  }
}

// Answers the sender of the datagram that has just come.
void Sums::say(const Visit& visit, Control said) const {
  said.prove(secret_);
  visit.send(visit.from, said.data(), sizeof said);
}

void Sums::send_result(
    const Visit& visit,
    const Address& to,
    const Place& place) {
  visit.send(to, place.result.data(), place.result.size());
}

Key128 Sums::cookie(const Address& from, const Control& said) const {
  std::array<uint8_t, sizeof(Address) + 17> text{};
  std::memcpy(text.data(), &from, sizeof from);
  std::memcpy(text.data() + sizeof from, said.session.data(), 16);
  text[sizeof from + 16] = said.rank;
  return siphash(cookie_key_, text.data(), text.size());
}

void Sums::control(const Visit& visit, const Control& said) {
  const auto found = sessions_.find(said.session);
  if (said.kind == Kind::kLeave || said.kind == Kind::kResult) {
    const auto member = members_.find(visit.from);
    if (found == sessions_.end() || member == members_.end() ||
        member->second.session != found->second.get()) {
      ++stats_.stale;
      return;
    }
    Session& session = *found->second;
    session.heard = visit.now;
    if (said.kind == Kind::kResult) {
      resend(visit, session, said);
    } else {
      leave(session, member->second.rank, visit.now);
    }
    return;
  }
  if (said.kind != Kind::kJoin) {
    ++stats_.wrong;
    return;
  }
  Control answer = said;
  Session* session = found == sessions_.end() ? nullptr : found->second.get();
  const auto member = members_.find(visit.from);
  const bool inside = session != nullptr && member != members_.end() &&
      member->second.session == session && member->second.rank == said.rank;
  if (!inside && !same_secret(said.cookie, cookie(visit.from, said))) {
    // The cookie goes to the address of the question alone: a replayed datagram
    // does not lead to it.
    answer.kind = Kind::kChallenge;
    answer.cookie = cookie(visit.from, said);
  } else {
    answer.refusal = inside ? Refusal::kNone : join(visit, said, session);
    if (answer.refusal == Refusal::kNone) {
      answer.kind = Kind::kWelcome;
      answer.slots = session->slots;
    } else {
      answer.kind = Kind::kRefused;
      ++stats_.refused;
    }
  }
  say(visit, answer);
}

void Sums::resend(
    const Visit& visit,
    const Session& session,
    const Control& said) {
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
    send_result(visit, visit.from, place);
  } else {
    ++stats_.stale;
  }
}

Refusal Sums::join(const Visit& visit, const Control& said, Session*& session) {
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
    if (sessions_.size() >= most_sessions_ && !make_room(visit.now)) {
      return Refusal::kFull;
    }
    auto made = std::make_unique<Session>();
    made->id = said.session;
    made->format = {
        session_key(secret_, said.session), said.numel, said.with_seal != 0};
    made->workers = said.workers;
    const uint32_t most =
        std::clamp<uint32_t>(most_slots_(said.workers), 1, kMostSlots);
    made->slots = static_cast<uint16_t>(
        std::bit_floor(std::min<uint32_t>(said.slots, most)));
    made->addresses.resize(said.workers);
    made->places.resize(size_t{2} * made->slots);
    made->sent.resize(said.workers);
    made->newest.resize(said.workers);
    session = made.get();
    sessions_[said.session] = std::move(made);
    ++stats_.sessions;
  }
  if (session->workers != said.workers || session->format.numel != said.numel ||
      session->format.with_seal != (said.with_seal != 0)) {
    return Refusal::kDiffers;
  }
  const auto former = members_.find(visit.from);
  if ((session->joined & bit_of(said.rank)) != 0 ||
      (former != members_.end() && former->second.session == session)) {
    return Refusal::kTaken;
  }
  if (former != members_.end()) { // its socket is somebody else's now
    Session& other = *former->second.session;
    other.addresses[former->second.rank] = {};
    leave(other, former->second.rank, visit.now);
  }
  session->joined |= bit_of(said.rank);
  session->addresses[said.rank] = visit.from;
  session->heard = visit.now;
  members_[visit.from] = {session, said.rank};
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

void Sums::leave(Session& session, uint8_t rank, Clock::time_point now) {
  session.left |= bit_of(rank);
  if (session.left == all_of(session.workers)) {
    remove(session, now);
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
    const Visit& visit,
    const Member& member,
    uint8_t* bytes,
    size_t size) {
  Session& session = *member.session;
  const auto packet =
      session.format.read(bytes, size, session.operation, member.rank);
  const size_t slot = packet ? packet->pool & ~kSecondSet : 0;
  if (!packet || slot >= session.slots) {
    ++stats_.wrong;
    return;
  }
  const uint64_t operation = packet->operation;
  session.heard = visit.now;
  const bool second = (packet->pool & kSecondSet) != 0;
  const size_t index = slot + (second ? session.slots : 0);
  Place& place = session.places[index];
  const auto older = [&] {
    return operation != place.operation ? operation < place.operation
                                        : packet->number < place.packet;
  };
  const bool same = place.begun && operation == place.operation &&
      packet->number == place.packet;
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
    place.packet = packet->number;
    place.seen = 0;
    place.asked = 0;
    place.exponents = {};
    place.sums.assign(session.format.numel, 0);
    session.operation = std::max(session.operation, operation);
  }
  const uint32_t bit = bit_of(member.rank);
  if ((place.seen & bit) != 0) {
    ++stats_.repeated;
    if (place.complete) {
      ++stats_.resent;
      send_result(visit, visit.from, place);
    } else if (session.format.with_seal) {
      Control answer;
      answer.kind = Kind::kWaiting;
      answer.session = session.id;
      answer.operation = operation;
      answer.packet = packet->number;
      answer.missing = all_of(session.workers) & ~place.seen;
      answer.left = session.left;
      say(visit, answer);
    }
    return;
  }
  ++stats_.packets;
  place.seen |= bit;
  place.exponents.first =
      std::max(place.exponents.first, packet->exponents.first);
  place.exponents.second =
      std::max(place.exponents.second, packet->exponents.second);
  for (size_t i = 0; i < session.format.numel; ++i) {
    // Modulo 2^32, as a switch adds.
    place.sums[i] += PacketFormat::element(bytes, i);
  }
  const Place& former = other_place(session, index);
  if (former.complete && former.operation == operation) {
    uint64_t& newest = session.newest[member.rank];
    newest = std::max(newest, former.number);
    if ((place.asked & bit) == 0) {
      const auto trip = visit.now - former.completed;
      session.trip +=
          (trip - session.trip) / (session.trip.count() == 0 ? 1 : 8);
    }
  }
  if (place.seen == all_of(session.workers)) {
    ++stats_.sums;
    place.complete = true;
    place.completed = visit.now;
    place.number = ++session.results;
    for (size_t r = 0; session.format.with_seal && r < session.workers; ++r) {
      session.sent[r].push_back(
          {.number = place.number,
           .operation = operation,
           .packet = packet->number,
           .place = static_cast<uint32_t>(index)});
    }
    session.format.write(
        {.operation = operation,
         .number = packet->number,
         .pool = packet->pool,
         .exponents = place.exponents},
        place.sums.data(),
        place.result);
    for (const Address& worker : session.addresses) {
      if (worker.length != 0) {
        send_result(visit, worker, place);
      }
    }
  }
  ask_for_overtaken(visit, session, member.rank);
}

Sums::Place& Sums::other_place(Session& session, size_t index) {
  const size_t slots = session.slots;
  return session.places[index < slots ? index + slots : index - slots];
}

void Sums::ask_for_overtaken(
    const Visit& visit,
    Session& session,
    uint8_t rank) {
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
    const bool asks = begun ? one.asked + 3 * session.trip / 2 < visit.now
                            : one.asked == Clock::time_point();
    if (asks) {
      ++stats_.asked;
      one.asked = visit.now;
      next.asked |= begun ? bit_of(rank) : 0;
      Control question;
      question.kind = Kind::kNext;
      question.session = session.id;
      question.operation = one.operation;
      question.packet = one.packet;
      say(visit, question);
    }
    one.number = session.results; // it is looked at again then
    sent.push_back(one);
  }
}

} // namespace fusedpg::aggregate::udp
