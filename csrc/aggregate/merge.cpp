#include "aggregate/merge.hpp"

#include <algorithm>

#include "base/dtype.hpp"

namespace fusedpg::aggregate {

Merge::Merge(
    TcpTransport& transport,
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args,
    const BlockLayout& layout,
    size_t aggregator,
    int workers,
    NetBuffers& buffers)
    : transport_(transport),
      kernels_(kernels),
      args_(args),
      layout_(layout),
      aggregator_(aggregator),
      buffers_(buffers),
      zeros_(layout.elements(0) * layout.element()),
      streams_(static_cast<size_t>(workers)),
      outs_(kSlots) {}

Merge::Counts Merge::run() {
  const auto workers = static_cast<int>(streams_.size());
  for (int r = 0; r < workers; ++r) {
    listen(r);
  }
  while (true) {
    uint32_t block = kNoBlock;
    for (const Stream& one : streams_) {
      block = std::min(block, one.next());
    }
    if (block == kNoBlock) {
      break;
    }
    bool here = true;
    for (int r = 0; r < workers; ++r) {
      const Stream& one = streams_[r];
      if (one.at == one.blocks.size() && one.after == block) {
        load(r);
        here = false; // the first header of a worker may name a later block
      }
    }
    if (here) {
      add_up(block);
    }
  }
  send(/*last=*/true);
  for (Stream& one : streams_) {
    if (one.message.data() != nullptr) {
      buffers_.give(std::move(one.message));
    }
  }
  return counts_;
}

void Merge::flush() {
  for (Out& out : outs_) {
    wait_for(out);
  }
}

void Merge::listen(int worker) {
  Stream& one = streams_[worker];
  one.header_comes =
      transport_.receive(worker, kBlockHeaderTag, one.header_bytes);
}

void Merge::hear(int worker) {
  Stream& one = streams_[worker];
  one.header_comes.reset();
  one.header = header_of(one.header_bytes);
  layout_.check(one.header);
  if (one.header.blocks != 0) {
    const size_t bytes = layout_.bytes(one.header);
    one.coming = buffers_.take(layout_.most_bytes());
    one.message_comes =
        transport_.receive(worker, kBlocksTag, one.coming.part(0, bytes));
    counts_.bytes_received += bytes;
  }
}

// So that messages come while others are added up.
void Merge::look_at_headers() {
  for (int r = 0; r < static_cast<int>(streams_.size()); ++r) {
    const Stream& one = streams_[r];
    if (one.header_comes &&
        transport_.state(*one.header_comes) == TcpTransport::State::kDone) {
      hear(r);
    }
  }
}

void Merge::load(int worker) {
  Stream& one = streams_[worker];
  if (one.header_comes) {
    one.header_comes->wait(never());
    hear(worker);
  }
  if (one.message_comes) {
    one.message_comes->wait(never());
    one.message_comes.reset();
  }
  if (one.message.data() != nullptr) {
    buffers_.give(std::move(one.message));
  }
  one.message = std::exchange(one.coming, {});
  one.blocks = one.header.blocks == 0
      ? std::vector<uint32_t>()
      : layout_.read(one.header, one.message, aggregator_, one.after);
  one.at = 0;
  one.offset = 0;
  one.after = one.header.next;
  if (one.after != kNoBlock) {
    listen(worker);
  }
  look_at_headers();
}

void Merge::add_up(uint32_t block) {
  const size_t elements = layout_.elements(block);
  sources_.clear();
  for (Stream& one : streams_) {
    if (one.at < one.blocks.size() && one.blocks[one.at] == block) {
      sources_.push_back(one.message.data() + one.offset);
      one.offset += elements * layout_.element();
      ++one.at;
    }
  }
  contributions_ += static_cast<uint32_t>(sources_.size());
  if (sources_.size() < streams_.size()) {
    sources_.push_back(zeros_.data());
  }
  if (!result_) {
    Out& out = outs_[next_out_];
    wait_for(out);
    out.message = buffers_.take(layout_.most_bytes());
    result_.emplace(layout_, out.message);
  }
  void* to = result_->add(block);
  kernels_.reduce(
      args_,
      &to,
      1,
      sources_.data(),
      sources_.size(),
      elements,
      /*stream=*/false);
  if (result_->full()) {
    send(/*last=*/false);
  }
}

void Merge::send(bool last) {
  BlockHeader header = result_ ? result_->header() : BlockHeader();
  header.contributions = std::exchange(contributions_, 0);
  header.next = last ? kNoBlock : 0;
  Out& out = outs_[next_out_];
  next_out_ = (next_out_ + 1) % outs_.size();
  if (!result_) {
    wait_for(out);
  }
  const NetBuffer header_bytes = message_of(header);
  const NetBuffer message = result_ ? result_->finish() : NetBuffer();
  for (int r = 0; r < static_cast<int>(streams_.size()); ++r) {
    out.sends.push_back(transport_.send(r, kBlockHeaderTag, header_bytes));
    if (result_) {
      out.sends.push_back(transport_.send(r, kBlocksTag, message));
    }
    counts_.bytes_sent += message.bytes();
  }
  ++counts_.messages;
  result_.reset();
}

void Merge::wait_for(Out& out) {
  for (const auto& send : out.sends) {
    send->wait(never());
  }
  out.sends.clear();
  if (out.message.data() != nullptr) {
    buffers_.give(std::move(out.message));
    out.message = {};
  }
}

} // namespace fusedpg::aggregate
