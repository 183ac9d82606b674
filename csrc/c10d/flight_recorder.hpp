#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

// The latest operations of this process on CPU tensors, for
// torch.distributed.flight_recorder. torch's own recorder is hidden inside its
// library (2.13 exports what dumps it, and nothing that records), so
// operations are kept here, and fusedpg/_flight_recorder.py adds them to its
// dumps.
namespace fusedpg {

// A group as the recorder knows it; it outlives the group.
struct RecordedGroup {
  RecordedGroup(int number, int rank) : number(number), rank(rank) {}
  const int number; // of this process's groups
  const int rank; // of this process in it
  struct Name {
    std::string name;
    std::string description;
    std::vector<uint64_t> ranks; // in the default group
  } name; // as torch tells it; see set_name()
  uint64_t collectives = 0;
  // By peer and direction; true: sent.
  std::map<std::pair<int, bool>, uint64_t> messages;
};

class FlightRecorder {
 public:
  // This process's, with TORCH_FR_BUFFER_SIZE operations, as torch's.
  static FlightRecorder& get();
  FlightRecorder();

  std::shared_ptr<RecordedGroup> add_group(int rank);
  void set_name(RecordedGroup& group, RecordedGroup::Name name);
  RecordedGroup::Name name_of(const RecordedGroup& group);

  // Returns a number for start() and end(); 0 where nothing is recorded. `peer`:
  // of a message.
  static constexpr int kCollective = -1;
  uint64_t record(
      const std::shared_ptr<RecordedGroup>& group,
      const char* title, // static
      const std::vector<at::Tensor>& inputs,
      const std::vector<at::Tensor>& outputs,
      std::chrono::milliseconds timeout,
      int peer = kCollective);
  // From the thread that executes it.
  void start(uint64_t number);
  void end(uint64_t number, bool completed);

  using Sizes = c10::SmallVector<int64_t, 8>; // of each: dimensions, then sizes
  struct Facts {
    std::shared_ptr<RecordedGroup> group;
    const char* title = "";
    int peer = kCollective;
    // Among the group's collectives, or what this rank has sent to the peer, or
    // received from it.
    uint64_t sequence = 0;
    int64_t timeout_ms = 0;
    int64_t created = 0; // ns since the epoch, as all times
    Sizes inputs;
    Sizes outputs;
    c10::SmallVector<at::ScalarType, 4> input_types;
    c10::SmallVector<at::ScalarType, 4> output_types;
    // Of dump():
    uint64_t number = 0;
    int64_t started = 0; // 0: it has not
    int64_t completed = 0;
    bool ended = false; // so or with an error
  };
  // Copies, in order.
  std::vector<Facts> dump();
  std::vector<std::shared_ptr<RecordedGroup>> groups();

 private:
  struct Entry {
    Facts facts;
    std::atomic<uint64_t> number{0}; // 0: none
    std::atomic<int64_t> started{0};
    std::atomic<int64_t> completed{0};
    std::atomic<bool> ended{false};
  };
  Entry* find(uint64_t number);

  std::mutex mutex_;
  std::vector<Entry> entries_;
  uint64_t next_ = 1;
  std::vector<std::weak_ptr<RecordedGroup>> groups_;
  int groups_made_ = 0;
};

} // namespace fusedpg
