#include "streams.hpp"

#include <algorithm>
#include <chrono>
#include <string>

#include "calls.hpp"

namespace fusedpg::fake {

namespace {

// Handles are numbers that no pointer has, so that one used after its end is
// found out.
void* handle(uint64_t kind, uint64_t number) {
  return reinterpret_cast<void*>(kind << 40 | number << 4);
}
constexpr uint64_t kStreamKind = 0x51;
constexpr uint64_t kEventKind = 0xe7;
constexpr uint64_t kGraphKind = 0x69;
constexpr uint64_t kDefaultKind = 0xd0;

Fifo::Work delayed(Fifo::Work work, std::mt19937& random) {
  const uint32_t most = calls().delay;
  const uint32_t delay = most == 0 ? 0 : random() % (most + 1);
  return [work = std::move(work), delay] {
    if (delay != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    if (calls().sticky == 0) {
      work();
    }
    calls().worked();
  };
}

} // namespace

int& current_device() {
  thread_local int device = 0;
  return device;
}

int device_count() {
  return static_cast<int>(from_environment("FUSEDPG_FAKE_DEVICES", 8));
}

// --- graphs ------------------------------------------------------------------

void Graph::execute(uint32_t seed) {
  const std::lock_guard<std::mutex> lock(launched);
  std::vector<Marker> markers(records);
  const auto run = [&](size_t lane) {
    std::mt19937 random(seed + static_cast<uint32_t>(lane));
    for (const Operation& operation : lanes[lane]) {
      switch (operation.kind) {
        case Operation::kRun:
          delayed(operation.run, random)();
          break;
        case Operation::kRecord:
          markers[operation.record].complete();
          break;
        case Operation::kWait:
          markers[operation.record].wait();
          break;
      }
    }
  };
  std::vector<std::thread> threads;
  for (size_t lane = 1; lane < lanes.size(); ++lane) {
    threads.emplace_back(run, lane);
  }
  run(0);
  for (std::thread& thread : threads) {
    thread.join();
  }
}

size_t Capture::add_lane(void* stream) {
  streams.push_back(stream);
  graph->lanes.emplace_back();
  for (Clock& clock : clocks) {
    clock.push_back(0);
  }
  clocks.emplace_back(streams.size(), 0);
  return streams.size() - 1;
}

void Capture::add(size_t lane, Graph::Operation operation) {
  graph->lanes[lane].push_back(std::move(operation));
  clocks[lane][lane] = graph->lanes[lane].size();
}

void Capture::join(size_t lane, const Clock& before) {
  for (size_t i = 0; i < before.size(); ++i) {
    clocks[lane][i] = std::max(clocks[lane][i], before[i]);
  }
}

// Whether the origin comes after everything; records are no work.
bool Capture::joined() const {
  for (size_t lane = 0; lane < graph->lanes.size(); ++lane) {
    const auto& operations = graph->lanes[lane];
    for (size_t i = clocks[0][lane]; i < operations.size(); ++i) {
      if (operations[i].kind != Graph::Operation::kRecord) {
        return false;
      }
    }
  }
  return true;
}

// --- streams -----------------------------------------------------------------

std::unique_ptr<Streams::Stream> Streams::make(int device) {
  return std::make_unique<Stream>(
      device, static_cast<uint32_t>(calls().seed * 7919 + ++made_));
}

Streams::Stream* Streams::find(void*& stream) {
  // Null, cudaStreamLegacy and cudaStreamPerThread: the device's default one.
  const bool is_default = reinterpret_cast<uintptr_t>(stream) <= 2;
  if (is_default) {
    stream = handle(kDefaultKind, static_cast<uint64_t>(current_device()));
  }
  std::unique_ptr<Stream>* found = nullptr;
  if (is_default) {
    found = &streams_[stream];
    if (*found == nullptr) {
      *found = make(current_device());
    }
  } else if (const auto at = streams_.find(stream); at != streams_.end()) {
    found = &at->second;
  } else {
    calls().bad_handle(kInvalidHandle, "no such stream");
  }
  return found == nullptr ? nullptr : found->get();
}

void Streams::bury() {
  std::erase_if(
      destroyed_, [](const auto& stream) { return stream->fifo.finished(); });
}

int Streams::create(void** stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bury();
  std::unique_ptr<Stream> made = make(current_device());
  *stream = handle(kStreamKind, made_);
  streams_.emplace(*stream, std::move(made));
  return cuda::kSuccess;
}

// Returns at once; queued work still runs.
int Streams::destroy(void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bury();
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    return calls().bad_handle(kInvalidHandle, "no such stream to destroy");
  }
  if (found->second->capture) {
    found->second->capture->invalid = true;
    return kCaptureUnsupported;
  }
  found->second->fifo.close();
  destroyed_.push_back(std::move(found->second));
  streams_.erase(found);
  return cuda::kSuccess;
}

int Streams::push(Stream& stream, Fifo::Work work) {
  if (stream.capture == nullptr) {
    stream.fifo.push(std::move(work));
    return cuda::kSuccess;
  }
  if (stream.capture->invalid) {
    return kCaptureInvalidated;
  }
  stream.capture->add(
      stream.lane, {Graph::Operation::kRun, std::move(work), 0});
  return cuda::kSuccess;
}

int Streams::enqueue(void* stream, Fifo::Work work, int device, Record* order) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* found = find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  if (device != kAnyDevice && device != found->device) {
    return calls().bad_handle(
        kInvalidHandle, "a kernel on a stream of another device");
  }
  // Only work of the same capture, or none, can be ordered.
  if (order != nullptr && order->stream != stream &&
      (order->marker != nullptr || order->capture != nullptr) &&
      order->capture == found->capture) {
    if (const int error = wait(*found, stream, *order)) {
      return error;
    }
  }
  // A graph draws its own delays at each launch.
  const int error = push(
      *found,
      found->capture ? std::move(work)
                     : delayed(std::move(work), found->random));
  if (error != cuda::kSuccess || order == nullptr) {
    return error;
  }
  return record(*order, *found, stream);
}

