#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/dtype.hpp"
#include "check.hpp"
#include "kernels_reference.hpp"

// What NCCL's primitives do between neighbours of a ring, on CPU threads: steps
// of a cyclic buffer, slices, credits, and each protocol's way to say that data
// are there. Files and lines are those of src/device of NCCL 2.30.7. What is not
// modelled is said in patches/nccl/README.md.
namespace fusedpg::test {

enum class Protocol { kSimple, kLL, kLL128 };

struct RingShape {
  Protocol protocol;
  size_t chunk_bytes; // at most
  int steps_per_slice; // Simple
  int slices_per_chunk; // Simple

  int slices() const {
    return protocol == Protocol::kSimple ? slices_per_chunk : 1;
  }
  int steps_of_slice() const {
    return protocol == Protocol::kSimple ? steps_per_slice : 1;
  }
  int steps_of_chunk() const {
    return slices() * steps_of_slice();
  }
};

// From a rank to the next one, for one channel.
class RingFifo {
 public:
  static constexpr uint64_t kSteps = 8; // NCCL_STEPS

  explicit RingFifo(const RingShape& shape)
      : shape_(shape),
        lines_((shape.chunk_bytes / shape.slices() + 7) / 8 + 16),
        words_(new std::atomic<uint64_t>[kSteps * 2 * lines_]) {
    for (size_t i = 0; i < kSteps * 2 * lines_; ++i) {
      words_[i] = 0;
    }
  }
  // The producer's next slice; waits for room: waitPeer (prims_simple.h:107),
  // waitSend (prims_ll.h:76, prims_ll128.h:73). Room is asked for, and a step
  // taken, also where there is nothing to send.
  void put(const char* data, size_t bytes) {
    const auto steps = static_cast<uint64_t>(shape_.steps_of_slice());
    wait([&] { return taken_.load() + kSteps >= put_ + steps; });
    std::atomic<uint64_t>* slot = slot_of(put_);
    const uint64_t flag = put_ + 1;
    for (size_t i = 0; 8 * i < bytes; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, data + 8 * i, std::min<size_t>(8, bytes - 8 * i));
      switch (shape_.protocol) {
        case Protocol::kSimple:
          slot[i].store(word, std::memory_order_relaxed);
          break;
        case Protocol::kLL: // 4 bytes and their flag (prims_ll.h:59), twice
          slot[2 * i].store(flag << 32 | (word & 0xffffffff));
          slot[2 * i + 1].store(flag << 32 | word >> 32);
          break;
        case Protocol::kLL128: // a flag behind 15 words (prims_ll128.h:279)
          slot[i / 15 * 16 + i % 15].store(word, std::memory_order_relaxed);
          if (i % 15 == 14 || 8 * (i + 1) >= bytes) {
            slot[i / 15 * 16 + 15].store(flag, std::memory_order_release);
          }
      }
    }
    sent += bytes;
    put_ += steps;
    // postPeer (prims_simple.h:165)
    posted_.store(put_, std::memory_order_release);
  }
  // The consumer's next slice; waits for it.
  void take(char* data, size_t bytes) {
    const auto steps = static_cast<uint64_t>(shape_.steps_of_slice());
    const uint64_t step = taken_.load(std::memory_order_relaxed);
    const std::atomic<uint64_t>* slot = slot_of(step);
    const uint64_t flag = step + 1;
    if (shape_.protocol == Protocol::kSimple) {
      wait([&] { return posted_.load(std::memory_order_acquire) > step; });
    }
    for (size_t i = 0; 8 * i < bytes; ++i) {
      uint64_t word = 0;
      const auto flagged = [&](const std::atomic<uint64_t>& half) {
        uint64_t value = 0;
        wait([&] { return (value = half.load()) >> 32 == flag; });
        return value & 0xffffffff;
      };
      switch (shape_.protocol) {
        case Protocol::kSimple:
          word = slot[i].load(std::memory_order_relaxed);
          break;
        case Protocol::kLL:
          word = flagged(slot[2 * i]);
          word |= flagged(slot[2 * i + 1]) << 32;
          break;
        case Protocol::kLL128:
          if (i % 15 == 0) {
            const std::atomic<uint64_t>& of_line = slot[i / 15 * 16 + 15];
            wait([&] {
              return of_line.load(std::memory_order_acquire) == flag;
            });
          }
          word = slot[i / 15 * 16 + i % 15].load(std::memory_order_relaxed);
      }
      std::memcpy(data + 8 * i, &word, std::min<size_t>(8, bytes - 8 * i));
    }
    taken_.store(step + steps, std::memory_order_release);
  }
  uint64_t steps() const {
    return put_;
  }
  bool drained() const {
    return taken_ == put_;
  }

