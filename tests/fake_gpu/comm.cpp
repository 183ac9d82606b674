// The fake's communicators, between threads and processes.

#include "comm.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>

#include "base/deadline.hpp"
#include "base/error.hpp"
#include "cuda/kernels/ranges.hpp"
#include "host/futex.hpp"
#include "host/memory.hpp"
#include "kernels/kernels.hpp"
#include "shared_file.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: NCCL's names

namespace {

// The whole contribution of a rank fits; what is not used takes no memory.
constexpr size_t kSlotBytes = size_t(64) << 20;
// An abort is seen after at most that.
constexpr std::chrono::milliseconds kGlance{5};

// What a rank tells of the operation it takes part in: the same on all ranks.
struct Announcement {
  uint64_t sequence;
  uint64_t count;
  Op op;
  DType type;
  RedOp red_op;
  int root;
  bool operator==(const Announcement&) const = default;

  std::string text() const {
    return formatted(
        "{} #{} of count {} type {} op {} root {}",
        nccl_name(op),
        sequence,
        count,
        dtype_name(type),
        red_op_name(red_op),
        root);
  }
};

struct SegmentHeader {
  struct Rank {
    std::atomic<uint32_t> claimed;
    std::atomic<uint32_t> posted; // operations announced
    std::atomic<uint32_t> taken; // operations of all ranks that were read
    Announcement announcement;
  };
  uint64_t nonce;
  std::atomic<uint32_t> size;
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> bell; // futex: rung at every change
  Rank ranks[kMaxRanks];
};
constexpr size_t kSlotsAt = (sizeof(SegmentHeader) + 4095) / 4096 * 4096;

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

// Whether counter `a` has come to `b`; both wrap.
bool reached(const std::atomic<uint32_t>& a, uint32_t b) {
  return static_cast<int32_t>(a.load() - b) >= 0;
}

} // namespace

// The memory that the ranks of a communicator share. Ranks of one process share
// one mapping of it, so that a thread sanitizer sees what orders them.
class Segment {
 public:
  // Throws where the file's owner has ended.
  Segment(const Fd& file, int size)
      : mapping_(
            file.get(),
            kSlotsAt + static_cast<size_t>(size) * kSlotBytes) {}

  static CommId make_id() {
    Fd file =
        create_memory_file("fusedpg_fake", kSlotsAt + kMaxRanks * kSlotBytes);
    std::random_device random;
    const uint64_t nonce = static_cast<uint64_t>(random()) << 32 | random();
    const CommId id{getpid(), file.get(), nonce};
    Segment(file, 0).header().nonce = nonce;
    All& all = all_.get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.created.emplace(nonce, std::move(file));
    return id;
  }
  static std::shared_ptr<Segment> open(const CommId& id, int size) {
    All& all = all_.get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::erase_if(
        all.open, [](const auto& entry) { return entry.second.expired(); });
    if (auto found = all.open[id.nonce].lock()) {
      return found;
    }
    auto made =
        std::make_shared<Segment>(open_shared_file(id.pid, id.file), size);
    if (made->header().nonce != id.nonce) {
      throw std::runtime_error("the id's creator has let go of it");
    }
    all.open[id.nonce] = made;
    return made;
  }
  // All ranks have opened it: its creator lets go of the file.
  static void release(const CommId& id) {
    All& all = all_.get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.created.erase(id.nonce);
  }

  SegmentHeader& header() const {
    return *reinterpret_cast<SegmentHeader*>(mapping_.data());
  }
  char* slot(int rank) const {
    return mapping_.data() + kSlotsAt + static_cast<size_t>(rank) * kSlotBytes;
  }
  void ring() const {
    ++header().bell;
    futex_wake_all(header().bell);
  }
  // False when `given_up` became true before `ready` did.
  template <typename Ready>
  bool wait(const Ready& ready, const std::atomic<bool>& given_up) const {
    while (true) {
      const uint32_t bell = header().bell;
      if (ready()) {
        return true;
      }
      if (given_up) {
        return false;
      }
      futex_wait(header().bell, bell, kGlance);
    }
  }

