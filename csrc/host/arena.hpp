#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/fork.hpp"
#include "host/memory.hpp"

namespace fusedpg {

// One rank's shared memory for one group: a control part of fixed size, which
// the engine lays out, then a heap that tensors come from. Peers map it all.
//
// Thread-safe. Owned jointly by the group and by every tensor allocated from
// it, so a tensor may outlive its group.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Both parts are multiples of this, and memory is committed in such steps.
  static constexpr size_t kStep = size_t(2) << 20;

  // Commits so many bytes of the control part: Error(kOutOfMemory) where that
  // cannot be done.
  static std::shared_ptr<Arena> create(
      size_t control_bytes,
      size_t heap_bytes,
      size_t at_once = SIZE_MAX);

  Arena(size_t control_bytes, size_t heap_bytes, size_t at_once);
  // Commits the rest of it.
  void commit_control();
  // Makes the heap smaller, so that all is at most so large; before anything is
  // allocated.
  void shrink(size_t total);

  char* base() const {
    return mapping_.data();
  }
  size_t size() const {
    return mapping_.size();
  }
  int fd() const {
    return file_.get();
  }

  // Memory of a freed block is kept for the next allocation, or, if the block
  // was one of those that live long, returned to the system.
  enum class Freed { kKept, kReturned };

  // 128-byte aligned; committed, so that writing to it cannot fail.
  // Throws Error(kOutOfMemory).
  void* allocate(size_t bytes);
  void deallocate(void* p, Freed freed = Freed::kKept);

  // Offset of [p, p + bytes) in the arena; none unless it lies in one live heap
  // block that peers still see.
  std::optional<size_t> locate(const void* p, size_t bytes) const;

  // Pages of the arena, first and end.
  using Pages = std::pair<size_t, size_t>;

  // Makes pages copy-on-write here: their bytes are what is in the file, until
  // this process writes to them. False where the system refuses.
  bool copy_on_write(const Pages& pages) {
    return mapping_.replace(pages.first, pages.second, file_.get());
  }

  // Takes the heap from the peers: returns when none of them can change what
  // this process sees there. Addresses and contents stay, and no write of
  // another thread is lost. Ends as soon as `alone` says that no peer can write
  // to the heap any more; what has not been copied by then stays shared memory
  // with nobody to share it. `keep`, sorted, are pages for peers to go on
  // using, which are copy-on-write here already.
  void detach(
      const std::function<bool()>& alone = [] { return false; },
      const std::vector<Pages>& keep = {});

  size_t heap_begin() const {
    return heap_begin_;
  }
  size_t heap_bytes() const {
    return mapping_.size() - heap_begin_;
  }
  size_t used_bytes() const {
    return used_.load(std::memory_order_relaxed);
  }
  size_t committed_bytes() const;

 private:
  void commit(size_t begin, size_t end);
  // Gives back whole pages of a free block.
  void give_back(size_t begin, size_t end);
  // Cuts off one window; false when its pages may still change.
  bool replace_window(size_t offset, size_t end);
  void insert_free(size_t offset, size_t bytes);
  void erase_free(size_t offset, size_t bytes);

  const Origin origin_{};
  const size_t heap_begin_;
  const size_t control_bytes_;
  size_t control_committed_;
  Fd file_;
  Mapping mapping_;

  mutable std::mutex mutex_;
  // Offsets are from base(). Neighbouring free blocks are always merged.
  std::map<size_t, size_t> free_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
  std::map<size_t, size_t> live_;
  size_t committed_; // every page below is allocated, but for
  // these whole pages of free blocks: begin, end
  std::map<size_t, size_t> holes_;
  size_t in_holes_ = 0;
  std::atomic<size_t> used_{0}; // read without the lock
  bool hidden_ = false; // peers are not to be sent here any more
  std::mutex detaching_; // held by detach(); before mutex_
};

} // namespace fusedpg
