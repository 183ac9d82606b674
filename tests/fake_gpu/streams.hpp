#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/fork.hpp"
#include "cuda_runtime.h"
#include "fifo.hpp"
#include "hooks.hpp"

namespace fusedpg::fake {

// CUDA's codes.
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kIllegalAddress = 700;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureInvalidated = 901;
constexpr int kCaptureMerge = 902;
constexpr int kCaptureUnmatched = 903;
constexpr int kCaptureUnjoined = 904;
constexpr int kCaptureIsolation = 905;
constexpr int kCapturedEvent = 907;
constexpr int kCaptureWrongThread = 908;
constexpr int kUnknownError = 999;

// The calling thread's device.
int& current_device();
// Whether the thread has its device's context, which driver.cpp's functions
// need: the runtime makes it current in calls that need one (here: the two that
// come before every operation).
bool& has_context();
size_t loaded_modules(); // driver.cpp's
int device_count();
// The calling thread's.
cudaStreamCaptureMode& capture_mode();

// What was captured: a lane of operations for each stream, and the records that
// order them. The lanes of a launch run at once, so that a missing wait shows.
struct Graph {
  struct Operation {
    enum Kind { kRun, kRecord, kWait } kind;
    Fifo::Work run;
    size_t record;
  };
  std::vector<std::vector<Operation>> lanes; // the first: of the origin
  size_t records = 0;
  std::mutex launched; // launches of one graph do not overlap

  void execute(uint32_t seed);
};

struct Capture {
  // How many operations of each lane come before a point.
  using Clock = std::vector<size_t>;

  const uint64_t id;
  const cudaStreamCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<void*> streams; // by lane
  std::vector<Clock> clocks; // by lane
  bool invalid = false;
  bool ended = false;

  Capture(uint64_t id, cudaStreamCaptureMode mode) : id(id), mode(mode) {}
  size_t add_lane(void* stream);
  void add(size_t lane, Graph::Operation operation);
  void join(size_t lane, const Clock& before);
  bool joined() const;
};

// An event's latest record.
struct Record {
  int device = 0;
  std::shared_ptr<Marker> marker; // of work that is executed
  std::shared_ptr<Capture> capture; // or of work that was captured
  Capture::Clock clock;
  size_t index = 0;
  void* stream = nullptr;
};

// All streams and events of the process. Functions return CUDA's codes.
class Streams {
 public:
  int create(void** stream);
  int destroy(void* stream);
  int synchronize(void* stream);
  void synchronize_all();
  int capture_info(
      void* stream,
      cudaStreamCaptureStatus* status,
      unsigned long long* id);
  // Kernels run on streams of the current device; `order`, if any, makes all
  // work that names it run in the order of these calls.
  int enqueue(
      void* stream,
      Fifo::Work work,
      int device = kAnyDevice,
      Record* order = nullptr);

  int create_event(void** event);
  int destroy_event(void* event);
  int record(void* event, void* stream);
  int wait(void* stream, void* event);
  int query(void* event);

  int begin_capture(void* stream, cudaStreamCaptureMode mode);
  int end_capture(void* stream, void** graph);
  int launch(void* graph, void* stream);
  int destroy_graph(void* graph);
  // For calls that CUDA may refuse while a stream is captured: 0 or an error.
  int check_unsafe();

  void fill(Stats& stats);
  void reset();

  static constexpr int kAnyDevice = -1;

 private:
  struct Stream {
    int device;
    std::mt19937 random; // the same delays in each run
    std::shared_ptr<Capture> capture;
    size_t lane = 0;
    Fifo fifo;

    Stream(int device, uint32_t seed) : device(device), random(seed) {}
  };

  // All with the lock held.
  Stream* find(void*& stream);
  std::unique_ptr<Stream> make(int device);
  int push(Stream& stream, Fifo::Work work);
  int record(Record& record, Stream& stream, void* handle);
  int wait(Stream& stream, void* handle, const Record& record);
  int check_unsafe_locked();
  void bury();

  std::mutex mutex_;
  uint64_t made_ = 0; // streams, for handles and seeds
  uint64_t events_made_ = 0;
  uint64_t captures_made_ = 0;
  std::map<void*, std::unique_ptr<Stream>> streams_;
  std::map<void*, Record> events_;
  std::map<void*, std::shared_ptr<Graph>> graphs_;
  std::set<std::shared_ptr<Capture>> captures_; // that have not ended
  // Destroyed streams whose work may go on.
  std::vector<std::unique_ptr<Stream>> destroyed_;
};

inline PerProcess<Streams> all_streams;
inline Streams& streams() {
  return all_streams.get();
}

} // namespace fusedpg::fake