 private:
  // Of this process, by nonce.
  struct All {
    std::mutex mutex;
    std::map<uint64_t, std::weak_ptr<Segment>> open;
    std::map<uint64_t, Fd> created;
  };
  static inline PerProcess<All> all_;

  Mapping mapping_;
};

CommId make_comm_id() {
  return Segment::make_id();
}

int nccl_version() {
  return static_cast<int>(from_environment("FUSEDPG_FAKE_NCCL_VERSION", 22809));
}

Comm::Comm(const CommId& id, int rank, int size)
    : rank(rank),
      size(size),
      id_(id),
      device_(current_device()) {}

Comm::~Comm() {
  abort();
}

NcclResult Comm::meet() {
  try {
    auto segment = Segment::open(id_, size);
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
  ++header.arrived;
  segment_->ring();
  if (!segment_->wait([&] { return header.arrived == wanted; }, aborted_)) {
    return kNcclInternalError;
  }
  Segment::release(id_);
  return kNcclSuccess;
}

// --- operations --------------------------------------------------------------

bool Comm::fits(const Collective& c) const {
  const auto ranks = static_cast<size_t>(size);
  const size_t bytes = c.count * dtype_size(c.type);
  // NCCL sends from there while it receives.
  const auto apart = std::abs(
      static_cast<const char*>(c.src) - static_cast<const char*>(c.dst));
  const bool reduces = c.op == kAllReduce || c.op == kReduceScatter;
  return c.src != nullptr && c.dst != nullptr && bytes * ranks <= kSlotBytes &&
      (!reduces || reduction_supported(c.type, c.red_op)) &&
      c.red_op != RedOp::kAvg && // which no test uses
      (c.op != kAllToAll || static_cast<size_t>(apart) >= bytes * ranks);
}

NcclResult Comm::launch(const Collective& c, void* stream) {
  if (c.count == 0) {
    return kNcclSuccess;
  }
  return fits(c) ? enqueue(stream, [this, c] { execute(c); })
                 : kNcclInvalidArgument;
}

// What the patch of NCCL does on the way, here one after the other.
NcclResult Comm::launch_ring(
    const Collective& c,
    const cuda::RingUpdate* update,
    int how,
    void* stream) {
  if (size < 2 || c.count == 0 || !fits(c)) {
    return kNcclInvalidArgument;
  }
  // Of a library that was built without the functions (2), or without one
  // protocol's (3), which NCCL takes for sizes between; or whose functions
  // forget LAMB's half (4), amsgrad (5) or Nesterov's momentum (6).
  const int64_t kind = from_environment("FUSEDPG_FAKE_PATCHED", 0);
  const size_t bytes = c.count * dtype_size(c.type) * static_cast<size_t>(size);
  const bool between = bytes > (size_t(1) << 14) && bytes < (size_t(1) << 18);
  const int protocol = how / 2 - 1;
  const bool line = protocol < 0 ? between : protocol == 1;
  const bool gathers = how % 2 != 0;
  const bool empty = kind == 2 || (kind == 3 && line);
  const auto run = [this, c, update, gathers, empty, kind] {
    if (empty) {
      return;
    }
    Collective part = c;
    part.dst = static_cast<char*>(c.dst) +
        static_cast<size_t>(rank) * c.count * dtype_size(c.type);
    execute(part);
    cuda::RingUpdate ring = *update;
    const cuda::RingMode mode =
        gathers ? cuda::RingMode::kUpdate : cuda::RingMode::kMoments;
    const bool valid = ring.mode == mode &&
        ring.update.chunk.block == c.count && ring.update.grads == part.dst &&
        ring.update.params_out == part.dst;
    if (!valid) {
      calls().bad_handle(0, "a RingUpdate that does not fit its call");
      return;
    }
    ring.update.amsgrad = ring.update.amsgrad && kind != 5;
    ring.update.nesterov = ring.update.nesterov && kind != 6;
    if (!gathers && kind == 4) {
      return;
    }
    if (!gathers) {
      // As channels do, which need not end where pieces do.
      const uint64_t half = c.count / 2;
      const auto add = [](const cuda::Sums& sums) { return sums; };
      cuda::moments_range(ring, 0, 0, half, 0, 1, add);
      cuda::moments_range(
          ring, cuda::kRingChannels - 1, half, c.count, 0, 1, add);
      return;
    }
    cuda::update_range(ring, 0, c.count, 0, 1);
    execute({kAllGather, part.dst, c.dst, c.count, c.type});
  };
  return enqueue(stream, run);
}

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

void Comm::execute(const Collective& c) {
  const std::lock_guard<std::mutex> lock(executing_);
  uint64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> state_lock(mutex_);
    if (aborted_) {
      return;
    }
    ++running_;
    sequence = next_sequence_++;
  }
  const int stall = calls().begin(rank);
  if (stall > 0) {
    const Deadline until{std::chrono::milliseconds(stall)};
    segment_->wait([&] { return until.expired(); }, aborted_);
  }
  if (!meet_in(c, sequence)) {
    // Until the end, as ranks that do not agree.
    segment_->wait([] { return false; }, aborted_);
  }
  const std::lock_guard<std::mutex> state_lock(mutex_);
  --running_;
  changed_.notify_all();
}

