#include "comm.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "base/deadline.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: NCCL's names

namespace {

// A communicator's device, whose default stream a null one is.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) {
    current_device() = device;
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() {
    current_device() = before_;
  }

 private:
  const int before_;
};

std::string shown(const Announcement& a) {
  static constexpr const char* kNames[kOps] = {
      "all_reduce",
      "reduce_scatter",
      "all_to_all",
      "all_gather",
      "exchange",
      "direct_step",
      "broadcast"};
  std::ostringstream out;
  out << kNames[a.op] << " #" << a.sequence << " of count " << a.count
      << " type " << a.type << " op " << a.red_op << " part " << a.part;
  return out.str();
}

// Whether counter `a` has come to `b`; both wrap.
bool reached(const std::atomic<uint32_t>& a, uint32_t b) {
  return static_cast<int32_t>(a.load() - b) >= 0;
}

} // namespace

int nccl_version() {
  return static_cast<int>(from_environment("FUSEDPG_FAKE_NCCL_VERSION", 22809));
}

Comm::Comm(const NcclUniqueId& id, int rank, int size)
    : rank(rank),
      size(size),
      id_(id),
      device_(current_device()) {}

Comm::~Comm() {
  abort();
}

NcclResult Comm::meet() {
  try {
    auto segment = Segment::open(id_);
    const std::lock_guard<std::mutex> lock(mutex_); // abort() looks for it
    segment_ = std::move(segment);
  } catch (const std::runtime_error& error) {
    calls().mistake(calls().bad_handles, error.what());
    return kNcclSystemError;
  }
  SegmentHeader& header = segment_->header();
  uint32_t none = 0;
  const auto wanted = static_cast<uint32_t>(size);
  if ((!header.size.compare_exchange_strong(none, wanted) && none != wanted) ||
      header.ranks[rank].claimed.exchange(1) != 0) {
    calls().mistake(
        calls().mismatches,
        "ranks of one id have different sizes or the same rank");
    return kNcclInvalidUsage;
  }
  header.ranks[rank].pid = getpid();
  ++header.arrived;
  segment_->ring();
  if (!segment_->wait(
          [&] { return header.arrived == wanted; },
          [this] { return gone(); })) {
    return kNcclInternalError;
  }
  Segment::release(id_);
  return kNcclSuccess;
}

uint64_t Comm::identity() const {
  return segment_->header().nonce;
}

// --- operations --------------------------------------------------------------

NcclResult Comm::enqueue(void* stream, std::function<void()> work) {
  // Work is outstanding until nobody can execute it any more: in a graph, until
  // the graph is destroyed.
  struct Token {
    const std::shared_ptr<Comm> comm;
    const int persistent;
    Token(std::shared_ptr<Comm> of, int persistent)
        : comm(std::move(of)),
          persistent(persistent) {}
    Token(const Token&) = delete;
    ~Token() {
      const std::lock_guard<std::mutex> lock(comm->mutex_);
      --comm->outstanding_;
      comm->persistent_ -= persistent;
      comm->changed_.notify_all();
    }
  };
  const OnDevice scope(device_);
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0;
  if (streams().capture_info(stream, &status, &capture) != kSuccess) {
    return kNcclUnhandledCudaError;
  }
  const int captured = status == cudaStreamCaptureStatusNone ? 0 : 1;
  std::unique_lock<std::mutex> lock(mutex_);
  ++outstanding_;
  persistent_ += captured;
  const auto token = std::make_shared<Token>(shared_from_this(), captured);
  lock.unlock();
  const std::lock_guard<std::mutex> order_lock(ordering_);
  const int error = streams().enqueue(
      stream, [token, work = std::move(work)] { work(); }, device_, &order_);
  return error == kSuccess ? kNcclSuccess : kNcclUnhandledCudaError;
}

bool Comm::begin(Executed& executed) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      return false;
    }
    ++running_;
    executed.sequence = next_sequence_++;
  }
  executed.communicator = identity();
  executed.rank = rank;
  const int stall = calls().begin(executed);
  if (stall > 0) {
    const Deadline until{std::chrono::milliseconds(stall)};
    segment_->wait([&] { return until.expired(); }, [this] { return gone(); });
  }
  return true;
}

void Comm::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_;
  changed_.notify_all();
}

bool Comm::exchange(
    const Announcement& announcement,
    const std::function<void()>& publish,
    const std::function<void()>& consume) {
  const auto aborted = [this] { return gone(); };
  SegmentHeader& header = segment_->header();
  const auto all = [&](std::atomic<uint32_t> SegmentHeader::Rank::* counter,
                       uint32_t value) {
    return segment_->wait(
        [&] {
          for (int r = 0; r < size; ++r) {
            if (!reached(header.ranks[r].*counter, value)) {
              return false;
            }
          }
          return true;
        },
        aborted);
  };
  SegmentHeader::Rank& own = header.ranks[rank];
  const uint32_t before = own.posted;
  if (!all(&SegmentHeader::Rank::taken, before)) {
    return false;
  }
  own.announcement = announcement;
  publish();
  own.posted = before + 1;
  segment_->ring();
  if (!all(&SegmentHeader::Rank::posted, before + 1)) {
    return false;
  }
  for (int r = 0; r < size; ++r) {
    const Announcement& other = header.ranks[r].announcement;
    if (other != announcement) {
      calls().mistake(
          calls().mismatches,
          "rank " + std::to_string(rank) + ": " + shown(announcement) +
              "; rank " + std::to_string(r) + ": " + shown(other));
      segment_->wait([] { return false; }, aborted);
      return false;
    }
  }
  consume();
  own.taken = before + 1;
  segment_->ring();
  return true;
}

// --- the end -----------------------------------------------------------------

void Comm::destroy() {
  std::unique_lock<std::mutex> lock(mutex_);
  // An abort ends operations; it does not end graphs.
  changed_.wait(lock, [this] {
    return outstanding_ == 0 || (aborted_ && persistent_ == 0);
  });
  lock.unlock();
  abort();
}

void Comm::wait_aborted() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return aborted_.load(); });
}

void Comm::abort() {
  std::shared_ptr<Segment> segment;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    segment = segment_;
    changed_.notify_all();
  }
  if (segment != nullptr) {
    segment->ring();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return running_ == 0 && persistent_ == 0; });
}

// --- handles -----------------------------------------------------------------

void* nccl_handle() {
  struct Counter {
    std::atomic<uint64_t> made{0};
  };
  return reinterpret_cast<void*>(
      uint64_t(0xcc) << 40 | ++global<Counter>().made << 4);
}

void* Comms::add(std::shared_ptr<Comm> comm) {
  void* handle = nccl_handle();
  const std::lock_guard<std::mutex> lock(mutex_);
  comms_.emplace(handle, std::move(comm));
  return handle;
}

std::shared_ptr<Comm> Comms::find(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = comms_.find(handle);
  if (found == comms_.end()) {
    calls().bad_handle(0, "no such communicator");
    return nullptr;
  }
  return found->second;
}

std::shared_ptr<Comm> Comms::remove(void* handle) {
  std::shared_ptr<Comm> found = find(handle);
  const std::lock_guard<std::mutex> lock(mutex_);
  comms_.erase(handle);
  return found;
}

size_t Comms::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return comms_.size();
}

} // namespace fusedpg::fake
