#include "segment.hpp"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>

#include "host/futex.hpp"

namespace fusedpg::fake {

namespace {

// What is in an NcclUniqueId.
struct Id {
  char magic[8];
  int32_t pid;
  int32_t file;
  uint64_t nonce;
};
static_assert(sizeof(Id) <= sizeof(NcclUniqueId));
constexpr char kMagic[8] = "fakegpu";

constexpr size_t kSlotsAt = (sizeof(SegmentHeader) + 4095) / 4096 * 4096;
constexpr size_t kSegmentBytes = kSlotsAt + kMaxRanks * kSlotBytes;

// An abort is seen after at most that.
constexpr std::chrono::milliseconds kGlance{5};

// Of this process.
struct Segments {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<Segment>> open; // by nonce
  std::map<uint64_t, Descriptor> created;
};

Id parse(const NcclUniqueId& from) {
  Id id;
  std::memcpy(&id, from.internal, sizeof id);
  if (std::memcmp(id.magic, kMagic, sizeof kMagic) != 0) {
    throw std::runtime_error("not an id of the fake NCCL");
  }
  return id;
}

} // namespace

NcclUniqueId Segment::make_id() {
  Descriptor file = make_shared_file(kSegmentBytes);
  std::random_device random;
  Id id{};
  std::memcpy(id.magic, kMagic, sizeof kMagic);
  id.pid = getpid();
  id.file = file.number();
  id.nonce = static_cast<uint64_t>(random()) << 32 | random();
  Segment(file).header().nonce = id.nonce;

  Segments& segments = global<Segments>();
  const std::lock_guard<std::mutex> lock(segments.mutex);
  segments.created.emplace(id.nonce, std::move(file));
  NcclUniqueId out{};
  std::memcpy(out.internal, &id, sizeof id);
  return out;
}

std::shared_ptr<Segment> Segment::open(const NcclUniqueId& from) {
  const Id id = parse(from);
  Segments& segments = global<Segments>();
  const std::lock_guard<std::mutex> lock(segments.mutex);
  std::erase_if(
      segments.open, [](const auto& entry) { return entry.second.expired(); });
  if (auto found = segments.open[id.nonce].lock()) {
    return found;
  }
  auto made = std::make_shared<Segment>(open_shared_file(id.pid, id.file));
  if (made->header().nonce != id.nonce) {
    throw std::runtime_error("the id's creator has let go of it");
  }
  segments.open[id.nonce] = made;
  return made;
}

void Segment::release(const NcclUniqueId& from) {
  Segments& segments = global<Segments>();
  const std::lock_guard<std::mutex> lock(segments.mutex);
  segments.created.erase(parse(from).nonce);
}

Segment::Segment(const Descriptor& file) : mapping_(file, kSegmentBytes) {
  if (mapping_.data() == nullptr) {
    throw std::runtime_error("the id's creator has ended, or no memory");
  }
}

char* Segment::slot(int rank) const {
  return mapping_.data() + kSlotsAt + static_cast<size_t>(rank) * kSlotBytes;
}

void Segment::ring() {
  ++header().bell;
  futex_wake_all(header().bell);
}

bool Segment::wait(
    const std::function<bool()>& ready,
    const std::function<bool()>& given_up) {
  while (true) {
    const uint32_t bell = header().bell;
    if (ready()) {
      return true;
    }
    if (given_up()) {
      return false;
    }
    futex_wait(header().bell, bell, kGlance);
  }
}

} // namespace fusedpg::fake
