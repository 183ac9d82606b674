#include "c10d/cuda_order.hpp"

#include <algorithm>
#include <thread>

#include <ATen/core/ivalue.h>

namespace fusedpg {
namespace {

constexpr std::chrono::milliseconds kOrderLook{1};

// Makes `to` wait for what is on `from` now. c10's events see to the device.
void link(const c10::Stream& from, const c10::Stream& to) {
  if (from != to) {
    c10::Event event(from.device_type());
    event.record(from);
    event.block(to);
  }
}

// Null for what the delegate has coalesced, for example.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Makes the current stream wait. A wait() also gives up the Work's hold on
// tensors, so the stream that uses them must have waited then; a future does
// not.
void follow(c10d::Work& work) {
  if (const auto future = future_of(work)) {
    future->wait();
  } else {
    work.wait();
  }
}

} // namespace

const CudaOrder::Own& CudaOrder::own(const CudaStreams& streams) {
  if (!own_) {
    const c10::Stream first = streams.from_pool();
    own_ = {first, streams.from_pool()};
  }
  return *own_;
}

void CudaOrder::before_ordinary(
    const CudaStreams& streams,
    cuda::CudaEngine* engine,
    std::optional<Place>& place) {
  const c10::Stream current = streams.current_stream();
  const bool idle = engine == nullptr || engine->idle();
  if (!place) {
    place = {
        streams,
        idle || streams.capturing() ? current : own(streams).calls,
        {}};
  }
  auto& callers = place->callers;
  if (std::find(callers.begin(), callers.end(), current) == callers.end()) {
    callers.push_back(current);
  }
  link(current, place->stream);
  if (!idle) {
    engine->join(streams.handle(place->stream));
  }
}

void CudaOrder::after_ordinary(
    cuda::CudaEngine* engine,
    const Place& place,
    const WorkPtr& work) {
  const CudaStreams& streams = place.streams;
  if (!work) {
    for (const c10::Stream& caller : place.callers) {
      link(place.stream, caller);
    }
  }
  if (engine == nullptr && streams.capturing()) {
    return; // nor can one be made before the capture ends
  }
  const uint64_t capture =
      engine == nullptr ? 0 : engine->capture_of(streams.handle(place.stream));
  if (capture != 0) {
    if (capture_ != capture) {
      captured_works_.clear();
      captured_events_.clear();
      capture_ = capture;
    }
    if (work) {
      captured_works_.push_back(work);
    } else {
      captured_events_.emplace_back(place.stream.device_type());
      captured_events_.back().record(place.stream);
    }
    return;
  }
  // At once, rather than keep the Work, which holds its results.
  called_ = true;
  const c10::Stream& done = own(streams).done;
  if (!work) {
    link(place.stream, done);
  } else if (future_of(*work)) {
    const CudaStreams::Scope scope(streams, done);
    follow(*work);
  } else {
    without_future_ = work;
    its_callers_ = place.callers;
  }
}

cuda::Stream CudaOrder::before_fused(
    const CudaStreams& streams,
    cuda::CudaEngine& engine) {
  const c10::Stream current = streams.current_stream();
  const uint64_t capture = engine.capture_of(streams.handle(current));
  fused_in_ = capture;
  if (capture != 0) {
    if (capture == capture_) {
      for (const WorkPtr& work : captured_works_) {
        follow(*work);
      }
      for (const c10::Event& event : captured_events_) {
        event.block(current);
      }
    }
    return streams.handle(current);
  }
  if (!called_) {
    return streams.handle(current);
  }
  const c10::Stream& done = own(streams).done;
  if (without_future_) {
    // Its wait() releases the tensors: so the streams that have called it, and
    // may use their memory again, wait, too.
    const c10::Stream first = its_callers_.front();
    const CudaStreams::Scope scope(streams, first);
    follow(*without_future_);
    for (const c10::Stream& caller : its_callers_) {
      link(first, caller);
    }
    link(first, done);
    without_future_.reset();
  }
  link(current, done);
  return streams.handle(done);
}

bool CudaOrder::ended(const Deadline& deadline) const {
  if (!own_) {
    return true;
  }
  c10::Event event(own_->done.device_type());
  event.record(own_->done);
  while (!event.query() ||
         (without_future_ && !without_future_->isCompleted())) {
    if (deadline.expired()) {
      return false;
    }
    std::this_thread::sleep_for(kOrderLook);
  }
  return true;
}

void CudaOrder::after_fused() {
  if (fused_in_ == 0) {
    called_ = false;
  } else if (fused_in_ == capture_) {
    captured_works_.clear();
    captured_events_.clear();
  }
}

} // namespace fusedpg