bool Comm::meet_in(const Collective& c, uint64_t sequence) {
  SegmentHeader& header = segment_->header();
  const auto all = [&](std::atomic<uint32_t> SegmentHeader::Rank::* counter,
                       uint32_t value) {
    const auto ready = [&] {
      return std::all_of(
          header.ranks, header.ranks + size, [&](const SegmentHeader::Rank& r) {
            return reached(r.*counter, value);
          });
    };
    return segment_->wait(ready, aborted_);
  };
  const auto ranks = static_cast<size_t>(size);
  const size_t bytes = c.count * dtype_size(c.type);
  const bool by_rank = c.op == kReduceScatter || c.op == kAllToAll;
  SegmentHeader::Rank& own = header.ranks[rank];
  const uint32_t before = own.posted;
  if (!all(&SegmentHeader::Rank::taken, before)) {
    return false;
  }
  own.announcement = {sequence, c.count, c.op, c.type, c.red_op, c.root};
  std::memcpy(segment_->slot(rank), c.src, by_rank ? bytes * ranks : bytes);
  own.posted = before + 1;
  segment_->ring();
  if (!all(&SegmentHeader::Rank::posted, before + 1)) {
    return false;
  }
  for (int r = 0; r < size; ++r) {
    const Announcement& other = header.ranks[r].announcement;
    if (other != own.announcement) {
      calls().mistake(
          calls().mismatches,
          formatted(
              "rank {}: {}; rank {}: {}",
              rank,
              own.announcement.text(),
              r,
              other.text()));
      return false;
    }
  }
  auto* dst = static_cast<char*>(c.dst);
  const auto mine = static_cast<size_t>(rank);
  if (c.op == kBroadcast) {
    std::memcpy(dst, segment_->slot(c.root), bytes);
  } else if (c.op == kAllReduce || c.op == kReduceScatter) {
    reduce(c, dst, by_rank ? mine * c.count : 0);
  } else {
    for (int r = 0; r < size; ++r) {
      std::memcpy(
          dst + static_cast<size_t>(r) * bytes,
          segment_->slot(r) + (by_rank ? mine * bytes : 0),
          bytes);
    }
  }
  own.taken = before + 1;
  segment_->ring();
  return true;
}

// In rank order, rounded to the type at each step as a ring does it.
void Comm::reduce(const Collective& c, char* dst, size_t first) const {
  const kernels::Table& table = *kernels::table();
  const size_t bytes = dtype_size(c.type);
  kernels::ReduceArgs args;
  args.dtype = c.type;
  args.op = c.red_op;
  std::memcpy(dst, segment_->slot(0) + first * bytes, c.count * bytes);
  for (int r = 1; r < size; ++r) {
    void* const to = dst;
    const void* const from[] = {dst, segment_->slot(r) + first * bytes};
    table.reduce(args, &to, 1, from, 2, c.count, false);
  }
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

void* Comms::add(std::shared_ptr<Comm> comm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void* handle = reinterpret_cast<void*>(uint64_t(0xcc) << 40 | ++made_ << 4);
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

void Comms::remove(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  comms_.erase(handle);
}

size_t Comms::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return comms_.size();
}

} // namespace fusedpg::fake
