// The fake of CUDA and NCCL that the engine's tests run on: what they rely on.

#include <atomic>
#include <vector>

#include "fake_carrier.hpp"

namespace fusedpg::test {

using namespace fake_gpu; // NOLINT: all of this is about it

namespace {

// CUDA's codes.
constexpr int kUnsupported = 900;
constexpr int kInvalidated = 901;
constexpr int kUnjoined = 904;
constexpr int kIsolation = 905;
constexpr int kPoison = -1; // an int32 of 0xff bytes

} // namespace

// --- streams, events, memory -------------------------------------------------

TEST(fake_streams_are_fifo_and_independent) {
  const Clean clean;
  const OwnStream a;
  const OwnStream b;
  const Memory x(4);
  const Memory y(4);
  const Memory z(4);
  CHECK_EQ(y.value(), kPoison);
  x.value() = 7;
  std::atomic<bool> go{false};
  hooks().hold(a, &go);
  copy(y, x, a);
  copy(z, y, a);
  b.sync(); // does not wait for a
  CHECK_EQ(gpu().stream_synchronize(nullptr), 0);
  CHECK_EQ(hooks().now().work, 0u);
  go = true;
  a.sync();
  CHECK_EQ(z.value(), 7);
  CHECK_EQ(hooks().now().work, 3u);
  CHECK_EQ(hooks().now().streams, 2u);
}

TEST(fake_events_order_streams) {
  const Clean clean;
  const OwnStream a;
  const OwnStream b;
  const OwnEvent done;
  const Memory x(4);
  const Memory y(4);
  const Memory z(4);
  x.value() = 3;
  CHECK_EQ(gpu().event_query(done), kSuccess);
  CHECK_EQ(gpu().stream_wait_event(b, done), 0); // never recorded: nothing
  std::atomic<bool> go{false};
  hooks().hold(a, &go);
  copy(y, x, a);
  CHECK_EQ(gpu().event_record(done, a), 0);
  CHECK_EQ(gpu().event_query(done), kNotReady);
  if (!kOnlyThreads) { // a data race, on purpose
    copy(z, y, b);
    b.sync();
    CHECK_EQ(z.value(), kPoison);
  }
  CHECK_EQ(gpu().stream_wait_event(b, done), 0);
  copy(z, y, b);
  // The wait is for the record that was there, not for this one.
  std::atomic<bool> go_on{false};
  hooks().hold(a, &go_on);
  CHECK_EQ(gpu().event_record(done, a), 0);
  go = true;
  b.sync();
  CHECK_EQ(z.value(), 3);
  CHECK_EQ(gpu().event_query(done), kNotReady);
  go_on = true;
  a.sync();
  CHECK_EQ(gpu().event_query(done), kSuccess);
}

TEST(fake_devices_and_handles) {
  const Clean clean;
  int count = 0;
  CHECK_EQ(gpu().device_count(&count), 0);
  CHECK_EQ(count, 8);
  CHECK_EQ(gpu().set_device(8), 101);
  Stream stream = nullptr;
  {
    const OwnStream a;
    const OwnEvent here;
    stream = a;
    CHECK_EQ(gpu().set_device(3), 0);
    const OwnEvent elsewhere;
    CHECK_EQ(gpu().event_record(elsewhere, a), 400);
    CHECK_EQ(gpu().event_record(here, a), 0);
    char header[kHeaderFlags] = {};
    ProposeArgs args{};
    args.to.data = header;
    args.to.hash = 0x1234;
    args.to.type = DType::kOpaque;
    args.copies = 1;
    args.items = sizeof header;
    CHECK_EQ(gpu().propose(&args, a), 400); // not this device's
    CHECK_EQ(gpu().propose(&args, nullptr), 0);
    CHECK_EQ(gpu().stream_synchronize(nullptr), 0);
    CHECK_EQ(header[0], 0x34);
    CHECK_EQ(header[1], 0x12);
    CHECK_EQ(gpu().set_device(0), 0);
  }
  CHECK_EQ(gpu().stream_synchronize(stream), 400);
  CHECK_EQ(hooks().now().bad_handles, 3u);
  Event event = nullptr;
  hooks().fail("event_create", 1, 2);
  CHECK_EQ(gpu().event_create(&event), 2);
  CHECK_EQ(hooks().calls("event_create"), 3u);
}

TEST(fake_memory_is_watched) {
  const Clean clean;
  void* memory = nullptr;
  CHECK_EQ(gpu().allocate(&memory, 100), 0);
  CHECK_EQ(hooks().now().device_bytes, 100u);
  CHECK_EQ(gpu().release(memory), 0);
  CHECK_EQ(gpu().release(memory), 1);
  CHECK_EQ(hooks().now().bad_handles, 1u);
  if (!kSanitized) {
    CHECK_EQ(gpu().allocate(&memory, 100), 0);
    CHECK_EQ(gpu().release(memory), 0);
    *static_cast<char*>(memory) = 0;
    CHECK_EQ(hooks().now().freed_written, 1u);
  }
}

TEST(fake_capture_and_replay) {
  const Clean clean;
  const OwnStream a;
  const OwnStream b;
  const OwnEvent fork;
  const OwnEvent join;
  const Memory x(4);
  const Memory y(4);
  const Memory z(4);
  void* graph = nullptr;
  uint64_t capture = 0;
  CHECK_EQ(hooks().begin_capture(a), 0);
  CHECK_EQ(gpu().copy(y.data, x.data, 4, a), 0);
  CHECK_EQ(gpu().event_record(fork, a), 0);
  CHECK_EQ(gpu().stream_wait_event(b, fork), 0);
  CHECK_EQ(gpu().stream_capture(b, &capture), 0);
  CHECK(capture != 0);
  CHECK_EQ(gpu().copy(z.data, y.data, 4, b), 0);
  CHECK_EQ(gpu().event_record(join, b), 0);
  CHECK_EQ(gpu().stream_wait_event(a, join), 0);
  CHECK_EQ(hooks().end_capture(a, &graph), 0);
  CHECK_EQ(gpu().stream_capture(b, &capture), 0);
  CHECK_EQ(capture, 0u);
  b.sync();
  CHECK_EQ(y.value(), kPoison); // nothing has run
  for (int value = 0; value < 10; ++value) {
    x.value() = value;
    CHECK_EQ(hooks().launch(graph, b), 0);
    b.sync();
    CHECK_EQ(z.value(), value);
  }
  CHECK_EQ(hooks().destroy_graph(graph), 0);

  // Left alone at the end.
  CHECK_EQ(hooks().begin_capture(a), 0);
  CHECK_EQ(gpu().event_record(fork, a), 0);
  CHECK_EQ(gpu().stream_wait_event(b, fork), 0);
  copy(z, y, b);
  CHECK_EQ(hooks().end_capture(a, &graph), kUnjoined);
}

TEST(fake_capture_refuses_calls) {
  const Clean clean;
  const OwnStream a;
  const OwnStream b;
  const OwnEvent before;
  const Memory x(4);
  void* graph = nullptr;
  const auto refused = [&](int code, auto&& call) {
    CHECK_EQ(hooks().begin_capture(a), 0);
    CHECK_EQ(call(), code);
    CHECK_EQ(gpu().copy(x.data, x.data, 4, a), kInvalidated);
    CHECK_EQ(hooks().end_capture(a, &graph), kInvalidated);
  };
  CHECK_EQ(gpu().event_record(before, b), 0);
  refused(kUnsupported, [&] { return gpu().stream_synchronize(a); });
  refused(kIsolation, [&] { return gpu().stream_wait_event(a, before); });
  CHECK_EQ(hooks().begin_capture(a), 0); // api.cu asks leave for these
  b.sync();
  CHECK_EQ(gpu().event_query(before), 0);
  CHECK_EQ(hooks().end_capture(a, &graph), 0);
  CHECK_EQ(hooks().destroy_graph(graph), 0);
}

// --- collectives ---------------------------------------------------------------

TEST(fake_mismatch_hangs_and_is_noted) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    FakeCarrier carrier(rank, 2, store, "id", Reach::kNone);
    const cuda::DeviceScope scope(gpu(), rank);
    const OwnStream stream;
    const OwnEvent done;
    std::vector<float> values(16);
    const size_t count = rank == 0 ? 4 : 5;
    carrier.all_gather(
        values.data() + 10, values.data(), count * sizeof(float), stream);
    CHECK_EQ(gpu().event_record(done, stream), 0);
    const Deadline deadline(kLong);
    while (hooks().now().mismatches < 2 && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK_EQ(hooks().now().mismatches, 2u);
    CHECK(std::strstr(hooks().now().note, "ncclAllGather #0 of count"));
    CHECK_EQ(gpu().event_query(done), kNotReady);
    store.meet("seen", 2);
    carrier.abort();
    stream.sync();
  });
}

} // namespace fusedpg::test
