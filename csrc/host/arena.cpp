#include "host/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/round_up.hpp"

namespace fusedpg {
namespace {

constexpr size_t kAlignment = 128;
// Freed memory is given back in pieces of at least this many bytes.
constexpr size_t kReturnAtOnce = size_t(256) << 10;

} // namespace

std::shared_ptr<Arena> Arena::create(
    size_t control_bytes,
    size_t heap_bytes,
    size_t at_once) {
  return std::make_shared<Arena>(control_bytes, heap_bytes, at_once);
}

Arena::Arena(size_t control_bytes, size_t heap_bytes, size_t at_once)
    : heap_begin_(round_up(control_bytes, kStep)),
      control_bytes_(control_bytes),
      control_committed_(std::min(at_once, control_bytes)),
      file_(create_memory_file(
          "fusedpg-arena",
          heap_begin_ + round_up(heap_bytes, kStep))),
      mapping_(file_.get(), heap_begin_ + round_up(heap_bytes, kStep)),
      committed_(heap_begin_) {
  commit_range(file_.get(), 0, control_committed_);
  if (mapping_.size() > heap_begin_) {
    insert_free(heap_begin_, mapping_.size() - heap_begin_);
  }
}

void Arena::commit_control() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (file_ && control_committed_ < control_bytes_) {
    commit_range(
        file_.get(), control_committed_, control_bytes_ - control_committed_);
    control_committed_ = control_bytes_;
  }
}

void Arena::shrink(size_t total) {
  std::lock_guard<std::mutex> lock(mutex_);
  total = std::max(total / kStep * kStep, heap_begin_);
  if (total < mapping_.size()) {
    erase_free(heap_begin_, mapping_.size() - heap_begin_);
    mapping_.shrink(total);
    if (total > heap_begin_) {
      insert_free(heap_begin_, total - heap_begin_);
    }
  }
}

void Arena::insert_free(size_t offset, size_t bytes) {
  free_.emplace(offset, bytes);
  free_by_size_.emplace(bytes, offset);
}

void Arena::erase_free(size_t offset, size_t bytes) {
  free_.erase(offset);
  free_by_size_.erase({bytes, offset});
}

void Arena::commit(size_t begin, size_t end) {
  if (!file_) {
    holes_.clear(); // it is all of this process's own now
    in_holes_ = 0;
    return;
  }
  if (end > committed_) {
    const size_t to = std::min(round_up(end, kStep), mapping_.size());
    commit_range(file_.get(), committed_, to - committed_);
    committed_ = to;
  }
  auto hole = holes_.upper_bound(begin);
  if (hole != holes_.begin() && std::prev(hole)->second > begin) {
    --hole;
  }
  while (hole != holes_.end() && hole->first < end) {
    const auto [from, to] = *hole;
    const size_t first = std::max(from, begin / kPage * kPage);
    const size_t last = std::min(to, round_up(end, kPage));
    commit_range(file_.get(), first, last - first);
    in_holes_ -= last - first;
    hole = holes_.erase(hole);
    if (from < first) {
      holes_.emplace(from, first);
    }
    if (last < to) {
      holes_.emplace(last, to);
    }
  }
}

void Arena::give_back(size_t begin, size_t end) {
  begin = round_up(begin, kPage);
  end = std::min(end, committed_) / kPage * kPage;
  if (!file_ || hidden_ || end < begin + kReturnAtOnce) {
    return;
  }
  // Holes are in free blocks: those that it touches it contains.
  auto hole = holes_.lower_bound(begin);
  size_t known = 0;
  for (auto h = hole; h != holes_.end() && h->first < end; ++h) {
    known += h->second - h->first;
  }
  // A call for each of many small blocks would cost more than they are.
  if (end - begin - known < kReturnAtOnce ||
      fallocate(
          file_.get(),
          FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
          static_cast<off_t>(begin),
          static_cast<off_t>(end - begin)) != 0) {
    return;
  }
  while (hole != holes_.end() && hole->first < end) {
    hole = holes_.erase(hole);
  }
  holes_.emplace(begin, end);
  in_holes_ += end - begin - known;
}

