#include "aggregate/block_stream.hpp"

#include <cstring>

#include "base/error.hpp"

namespace fusedpg::aggregate {
namespace {

// Messages that may be on their way: the link never waits for one to be packed.
constexpr size_t kAhead = 4;

} // namespace

BlockStream::BlockStream(
    TcpTransport& transport,
    int workers,
    size_t aggregator,
    const BlockLayout& layout,
    char* data,
    const uint64_t* bits,
    NetBuffers& buffers)
    : transport_(transport),
      peer_(workers + static_cast<int>(aggregator)),
      aggregator_(aggregator),
      layout_(layout),
      data_(data),
      bits_(bits),
      buffers_(buffers),
      next_(layout.next(bits, 0, aggregator)),
      header_comes_(transport.receive(peer_, kBlockHeaderTag, header_bytes_)) {}

bool BlockStream::over(const Transport::RequestPtr& request) {
  switch (transport_.state(*request)) {
    case TcpTransport::State::kUnderWay:
      return false;
    case TcpTransport::State::kLost:
      // Says why.
      request->wait(Deadline(std::chrono::seconds(1)));
      return true;
    default:
      return true;
  }
}

bool BlockStream::move() {
  const bool sent = send_some();
  return receive_some() || sent;
}

void BlockStream::give_up(const Deadline& deadline) {
  if (message_comes_) {
    message_comes_->wait(deadline);
  } else if (header_comes_) {
    header_comes_->wait(deadline);
  } else if (!sends_.empty()) {
    sends_.back().requests.back()->wait(deadline);
  }
}

bool BlockStream::send_some() {
  bool moved = false;
  while (!sends_.empty() && over(sends_.front().requests.back())) {
    if (sends_.front().message.data() != nullptr) {
      buffers_.give(std::move(sends_.front().message));
    }
    sends_.pop_front();
    moved = true;
  }
  while (!said_all_ && sends_.size() < kAhead) {
    Sent sent;
    BlockHeader header;
    NetBuffer body;
    if (next_ != kNoBlock) {
      sent.message = buffers_.take(layout_.most_bytes());
      BlockMessage message(layout_, sent.message);
      while (next_ != kNoBlock && !message.full()) {
        std::memcpy(
            message.add(next_),
            data_ + layout_.begin(next_) * layout_.element(),
            layout_.elements(next_) * layout_.element());
        next_ = layout_.next(bits_, next_ + 1, aggregator_);
      }
      header = message.header();
      body = message.finish();
    }
    header.next = next_;
    said_all_ = next_ == kNoBlock;
    const NetBuffer header_bytes = message_of(header);
    sent.requests.push_back(
        transport_.send(peer_, kBlockHeaderTag, header_bytes));
    if (header.blocks != 0) {
      sent.requests.push_back(transport_.send(peer_, kBlocksTag, body));
    }
    counts_.bytes_sent += header_bytes.bytes() + body.bytes();
    counts_.messages_sent += sent.requests.size();
    sends_.push_back(std::move(sent));
    moved = true;
  }
  return moved;
}

bool BlockStream::receive_some() {
  bool moved = false;
  while (!heard_all_) {
    if (header_comes_) {
      if (!over(header_comes_)) {
        break;
      }
      header_comes_.reset();
      header_ = header_of(header_bytes_);
      layout_.check(header_);
      counts_.bytes_received += header_bytes_.bytes();
      counts_.contributions += header_.contributions;
      if (header_.blocks != 0) {
        message_ = buffers_.take(layout_.most_bytes());
        message_comes_ = transport_.receive(
            peer_, kBlocksTag, message_.part(0, layout_.bytes(header_)));
      }
    }
    if (message_comes_) {
      if (!over(message_comes_)) {
        break;
      }
      message_comes_.reset();
      scatter();
      buffers_.give(std::exchange(message_, {}));
    }
    moved = true;
    if (header_.next == kNoBlock) {
      heard_all_ = true;
    } else {
      header_comes_ = transport_.receive(peer_, kBlockHeaderTag, header_bytes_);
    }
  }
  return moved;
}

void BlockStream::scatter() {
  const std::vector<uint32_t> blocks =
      layout_.read(header_, message_, aggregator_, from_);
  from_ = blocks.back() + 1;
  const char* from = message_.data();
  for (const uint32_t block : blocks) {
    const size_t bytes = layout_.elements(block) * layout_.element();
    std::memcpy(data_ + layout_.begin(block) * layout_.element(), from, bytes);
    from += bytes;
  }
  counts_.blocks += blocks.size();
  counts_.bytes_received += layout_.bytes(header_);
}

} // namespace fusedpg::aggregate
