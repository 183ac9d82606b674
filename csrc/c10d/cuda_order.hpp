#pragma once

#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/cuda_streams.hpp"
#include "cuda/engine.hpp"

namespace fusedpg {

// The order of a group's calls on the GPU. Kernels that wait for their peers must
// never be in flight in different orders on two ranks, and the delegate's
// asynchronous collectives have a stream of their own beside the engine's. So an
// ordinary collective, the delegate's, is called from a stream that has waited for
// the fused operations so far, and a fused operation from one that has waited for
// the ordinary collectives so far. Streams wait, never the host, and the caller's
// stream only where a graph is captured: no other stream is drawn into the capture
// then.
//
// What one capture holds and what runs now have no order among themselves.
//
// Not thread-safe.
class CudaOrder {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Where ordinary collectives are called: one, or several that are coalesced.
  struct Place {
    CudaStreams streams;
    c10::Stream stream; // that they are called from ...
    std::vector<c10::Stream> callers; // ... instead of these
  };

  // Makes the place, or the place of coalesced calls good for one more from
  // the current stream. `engine` may be null: then there is nothing to order.
  void before_ordinary(
      const CudaStreams& streams,
      cuda::CudaEngine* engine,
      std::optional<Place>& place);
  // They were launched. `work` is null if they are synchronous: then the
  // delegate has run them on the stream that they were called from.
  void after_ordinary(
      cuda::CudaEngine* engine,
      const Place& place,
      const c10::intrusive_ptr<c10d::Work>& work);
  // The stream that a fused operation must be called from.
  cuda::Stream before_fused(
      const CudaStreams& streams,
      cuda::CudaEngine& engine);
  // It was called, and not refused: ordinary collectives wait for it, so later
  // fused operations need not wait for those before it.
  void after_fused();
  // Whether the ordinary collectives so far have ended, or do by then.
  bool ended(const Deadline& deadline) const;

 private:
  // Streams of our own, made together so that they differ.
  struct Own {
    c10::Stream calls; // behind fused operations: ordinary ones are called here
    c10::Stream done; // behind ordinary collectives
  };
  const Own& own(const CudaStreams& streams);

  std::optional<Own> own_;
  bool called_ = false; // ordinary ones, since the latest fused operation
  // The latest one whose Work has no future, and the streams that have called it.
  // That of an earlier one has ended before: they run on one stream.
  WorkPtr without_future_;
  std::vector<c10::Stream> its_callers_;
  uint64_t fused_in_ = 0; // the capture of the latest before_fused()

  // Ordinary ones of the latest capture, since its latest fused operation.
  uint64_t capture_ = 0;
  std::vector<WorkPtr> captured_works_;
  std::vector<c10::Event> captured_events_;
};

} // namespace fusedpg
