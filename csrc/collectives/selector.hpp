#pragma once

#include <cstddef>

#include "collectives/context.hpp"

// The one place that chooses algorithms. Every input is the same on all ranks,
// so every choice is.
namespace fusedpg {

// Operations up to this size copy their input to the staging buffers before
// the first barrier: everybody reads everybody and no second barrier is needed.
constexpr size_t kOneShotBytes = size_t(64) << 10;

// How the data of a large operation travel.
struct Path {
  bool reads_direct; // peers read the inputs in place
  bool writes_direct; // peers write the outputs in place
};

// Called after enter().
Path select_path(Context& ctx);

// Bytes that a rank stages between two barriers, over all destinations.
size_t select_chunk(size_t total_bytes, int world_size);

// Whether results of this size should be written around the cache.
bool select_stream(size_t bytes);

} // namespace fusedpg