void Streams::synchronize_all() {
  std::vector<std::shared_ptr<Marker>> markers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [ignored, stream] : streams_) {
      markers.push_back(std::make_shared<Marker>());
      stream->fifo.push([marker = markers.back()] { marker->complete(); });
    }
  }
  for (const auto& marker : markers) {
    marker->wait();
  }
}

int Streams::synchronize(void* stream) {
  const auto marker = std::make_shared<Marker>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Stream* found = find(stream);
    if (found == nullptr) {
      return kInvalidHandle;
    }
    if (found->capture) {
      found->capture->invalid = true;
      return kCaptureUnsupported;
    }
    if (const int error = check_unsafe_locked()) {
      return error;
    }
    found->fifo.push([marker] { marker->complete(); });
  }
  marker->wait();
  return cuda::kSuccess;
}

// As CUDA's, it gives no number of a capture that is invalid.
int Streams::capture_info(
    void* stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stream* found = find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  const auto& capture = found->capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
      : capture->invalid       ? kCaptureStatusInvalidated
                               : kCaptureActive;
  if (*status == kCaptureActive) {
    *id = capture->id;
  }
  return cuda::kSuccess;
}

// --- events ------------------------------------------------------------------

int Streams::create_event(void** event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *event = handle(kEventKind, ++events_made_);
  events_[*event].device = current_device();
  return cuda::kSuccess;
}

int Streams::destroy_event(void* event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return events_.erase(event) == 1
      ? cuda::kSuccess
      : calls().bad_handle(kInvalidHandle, "no such event to destroy");
}