  size_t sent = 0; // bytes

 private:
  std::atomic<uint64_t>* slot_of(uint64_t step) {
    return &words_[step % kSteps * 2 * lines_];
  }
  template <typename Ready>
  static void wait(Ready&& ready) {
    while (!ready()) {
      std::this_thread::yield();
    }
  }

  const RingShape shape_;
  const size_t lines_;
  std::unique_ptr<std::atomic<uint64_t>[]> words_;
  uint64_t put_ = 0; // steps
  std::atomic<uint64_t> posted_{0};
  std::atomic<uint64_t> taken_{0};
};

// NCCL's names, on one rank and channel.
class RingPrims {
 public:
  RingPrims(
      const RingShape& shape,
      DType type,
      RingFifo& from,
      RingFifo& to,
      const char* input,
      char* output)
      : shape_(shape),
        type_(type),
        from_(from),
        to_(to),
        input_(input),
        output_(output) {}

  void send(size_t at, int count) {
    run(input_, at, nullptr, 0, count, false, true);
  }
  void sendFromOutput(size_t at, int count) {
    run(output_, at, nullptr, 0, count, false, true);
  }
  void recvReduceSend(size_t at, int count) {
    run(input_, at, nullptr, 0, count, true, true);
  }
  void recvReduceCopy(size_t from, size_t to, int count) {
    run(input_, from, output_, to, count, true, false);
  }
  void recvCopySend(size_t at, int count) {
    run(nullptr, 0, output_, at, count, true, true);
  }
  void recv(size_t at, int count) {
    run(nullptr, 0, output_, at, count, true, false);
  }

 private:
  void run(
      const char* source,
      size_t from,
      char* target,
      size_t to,
      int count,
      bool receives,
      bool sends) {
    const size_t size = dtype_size(type_);
    CHECK(count >= 0 && size_t(count) * size <= shape_.chunk_bytes);
    // Simple: multiples of 16 elements, and not too small ones, so that the
    // last slices may have none (prims_simple.h:183). The others take a chunk at
    // once (prims_ll.h:245, prims_ll128.h:297).
    const auto slices = static_cast<size_t>(shape_.slices());
    size_t slice = static_cast<size_t>(count);
    if (shape_.protocol == Protocol::kSimple) {
      const size_t whole = shape_.chunk_bytes / size / slices;
      slice = std::max(
          (size_t(count) + 16 * slices - 1) / (16 * slices) * 16, whole / 32);
    }
    size_t first = 0;
    for (size_t k = 0; k < slices; ++k, first += slice) {
      slice = std::min(slice, size_t(count) - first);
      const size_t n = slice;
      data_.assign(n * size, 0);
      auto* data = reinterpret_cast<char*>(data_.data());
      if (receives) {
        from_.take(data, n * size);
      }
      if (source != nullptr && n != 0) {
        const char* mine = source + (from + first) * size;
        if (receives) {
          // What has come is added to what is here (prims_ll.h:279).
          kernels::ReduceArgs sum;
          sum.dtype = type_;
          data_ = reference(sum, {mine, data}, n);
          data = reinterpret_cast<char*>(data_.data());
        } else {
          std::memcpy(data, mine, n * size);
        }
      }
      if (target != nullptr && n != 0) {
        std::memcpy(target + (to + first) * size, data, n * size);
      }
      if (sends) {
        to_.put(data, n * size);
      }
    }
  }

  const RingShape shape_;
  const DType type_;
  RingFifo& from_;
  RingFifo& to_;
  const char* input_;
  char* output_;
  Bytes data_;
};

} // namespace fusedpg::test
