#include "aggregate/client.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "net/tcp_dial.hpp"

namespace fusedpg::aggregate {

Client::Client(
    std::vector<std::string> places,
    std::unique_ptr<TcpTransport> transport,
    int workers)
    : places_(std::move(places)),
      transport_(std::move(transport)),
      workers_(workers) {}

void Client::with(
    size_t aggregator,
    const Deadline& deadline,
    const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string& place = places_[aggregator];
    if (error.kind() == ErrorKind::kTimeout) {
      fail(
          ErrorKind::kTimeout,
          "fused: no result of aggregator {} ({}) within {} ms: it waits for "
          "another rank, or is stopped or out of reach",
          aggregator,
          place,
          deadline.timeout().count());
    }
    if (error.kind() == ErrorKind::kPeerFailed) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: aggregator {} ({}) has closed its connections: it has ended, "
          "or a rank of this group has",
          aggregator,
          place);
    }
    throw;
  }
}

void Client::all_reduce(
    void* data,
    size_t count,
    const kernels::ReduceArgs& args,
    uint64_t sequence,
    const Deadline& deadline,
    OpStats& moved) {
  if (count == 0) {
    return;
  }
  const size_t element = dtype_size(args.dtype);
  Head head;
  head.sequence = sequence;
  head.count = count;
  head.segment = kSegmentBytes / element;
  head.divisor = args.divisor;
  head.factor = args.factor;
  head.dtype = static_cast<uint32_t>(args.dtype);
  head.op = static_cast<uint32_t>(args.op);
  const size_t aggregators = places_.size();
  const NetBuffer said(sizeof head);
  std::memcpy(said.data(), &head, sizeof head);
  const auto send = [&](size_t a, Tag tag, const NetBuffer& message) {
    transport_->send(
        workers_ + static_cast<int>(a), static_cast<uint32_t>(tag), message);
    moved.bytes_sent += message.bytes();
    ++moved.messages_sent;
  };
  for (size_t a = 0; a < aggregators; ++a) {
    with(a, deadline, [&] { send(a, Tag::kHead, said); });
  }
  const size_t segments = (count + head.segment - 1) / head.segment;
  std::vector<Transport::RequestPtr> slots(
      std::min(kSlots * aggregators, segments));
  for (size_t s = 0; s < segments + slots.size(); ++s) {
    Transport::RequestPtr& slot = slots[s % slots.size()];
    if (s >= slots.size()) {
      const size_t a = (s - slots.size()) % aggregators;
      with(a, deadline, [&] { slot->wait(deadline); });
    }
    if (s >= segments) {
      continue;
    }
    const size_t begin = s * head.segment;
    const size_t bytes =
        std::min<size_t>(head.segment, count - begin) * element;
    // The result takes the place of the contribution: it comes only when that
    // has arrived.
    const NetBuffer segment =
        NetBuffer::borrowed(static_cast<char*>(data) + begin * element, bytes);
    const size_t a = s % aggregators;
    with(a, deadline, [&] {
      slot = transport_->receive(
          workers_ + static_cast<int>(a),
          static_cast<uint32_t>(Tag::kResult),
          segment);
      send(a, Tag::kContribution, segment);
    });
    moved.bytes_received += bytes;
  }
}

std::string open_job(
    const std::string& place,
    const Key128& key,
    const Request& request,
    const Deadline& deadline,
    const std::function<void()>& check) {
  const TcpAddress door = front_door(place, key);
  std::string answer;
  try {
    const Fd socket = tcp::dial(door, 0, 0, deadline, check);
    tcp::say(socket, request.text(), deadline, check);
    answer = tcp::hear(socket, kMostRequestBytes, deadline, check);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kAborted) {
      throw;
    }
    fail(
        ErrorKind::kSystem,
        "fused: aggregator {} ({}): {}",
        request.index,
        place,
        std::string(error.what()).substr(std::strlen("fused: ")));
  }
  if (answer.starts_with("! ")) {
    fail(
        ErrorKind::kSystem,
        "fused: aggregator {} ({}) takes no job: {}",
        request.index,
        place,
        answer.substr(2));
  }
  // It may not know by which address the workers reach it.
  TcpAddress::of(answer);
  const size_t port = answer.find(' ', answer.find(' ') + 1);
  return door.socket.text() + answer.substr(port);
}

} // namespace fusedpg::aggregate