int Streams::record(Record& record, Stream& stream, void* handle) {
  if (stream.capture) {
    Capture& capture = *stream.capture;
    if (capture.invalid) {
      return kCaptureInvalidated;
    }
    record.index = capture.graph->records++;
    capture.add(stream.lane, {Graph::Operation::kRecord, {}, record.index});
    record.capture = stream.capture;
    record.clock = capture.clocks[stream.lane];
    record.marker = nullptr;
  } else {
    record.marker = std::make_shared<Marker>();
    record.capture = nullptr;
    stream.fifo.push([marker = record.marker] { marker->complete(); });
  }
  record.stream = handle;
  return cuda::kSuccess;
}

int Streams::record(void* event, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = events_.find(event);
  if (at == events_.end()) {
    return calls().bad_handle(kInvalidHandle, "no such event to record");
  }
  Stream* found = find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  if (at->second.device != found->device) {
    return calls().bad_handle(
        kInvalidHandle, "an event recorded on a stream of another device");
  }
  return record(at->second, *found, stream);
}

int Streams::wait(Stream& stream, void* handle, const Record& record) {
  if (record.capture == nullptr) {
    if (record.marker == nullptr) {
      return cuda::kSuccess; // never recorded
    }
    if (stream.capture) {
      stream.capture->invalid = true;
      return kCaptureIsolation;
    }
    stream.fifo.push([marker = record.marker] { marker->wait(); });
    return cuda::kSuccess;
  }
  if (record.capture->ended) {
    return kCapturedEvent;
  }
  if (stream.capture == nullptr) {
    stream.capture = record.capture;
    stream.lane = stream.capture->add_lane(handle);
  } else if (stream.capture != record.capture) {
    stream.capture->invalid = record.capture->invalid = true;
    return kCaptureMerge;
  }
  if (stream.capture->invalid) {
    return kCaptureInvalidated;
  }
  stream.capture->add(stream.lane, {Graph::Operation::kWait, {}, record.index});
  stream.capture->join(stream.lane, record.clock);
  return cuda::kSuccess;
}

int Streams::wait(void* stream, void* event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = events_.find(event);
  if (at == events_.end()) {
    return calls().bad_handle(kInvalidHandle, "no such event to wait for");
  }
  Stream* found = find(stream);
  return found == nullptr ? kInvalidHandle : wait(*found, stream, at->second);
}

int Streams::query(void* event) {
  std::shared_ptr<Marker> marker;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = events_.find(event);
    if (at == events_.end()) {
      return calls().bad_handle(kInvalidHandle, "no such event to query");
    }
    if (const std::shared_ptr<Capture>& capture = at->second.capture) {
      capture->invalid = true;
      return kCapturedEvent;
    }
    if (const int error = check_unsafe_locked()) {
      return error;
    }
    marker = at->second.marker;
  }
  return marker == nullptr || marker->done() ? cuda::kSuccess : cuda::kNotReady;
}

// --- capture -----------------------------------------------------------------

cudaStreamCaptureMode& capture_mode() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

// CUDA refuses queries, allocations and waits while this thread captures, but
// for a relaxed capture, and while another one does in the global mode; unless
// the thread has asked for a mode that minds less.
int Streams::check_unsafe_locked() {
  int error = cuda::kSuccess;
  for (const std::shared_ptr<Capture>& capture : captures_) {
    const bool own = capture->thread == std::this_thread::get_id();
    const auto least =
        own ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal;
    if (capture_mode() <= least && capture->mode <= least) {
      capture->invalid = true;
      error = kCaptureUnsupported;
    }
  }
  return error;
}

int Streams::check_unsafe() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return check_unsafe_locked();
}

int Streams::begin_capture(void* stream, cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {
    return kCaptureUnsupported; // as CUDA's legacy stream
  }
  Stream* found = find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  if (found->capture) {
    found->capture->invalid = true;
    return kCaptureUnmatched;
  }
  found->capture = std::make_shared<Capture>(captures_made_++, mode);
  found->lane = found->capture->add_lane(stream);
  captures_.insert(found->capture);
  return cuda::kSuccess;
}

