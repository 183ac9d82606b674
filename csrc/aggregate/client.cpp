#include "aggregate/client.hpp"

#include <algorithm>
#include <cstring>

#include "aggregate/block_stream.hpp"
#include "base/error.hpp"
#include "net/tcp_dial.hpp"

namespace fusedpg::aggregate {
namespace {

// Between two looks at what a wait does not hear of.
constexpr std::chrono::milliseconds kLook{20};

} // namespace

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
    if (error.kind() == ErrorKind::kMismatch) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: aggregator {} ({}) says what makes no sense",
          aggregator,
          place);
    }
    throw;
  }
}

Head Client::begin(const Reduction& of, uint32_t block, uint32_t stripe) {
  Head head;
  head.sequence = of.sequence;
  head.count = of.count;
  head.segment = kSegmentBytes / dtype_size(of.args.dtype);
  head.divisor = of.args.divisor;
  head.factor = of.args.factor;
  head.dtype = static_cast<uint32_t>(of.args.dtype);
  head.op = static_cast<uint32_t>(of.args.op);
  head.block = block;
  head.stripe = stripe;
  const NetBuffer said(sizeof head);
  std::memcpy(said.data(), &head, sizeof head);
  for (size_t a = 0; a < places_.size(); ++a) {
    with(a, of.deadline, [&] {
      transport_->send(
          workers_ + static_cast<int>(a),
          static_cast<uint32_t>(Tag::kHead),
          said);
    });
    of.moved.bytes_sent += said.bytes();
    ++of.moved.messages_sent;
  }
  return head;
}

void Client::all_reduce(const Reduction& of) {
  if (of.count == 0) {
    return;
  }
  const size_t element = dtype_size(of.args.dtype);
  const size_t aggregators = places_.size();
  const Head head = begin(of, 0, 0);
  const size_t segments = (of.count + head.segment - 1) / head.segment;
  std::vector<Transport::RequestPtr> slots(
      std::min(kSlots * aggregators, segments));
  for (size_t s = 0; s < segments + slots.size(); ++s) {
    Transport::RequestPtr& slot = slots[s % slots.size()];
    if (s >= slots.size()) {
      const size_t a = (s - slots.size()) % aggregators;
      with(a, of.deadline, [&] { slot->wait(of.deadline); });
    }
    if (s >= segments) {
      continue;
    }
    const size_t begin = s * head.segment;
    const size_t bytes =
        std::min<size_t>(head.segment, of.count - begin) * element;
    // The result takes the place of the contribution: it comes only when that
    // has arrived.
    const NetBuffer segment = NetBuffer::borrowed(
        static_cast<char*>(of.data) + begin * element, bytes);
    const size_t a = s % aggregators;
    with(a, of.deadline, [&] {
      slot = transport_->receive(
          workers_ + static_cast<int>(a),
          static_cast<uint32_t>(Tag::kResult),
          segment);
      transport_->send(
          workers_ + static_cast<int>(a),
          static_cast<uint32_t>(Tag::kContribution),
          segment);
    });
    of.moved.bytes_sent += bytes;
    ++of.moved.messages_sent;
    of.moved.bytes_received += bytes;
  }
}

Client::Shares Client::sparse_all_reduce(
    const Reduction& of,
    const uint64_t* bits,
    uint32_t block,
    uint32_t stripe) {
  if (of.count == 0) {
    return {};
  }
  const Head head = begin(of, block, stripe);
  const BlockLayout layout(head, places_.size());
  std::vector<BlockStream> streams;
  streams.reserve(places_.size());
  for (size_t a = 0; a < places_.size(); ++a) {
    streams.emplace_back(
        *transport_,
        workers_,
        a,
        layout,
        static_cast<char*>(of.data),
        bits,
        buffers_);
  }
  const auto each = [&](const auto& body) {
    for (size_t a = 0; a < streams.size(); ++a) {
      if (!streams[a].done()) {
        with(a, of.deadline, [&] { body(streams[a]); });
      }
    }
  };
  const auto done = [&] {
    return std::all_of(streams.begin(), streams.end(), [](const auto& one) {
      return one.done();
    });
  };
  while (!done()) {
    bool moves = false;
    each([&](BlockStream& one) { moves = one.move() || moves; });
    if (moves) {
      continue;
    }
    if (aborted_ || of.deadline.expired()) {
      each([&](BlockStream& one) { one.give_up(of.deadline); });
    }
    transport_->wait_briefly(std::min(of.deadline.left(), kLook));
  }
  Shares shares;
  for (const BlockStream& one : streams) {
    of.moved.bytes_sent += one.counts().bytes_sent;
    of.moved.bytes_received += one.counts().bytes_received;
    of.moved.messages_sent += one.counts().messages_sent;
    shares.blocks += one.counts().blocks;
    shares.contributions += one.counts().contributions;
  }
  return shares;
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
