#include "aggregate/job.hpp"

#include <pthread.h>

#include <cstring>

#include "aggregate/blocks.hpp"
#include "aggregate/merge.hpp"
#include "base/error.hpp"
#include "base/options.hpp"
#include "net/tcp_dial.hpp"

namespace fusedpg::aggregate {
namespace {

kernels::ReduceArgs args_of(const Head& head) {
  kernels::ReduceArgs args;
  args.dtype = static_cast<DType>(head.dtype);
  args.op = static_cast<RedOp>(head.op);
  args.divisor = head.divisor;
  args.factor = head.factor;
  return args;
}

} // namespace

Job::Job(
    std::shared_ptr<TcpListener> listener,
    const kernels::Table& kernels,
    Server::Counters& counters,
    Fd visitor)
    : listener_(std::move(listener)),
      kernels_(kernels),
      counters_(counters),
      visitor_(std::move(visitor)) {}

void Job::run() noexcept {
  pthread_setname_np(pthread_self(), "fusedpg-job");
  try {
    if (open()) {
      ++counters_.jobs;
      serve();
    }
  } catch (const std::exception& error) {
    if (!ending_) {
      ++counters_.failed;
      log_line(formatted("aggregator: a job has failed: {}", error.what()));
    }
  }
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    transport_.reset(); // what is under way still gets on its way
  } catch (const std::exception& error) {
    log_line(formatted("aggregator: a job's end: {}", error.what()));
  }
  --counters_.active;
  ended_ = true;
}

void Job::end() {
  ending_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (transport_) {
    transport_->abort();
  }
}

bool Job::open() {
  const Deadline deadline(tcp::kPatience);
  const auto check = [this] {
    if (ending_) {
      fail(ErrorKind::kAborted, "fused: the aggregator ends");
    }
  };
  try {
    request_ =
        Request::of(tcp::hear(visitor_, kMostRequestBytes, deadline, check));
    workers_ = static_cast<int>(request_.workers.size());
    const int rank = workers_ + static_cast<int>(request_.index);
    const int size = workers_ + static_cast<int>(request_.aggregators);
    auto endpoint = std::make_unique<TcpEndpoint>(listener_, rank, size);
    TcpTransport::Config config;
    config.spin = {}; // other jobs may need the core
    auto transport =
        std::make_unique<TcpTransport>(config, std::move(endpoint));
    transport->set_watch([this] { watch(); });
    for (int r = 0; r < workers_; ++r) {
      transport->connect(r, request_.workers[r]);
    }
    tcp::say(visitor_, transport->address(), deadline, check);
    const std::lock_guard<std::mutex> lock(mutex_);
    transport_ = std::move(transport);
  } catch (const std::exception& error) {
    ++counters_.refused;
    log_line(formatted("aggregator: no job: {}", error.what()));
    try {
      const std::string why = error.what();
      tcp::say(visitor_, "! " + why, Deadline(tcp::kPatience), check);
    } catch (const std::exception&) { // it does not listen any more
    }
    return false;
  }
  visitor_.reset();
  return !ending_;
}

void Job::serve() {
  Head head;
  while (next(head)) {
    check(head);
    head.block == 0 ? all_reduce(head) : merge(head);
    ++counters_.operations;
  }
}

bool Job::next(Head& head) {
  constexpr std::chrono::milliseconds kLook{1000};
  std::vector<NetBuffer> heads;
  std::vector<Transport::RequestPtr> receives;
  for (int r = 0; r < workers_; ++r) {
    heads.emplace_back(sizeof(Head));
    receives.push_back(
        transport_->receive(r, static_cast<uint32_t>(Tag::kHead), heads[r]));
  }
  while (true) {
    bool all = true;
    for (const auto& one : receives) {
      const auto state = transport_->state(*one);
      if (state == TcpTransport::State::kLost || ending_) {
        return false;
      }
      all = all && state == TcpTransport::State::kDone;
    }
    if (all) {
      break;
    }
    transport_->wait_briefly(kLook);
  }
  for (const NetBuffer& one : heads) {
    if (std::memcmp(one.data(), heads[0].data(), sizeof head) != 0) {
      fail(
          ErrorKind::kMismatch,
          "fused: workers of one job begin different operations");
    }
  }
  std::memcpy(&head, heads[0].data(), sizeof head);
  return true;
}

