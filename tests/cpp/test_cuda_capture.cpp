// Captures into graphs: what the fake refuses, as CUDA does, and what the
// engine makes of a capture beside other work. And what follows a kernel's
// fault, after which CUDA refuses everything.

#include "cuda_training.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it
using namespace fake_gpu; // NOLINT

namespace {

// CUDA's codes.
constexpr int kIllegalAddress = 700;
constexpr int kUnsupported = 900;
constexpr int kInvalidated = 901;
constexpr int kMerge = 902;
constexpr int kCapturedEvent = 907;
constexpr int kWrongThread = 908;
enum Mode { kGlobal, kThreadLocal, kRelaxed };

int on_another_thread(const std::function<int()>& call) {
  int result = 0;
  std::thread([&] { result = call(); }).join();
  return result;
}

uint64_t capture_of(Stream stream) {
  return cuda::capture_of(gpu(), stream);
}

} // namespace

TEST(fake_capture_modes) {
  const Clean clean;
  const OwnStream a;
  const auto unsafe = [] { return hooks().unsafe(); };
  for (const Mode mode : {kGlobal, kThreadLocal, kRelaxed}) {
    for (const bool elsewhere : {false, true}) {
      void* graph = nullptr;
      CHECK_EQ(hooks().begin_capture(a, mode), 0);
      const int result = elsewhere ? on_another_thread(unsafe) : unsafe();
      const bool refused = elsewhere ? mode == kGlobal : mode != kRelaxed;
      CHECK_EQ(result, refused ? kUnsupported : 0);
      CHECK(capture_of(a) != 0); // as long as it has not ended
      const auto end = [&] { return hooks().end_capture(a, &graph); };
      CHECK_EQ(on_another_thread(end), mode == kRelaxed ? 0 : kWrongThread);
      if (mode != kRelaxed) {
        CHECK_EQ(end(), refused ? kInvalidated : 0);
      }
      if (graph != nullptr) {
        CHECK_EQ(hooks().destroy_graph(graph), 0);
      }
      CHECK_EQ(capture_of(a), 0u);
      CHECK_EQ(unsafe(), 0);
    }
  }
}

TEST(fake_captures_are_apart) {
  const Clean clean;
  const OwnStream a;
  const OwnStream b;
  const OwnEvent in_a;
  const Memory x(4);
  void* graph = nullptr;
  CHECK_EQ(hooks().begin_capture(a), 0);
  CHECK_EQ(hooks().begin_capture(b), 0);
  CHECK(capture_of(a) != capture_of(b));
  copy(x, x, a);
  CHECK_EQ(gpu().event_record(in_a, a), 0);
  CHECK_EQ(gpu().stream_wait_event(b, in_a), kMerge);
  CHECK_EQ(hooks().end_capture(a, &graph), kInvalidated);
  CHECK_EQ(hooks().end_capture(b, &graph), kInvalidated);
  CHECK_EQ(gpu().stream_wait_event(b, in_a), kCapturedEvent);
  CHECK_EQ(gpu().event_query(in_a), kCapturedEvent);
  CHECK_EQ(gpu().event_record(in_a, b), 0); // it can be used again
  b.sync();
  CHECK_EQ(gpu().event_query(in_a), 0);
}

TEST(fake_fault_is_sticky) {
  const Clean clean;
  const OwnStream a;
  const Memory x(4);
  const Memory y(4);
  const int before = y.value();
  x.value() = before + 1;
  CHECK_EQ(hooks().fault(a), 0);
  Event event = nullptr;
  while (gpu().event_create(&event) == 0) {
    CHECK_EQ(gpu().event_destroy(event), 0);
  }
  CHECK_EQ(gpu().copy(y.data, x.data, 4, a), kIllegalAddress);
  CHECK_EQ(gpu().stream_synchronize(a), kIllegalAddress);
  CHECK_EQ(y.value(), before);
  CHECK_EQ(gpu().event_destroy(event), kIllegalAddress);
  hooks().reset(); // as a new process
}

// --- the engine --------------------------------------------------------------

TEST(cuda_engine_beside_a_capture) {
  const Clean clean;
  with_gpus(1, [](GpuRank& r) {
    GpuTraining training(r, adam(), kSingles, {3000, 70});
    training.load();
    training.step();
    training.check();
    r.engine.drain(kLong);
    const OwnStream other;
    CudaEngine::Submission elsewhere = training.submission();
    elsewhere.current = other;
    const auto refused = [&] {
      expect_error(ErrorKind::kInvalid, {"graph that is being captured"}, [&] {
        r.engine.fused_step(training.call, elsewhere);
      });
    };
    void* graph = nullptr;
    void* empty = nullptr;
    CHECK_EQ(hooks().begin_capture(r.stream, kRelaxed), 0);
    training.step();
    refused();
    r.engine.join(other); // only with what is not captured
    CHECK_EQ(capture_of(other), 0u);
    CHECK_EQ(hooks().begin_capture(other, kRelaxed), 0);
    refused();
    r.engine.join(other);
    CHECK_EQ(hooks().end_capture(other, &empty), 0);
    CHECK_EQ(hooks().destroy_graph(empty), 0);
    CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
    CHECK(!r.engine.failed());
    // Both go on.
    training.check(0);
    training.load();
    CHECK_EQ(hooks().launch(graph, r.stream), 0);
    training.check();
    training.load();
    training.step();
    training.check();
    CHECK_EQ(hooks().destroy_graph(graph), 0);
  });
}

TEST(cuda_engine_after_a_fault) {
  const Clean clean;
  on_threads(1, [](int rank, Store& store) {
    GpuRank r(rank, 1, store);
    auto training = std::make_unique<GpuTraining>(
        r, adam(), kSingles, std::vector<size_t>{70});
    training->load();
    training->step();
    r.engine.drain(kLong);
    std::atomic<bool> go{false};
    CHECK_EQ(hooks().hold(r.stream, &go), 0);
    CHECK_EQ(hooks().fault(r.stream), 0);
    const OperationPtr operation = training->step();
    go = true;
    expect_error(ErrorKind::kSystem, {"illegal memory access"}, [&] {
      finish(operation);
    });
    CHECK(r.engine.failed());
    expect_error(ErrorKind::kSystem, {"illegal memory access"}, [&] {
      r.engine.fused_step(training->call, training->submission());
    });
    r.engine.close();
    hooks().reset(); // as a new process
  });
}

} // namespace fusedpg::test