int Streams::end_capture(void* stream, void** graph) {
  std::shared_ptr<Graph> captured; // may be freed here, without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  *graph = nullptr;
  Stream* found = find(stream);
  if (found == nullptr) {
    return kInvalidHandle;
  }
  const std::shared_ptr<Capture> capture = found->capture;
  if (capture == nullptr || capture->streams[0] != stream) {
    return kCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return kCaptureWrongThread;
  }
  capture->ended = true;
  const bool joined = capture->joined();
  // Records of the capture outlive it; the work they hold must not.
  captured.swap(capture->graph);
  captures_.erase(capture);
  for (const auto& [ignored, other] : streams_) {
    if (other->capture == capture) {
      other->capture = nullptr;
    }
  }
  if (capture->invalid) {
    return kCaptureInvalidated;
  }
  if (!joined) {
    return kCaptureUnjoined;
  }
  *graph = handle(kGraphKind, ++events_made_);
  graphs_.emplace(*graph, captured);
  return cuda::kSuccess;
}

int Streams::launch(void* graph, void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = graphs_.find(graph);
  Stream* found = find(stream);
  if (at == graphs_.end() || found == nullptr) {
    return calls().bad_handle(
        kInvalidHandle, "no such graph or stream to launch");
  }
  if (found->capture) {
    return kCaptureUnsupported; // child graphs: not here
  }
  found->fifo.push(
      [graph = at->second, seed = static_cast<uint32_t>(found->random())] {
        graph->execute(seed);
      });
  return cuda::kSuccess;
}

int Streams::destroy_graph(void* graph) {
  std::shared_ptr<Graph> ending; // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = graphs_.find(graph);
  if (at == graphs_.end()) {
    return calls().bad_handle(kInvalidHandle, "no such graph to destroy");
  }
  ending.swap(at->second);
  graphs_.erase(at);
  return cuda::kSuccess;
}

// --- the process -------------------------------------------------------------

void Streams::fill(Stats& stats) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [stream, ignored] : streams_) {
    stats.streams += reinterpret_cast<uintptr_t>(stream) >> 40 == kStreamKind;
  }
  stats.events = events_.size();
  stats.graphs = graphs_.size();
}

void Streams::reset() {
  // Their work may take the lock, so they are joined without it.
  std::vector<std::unique_ptr<Stream>> ending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending.swap(destroyed_);
    for (auto at = streams_.begin(); at != streams_.end();) {
      if (reinterpret_cast<uintptr_t>(at->first) >> 40 == kDefaultKind) {
        ending.push_back(std::move(at->second));
        at = streams_.erase(at);
      } else {
        ++at;
      }
    }
  }
}

} // namespace fusedpg::fake

FUSEDPG_FAKE_EXPORT int fusedpg_fake_sleep(void* stream, int milliseconds) {
  return fusedpg::fake::streams().enqueue(stream, [milliseconds] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_hold(
    void* stream,
    const std::atomic<bool>* go) {
  return fusedpg::fake::streams().enqueue(stream, [go] {
    while (!*go) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_synchronize() {
  fusedpg::fake::streams().synchronize_all();
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_fault(void* stream) {
  return fusedpg::fake::streams().enqueue(stream, [] {
    fusedpg::fake::calls().sticky = fusedpg::fake::kIllegalAddress;
  });
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_begin_capture(void* stream, int mode) {
  return fusedpg::fake::streams().begin_capture(
      stream, static_cast<cudaStreamCaptureMode>(mode));
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_unsafe() {
  return fusedpg::fake::streams().check_unsafe();
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_end_capture(void* stream, void** graph) {
  return fusedpg::fake::streams().end_capture(stream, graph);
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_launch(void* graph, void* stream) {
  return fusedpg::fake::streams().launch(graph, stream);
}

FUSEDPG_FAKE_EXPORT int fusedpg_fake_destroy_graph(void* graph) {
  return fusedpg::fake::streams().destroy_graph(graph);
}