void Job::check(const Head& head) const {
  const auto dtype = static_cast<DType>(head.dtype);
  const auto op = static_cast<RedOp>(head.op);
  const bool known = head.dtype < static_cast<uint32_t>(DType::kOpaque) &&
      head.op <= static_cast<uint32_t>(RedOp::kPremulSum) &&
      reduction_supported(dtype, op);
  if (!known || head.segment == 0 || head.divisor == 0 ||
      head.segment > kSegmentBytes / dtype_size(dtype)) {
    fail(ErrorKind::kMismatch, "fused: no such operation");
  }
}

void Job::merge(const Head& head) {
  const BlockLayout layout(head, request_.aggregators);
  Merge merge(
      *transport_,
      kernels_,
      args_of(head),
      layout,
      request_.index,
      workers_,
      buffers_);
  receiving_ = true;
  const Merge::Counts counts = merge.run();
  receiving_ = false;
  merge.flush();
  counters_.segments += counts.messages;
  counters_.bytes_received += counts.bytes_received;
  counters_.bytes_sent += counts.bytes_sent;
}

void Job::all_reduce(const Head& head) {
  const kernels::ReduceArgs args = args_of(head);
  const size_t element = dtype_size(args.dtype);
  const uint64_t all =
      head.count / head.segment + (head.count % head.segment != 0 ? 1 : 0);
  const uint64_t mine = segments_of(all, request_.index, request_.aggregators);
  const auto bytes_of = [&](uint64_t k) {
    const uint64_t s = k * request_.aggregators + request_.index;
    return std::min<uint64_t>(head.segment, head.count - s * head.segment) *
        element;
  };
  slots_.resize(kSlots);
  for (uint64_t k = 0; k < std::min<uint64_t>(kSlots, mine); ++k) {
    post(slots_[k], bytes_of(k));
  }
  for (uint64_t k = 0; k < mine; ++k) {
    Slot& slot = slots_[k % kSlots];
    add_up(slot, args, bytes_of(k));
    if (k + kSlots < mine) {
      post(slot, bytes_of(k + kSlots));
    }
  }
  for (Slot& slot : slots_) {
    for (const auto& send : slot.sends) {
      send->wait(never());
    }
    slot.sends.clear();
  }
}

void Job::post(Slot& slot, size_t bytes) {
  slot.contributions.resize(workers_);
  slot.receives.clear();
  for (int r = 0; r < workers_; ++r) {
    NetBuffer& into = slot.contributions[r];
    if (into.data() == nullptr) {
      into = NetBuffer(kSegmentBytes);
    }
    slot.receives.push_back(transport_->receive(
        r, static_cast<uint32_t>(Tag::kContribution), into.part(0, bytes)));
  }
}

void Job::add_up(Slot& slot, const kernels::ReduceArgs& args, size_t bytes) {
  receiving_ = true;
  for (const auto& receive : slot.receives) {
    receive->wait(never());
  }
  receiving_ = false;
  for (const auto& send : slot.sends) {
    send->wait(never());
  }
  slot.sends.clear();
  if (slot.result.data() == nullptr) {
    slot.result = NetBuffer(kSegmentBytes);
  }
  std::vector<const void*> sources;
  for (const NetBuffer& one : slot.contributions) {
    sources.push_back(one.data());
  }
  void* out = slot.result.data();
  kernels_.reduce(
      args,
      &out,
      1,
      sources.data(),
      sources.size(),
      bytes / dtype_size(args.dtype),
      /*stream=*/false);
  for (int r = 0; r < workers_; ++r) {
    slot.sends.push_back(transport_->send(
        r, static_cast<uint32_t>(Tag::kResult), slot.result.part(0, bytes)));
  }
  ++counters_.segments;
  counters_.bytes_received += bytes * static_cast<size_t>(workers_);
  counters_.bytes_sent += bytes * static_cast<size_t>(workers_);
}

// A worker that has its results may leave, while others still get theirs.
void Job::watch() const {
  for (int r = 0; receiving_ && r < workers_; ++r) {
    if (transport_->send_closed(r) || transport_->lost(r)) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: worker {} has ended its connections in the middle of an "
          "operation",
          r);
    }
  }
}

} // namespace fusedpg::aggregate