void* Arena::allocate(size_t bytes) {
  const size_t need = round_up(std::max<size_t>(bytes, 1), kAlignment);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto fit = free_by_size_.lower_bound({need, 0});
  // Rounding up may have wrapped around.
  if (need < bytes || fit == free_by_size_.end()) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: the group's arena is full: {} bytes asked for, {} of {} bytes "
        "in use; raise FUSEDPG_ARENA_BYTES or Options(arena_bytes=...)",
        bytes,
        used_bytes(),
        mapping_.size() - heap_begin_);
  }
  const auto [size, offset] = *fit;
  commit(offset, offset + need);
  erase_free(offset, size);
  if (size > need) {
    insert_free(offset + need, size - need);
  }
  live_.emplace(offset, need);
  used_ += need;
  return base() + offset;
}

void Arena::deallocate(void* p, Freed freed) {
  if (origin_.forked()) {
    return; // a forked child has no arena
  }
  std::lock_guard<std::mutex> lock(mutex_);
  size_t offset = static_cast<size_t>(static_cast<char*>(p) - base());
  const auto it = live_.find(offset);
  size_t bytes = it->second;
  used_ -= bytes;
  live_.erase(it);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    erase_free(next->first, next->second);
  }
  next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto [before, size] = *std::prev(next);
    if (before + size == offset) {
      erase_free(before, size);
      offset = before;
      bytes += size;
    }
  }
  insert_free(offset, bytes);
  if (freed == Freed::kReturned) {
    give_back(offset, offset + bytes);
  }
}

std::optional<size_t> Arena::locate(const void* p, size_t bytes) const {
  const char* address = static_cast<const char*>(p);
  if (address < base() + heap_begin_ || address + bytes > base() + size()) {
    return std::nullopt;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (hidden_) {
    return std::nullopt;
  }
  const size_t offset = static_cast<size_t>(address - base());
  auto it = live_.upper_bound(offset);
  if (it == live_.begin()) {
    return std::nullopt;
  }
  --it;
  if (offset + bytes > it->first + it->second) {
    return std::nullopt;
  }
  return offset;
}

bool Arena::replace_window(size_t offset, size_t end) {
  bool live = false;
  bool done = false;
  {
    // Under the lock nobody allocates a free block, and writes to it, before it
    // is replaced.
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = live_.lower_bound(end);
    live = it != live_.begin() && (--it)->first + it->second > offset;
    if (!live) {
      done = mapping_.replace(offset, end, -1);
    }
  }
  if (live) {
    done = mapping_.replace(offset, end, file_.get()) &&
        own_pages(base() + offset, end - offset);
  }
  if (done) {
    // The file's pages are nobody's now: only a window is held twice. Private
    // copies are not touched by this.
    fallocate(
        file_.get(),
        FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        static_cast<off_t>(offset),
        static_cast<off_t>(end - offset));
  }
  return done;
}

void Arena::detach(
    const std::function<bool()>& alone,
    const std::vector<Pages>& keep) {
  std::lock_guard<std::mutex> one(detaching_);
  if (!file_ || origin_.forked()) {
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hidden_ = true;
  }
  // A window may cost an entry in the kernel's list of mappings, which is
  // short (vm.max_map_count).
  constexpr size_t kWindows = 4096;
  const size_t window = round_up(committed_bytes() / kWindows + 1, kStep);
  size_t offset = heap_begin_;
  size_t kept = 0;
  bool good = true;
  while (true) {
    while (kept < keep.size() && offset >= keep[kept].first) {
      offset = std::max(offset, keep[kept++].second);
    }
    if (alone()) {
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (offset >= committed_) {
      good = mapping_.replace(offset, mapping_.size(), -1) && good;
      file_.reset();
      break;
    }
    size_t end = std::min(offset / window * window + window, committed_);
    if (kept < keep.size()) {
      end = std::min(end, keep[kept].first);
    }
    lock.unlock();
    good = replace_window(offset, end) && good;
    offset = end;
  }
  if (!good) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: no memory to detach all of the arena after a failure: a rank "
        "that was stopped and continues may still change tensors of the group");
  }
}

size_t Arena::committed_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return committed_ - in_holes_;
}

} // namespace fusedpg
