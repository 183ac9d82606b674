#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "global.hpp"
#include "nccl_functions.hpp"
#include "shared_file.hpp"

namespace fusedpg::fake {

constexpr int kMaxRanks = 72;
constexpr size_t kSlotBytes = size_t(256) << 10;

// What a rank tells of the operation it takes part in: the same on all ranks.
struct Announcement {
  uint64_t sequence;
  uint64_t part; // of the operation, which may be larger than a slot
  uint64_t count;
  int32_t op;
  int32_t type;
  int32_t red_op;
  int32_t unused;
  bool operator==(const Announcement&) const = default;
};

// The memory that the ranks of a communicator share. Ranks of one process share
// one mapping of it, so that a thread sanitizer sees what orders them.
struct SegmentHeader {
  struct Rank {
    std::atomic<uint32_t> claimed;
    std::atomic<int32_t> pid;
    std::atomic<uint32_t> posted; // parts announced
    std::atomic<uint32_t> taken; // parts of all ranks that were read
    Announcement announcement;
  };
  uint64_t nonce;
  std::atomic<uint32_t> size;
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> bell; // futex: rung at every change
  Rank ranks[kMaxRanks];
};

class Segment {
 public:
  // Of the id's creator. Throws std::runtime_error.
  static NcclUniqueId make_id();
  static std::shared_ptr<Segment> open(const NcclUniqueId& id);
  // All ranks have opened it: its creator lets go of the file.
  static void release(const NcclUniqueId& id);

  explicit Segment(const Descriptor& file);

  SegmentHeader& header() const {
    return *reinterpret_cast<SegmentHeader*>(mapping_.data());
  }
  char* slot(int rank) const;
  void ring();
  // False when `given_up` became true before `ready` did.
  bool wait(
      const std::function<bool()>& ready,
      const std::function<bool()>& given_up);

 private:
  Mapping mapping_;
};

} // namespace fusedpg::fake
