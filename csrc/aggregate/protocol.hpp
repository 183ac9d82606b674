#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/deadline.hpp"
#include "base/siphash.hpp"
#include "net/tcp_listener.hpp"

// The conversation of workers and aggregators.
//
// A job is a group's workers and its aggregators: in its transport worker r is
// rank r, and aggregator a is rank `workers` + a. Rank 0 opens it at each
// aggregator's front door, whose key is the aggregator's secret; connections
// of the job have keys of their own. An operation is a Head to each aggregator
// and then segments: segment s of a tensor belongs to aggregator
// s % aggregators, which adds up the contributions of all workers in rank order
// and sends the result to each. A worker sends a segment only when the result
// of the one kSlots before it, of the same aggregator, has come.
namespace fusedpg::aggregate {

constexpr uint64_t kFrontDoor = 1; // the endpoint that takes jobs in
constexpr size_t kSlots = 8;
constexpr size_t kSegmentBytes = size_t(252) << 10; // see select_net_segment()
constexpr size_t kMostWorkers = 4096;
constexpr size_t kMostAggregators = 64;

enum class Tag : uint32_t {
  kHead,
  kContribution,
  kResult,
  kBlockHeader,
  kBlocks
};
inline constexpr auto kBlockHeaderTag =
    static_cast<uint32_t>(Tag::kBlockHeader);
inline constexpr auto kBlocksTag = static_cast<uint32_t>(Tag::kBlocks);

// The same from all workers. Without padding, as it is compared byte by byte.
struct Head {
  uint64_t sequence = 0;
  uint64_t count = 0; // elements of the tensor
  uint64_t segment = 0; // and of a segment
  int64_t divisor = 1; // see kernels::ReduceArgs
  double factor = 1;
  uint32_t dtype = 0;
  uint32_t op = 0;
  // Elements of a block, and blocks of a message; 0: the tensor is dense.
  uint32_t block = 0;
  uint32_t stripe = 0;
};
static_assert(std::is_trivially_copyable_v<Head> && sizeof(Head) == 56);

// Nobody but the workers knows how long an operation may take: a worker that
// waits too long ends its connections, which ends the job.
inline Deadline never() {
  return Deadline(std::chrono::hours(24 * 365));
}

// Segments of a tensor that are an aggregator's.
constexpr uint64_t segments_of(
    uint64_t segments,
    uint64_t aggregator,
    uint64_t aggregators) {
  return segments / aggregators + (segments % aggregators > aggregator ? 1 : 0);
}

// Rank 0 says this at the front door; the answer is the address of the job's
// endpoint there, or why there is none, behind "! ".
struct Request {
  std::vector<std::string> workers; // the addresses of their endpoints
  size_t aggregators = 1;
  size_t index = 0; // which of them this one is

  std::string text() const;
  // Throws Error(kPeerFailed) for what is no request.
  static Request of(const std::string& text);
};
constexpr size_t kMostRequestBytes = size_t(1) << 20;

// "host:port" or "[host]:port" to an address of the front door. Throws
// Error(kInvalid), also where the host has no address.
TcpAddress front_door(const std::string& place, const Key128& key);

// 32 hexadecimal digits. Throws Error(kInvalid) for anything else.
Key128 key_of(const std::string& digits);

} // namespace fusedpg::aggregate
