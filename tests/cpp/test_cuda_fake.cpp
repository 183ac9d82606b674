// The fake of CUDA and NCCL that the engine's tests run on: what they rely on.

#include <atomic>
#include <cstdlib>
#include <map>

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

// All three, of `count` elements a rank; `in_place` as NCCL defines it.
void check_collectives(
    const Peer& peer,
    Stream stream,
    Type t,
    NcclRedOp op,
    size_t count,
    bool in_place) {
  const auto size = static_cast<size_t>(peer.size);
  const auto rank = static_cast<size_t>(peer.rank);
  const size_t part = count * t.bytes;
  const Memory whole(part * size);
  const Memory other(part * size);
  const Memory expected(part * size);
  auto* shard = static_cast<char*>(whole.data) + rank * part;
  const auto check = [&](const void* got, size_t elements) {
    CHECK_EQ(gpu().stream_synchronize(stream), 0);
    CHECK(std::memcmp(got, expected.data, elements * t.bytes) == 0);
  };
  for (size_t i = 0; i < count * size; ++i) {
    put(whole.data, i, input(peer.rank, i), t.type);
  }
  void* out = in_place ? shard : other.data;
  CHECK_EQ(
      nccl().reduce_scatter(
          whole.data, out, count, t.type, op, peer.comm, stream),
      kNcclSuccess);
  for (size_t i = 0; i < count; ++i) {
    put(expected.data, i, combined(op, peer.size, rank * count + i), t.type);
  }
  check(out, count);

  for (size_t i = 0; i < count; ++i) {
    put(shard, i, input(peer.rank, i), t.type);
  }
  out = in_place ? whole.data : other.data;
  CHECK_EQ(
      nccl().all_gather(shard, out, count, t.type, peer.comm, stream),
      kNcclSuccess);
  for (size_t i = 0; i < count * size; ++i) {
    put(expected.data,
        i,
        input(static_cast<int>(i / count), i % count),
        t.type);
  }
  check(out, count * size);

  for (size_t i = 0; i < count; ++i) {
    put(whole.data, i, input(peer.rank, i), t.type);
    put(expected.data, i, combined(op, peer.size, i), t.type);
  }
  out = in_place ? whole.data : other.data;
  CHECK_EQ(
      nccl().all_reduce(whole.data, out, count, t.type, op, peer.comm, stream),
      kNcclSuccess);
  check(out, count);
}

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

// --- NCCL --------------------------------------------------------------------

TEST(fake_collectives) {
  const Clean clean;
  for (int size = 1; size <= 4; ++size) {
    on_ranks(size, [size](int rank, Store& store) {
      hooks().set_delay(20);
      const OwnStream stream;
      Peer peer(rank, size, store);
      for (const Type t : kTypes) {
        check_collectives(peer, stream, t, kNcclSum, 37, false);
      }
      check_collectives(peer, stream, kTypes[0], kNcclMax, 5, true);
      check_collectives(peer, stream, kTypes[4], kNcclMin, 64, true);
      // In several parts.
      check_collectives(peer, stream, kTypes[5], kNcclSum, 150000, true);
      peer.finish();
    });
  }
}

TEST(fake_collectives_average_and_count) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    Peer peer(rank, 2, store);
    float value = static_cast<float>(rank) * 5;
    const OwnStream stream;
    CHECK_EQ(
        nccl().all_reduce(
            &value, &value, 1, kNcclFloat32, kNcclAvg, peer.comm, stream),
        kNcclSuccess);
    stream.sync();
    CHECK_EQ(value, 2.5f);
    CHECK_EQ(
        nccl().all_reduce(
            &value,
            &value,
            1,
            static_cast<NcclDataType>(77),
            kNcclSum,
            peer.comm,
            stream),
        kNcclInvalidArgument);
    store.meet("done", 2);
    CHECK_EQ(hooks().now().collectives_begun, 2u);
    CHECK_EQ(hooks().now().communicators, 2u);
    store.meet("counted", 2);
    peer.finish();
  });
}

TEST(fake_abort_ends_a_hang) {
  const Clean clean;
  on_ranks(2, [](int rank, Store& store) {
    Peer peer(rank, 2, store);
    if (rank == 0) {
      const OwnStream stream;
      const OwnEvent done;
      float value = 1;
      peer.sum(&value, 1, kNcclFloat32, stream);
      CHECK_EQ(gpu().event_record(done, stream), 0);
      std::this_thread::sleep_for(milliseconds(20));
      CHECK_EQ(gpu().event_query(done), kNotReady);
      CHECK_EQ(nccl().comm_abort(peer.comm), kNcclSuccess);
      peer.comm = nullptr;
      stream.sync();
      CHECK_EQ(value, 1.f);
    }
    store.meet("aborted", 2);
  });
}

TEST(fake_mismatch_hangs_and_is_noted) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    Peer peer(rank, 2, store);
    const OwnStream stream;
    const OwnEvent done;
    float values[8] = {};
    peer.sum(values, rank == 0 ? 4 : 5, kNcclFloat32, stream);
    CHECK_EQ(gpu().event_record(done, stream), 0);
    const Deadline deadline(kLong);
    while (hooks().now().mismatches < 2 && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK_EQ(hooks().now().mismatches, 2u);
    CHECK(std::strstr(hooks().now().note, "all_reduce #0 of count") != nullptr);
    CHECK_EQ(gpu().event_query(done), kNotReady);
    store.meet("seen", 2);
    CHECK_EQ(nccl().comm_abort(peer.comm), kNcclSuccess);
    peer.comm = nullptr;
    stream.sync();
  });
}

TEST(fake_faults) {
  const Clean clean;
  hooks().fail_rank("ncclReduceScatter", 1, 2, kNcclSystemError);
  hooks().stall(0, 1, 60);
  on_threads(2, [](int rank, Store& store) {
    Peer peer(rank, 2, store);
    const OwnStream stream;
    float values[2] = {1, 1};
    const auto run = [&] {
      return nccl().reduce_scatter(
          values, values + rank, 1, kNcclFloat32, kNcclSum, peer.comm, stream);
    };
    const auto start = Clock::now();
    store.meet("start", 2);
    CHECK_EQ(run(), kNcclSuccess);
    stream.sync();
    CHECK(seconds_since(start) > 0.05);
    CHECK_EQ(run(), rank == 1 ? kNcclSystemError : kNcclSuccess);
  });
}

TEST(fake_order_of_communicators) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    Peer one(rank, 2, store, "one");
    Peer two(rank, 2, store, "two");
    const OwnStream a;
    const OwnStream b;
    const OwnEvent done;
    float values[4] = {};
    one.sum(values, 1, kNcclFloat32, a);
    // Work of one communicator keeps its order on any streams.
    one.sum(values, 2, kNcclFloat32, b);
    two.sum(values, 3, kNcclFloat32, b);
    a.sync();
    b.sync();
    one.finish();
    two.finish();
  });
  fake::Executed log[8];
  CHECK_EQ(hooks().order(log, 8), 6u);
  for (int rank = 0; rank < 2; ++rank) {
    uint64_t count = 0;
    std::map<uint64_t, uint64_t> sequences;
    for (int i = 0; i < 6; ++i) {
      if (log[i].rank == rank) {
        CHECK_EQ(log[i].count, ++count);
        CHECK_EQ(log[i].sequence, sequences[log[i].communicator]++);
      }
    }
    CHECK_EQ(sequences.size(), 2u);
  }
}

TEST(fake_capture_of_collectives) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    Peer peer(rank, 2, store);
    const OwnStream stream;
    float value = 1;
    void* graph = nullptr;
    CHECK_EQ(hooks().begin_capture(stream), 0);
    peer.sum(&value, 1, kNcclFloat32, stream);
    peer.sum(&value, 1, kNcclFloat32, stream);
    CHECK_EQ(hooks().end_capture(stream, &graph), 0);
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(hooks().launch(graph, stream), 0);
    }
    peer.sum(&value, 1, kNcclFloat32, stream);
    stream.sync();
    CHECK_EQ(value, 128.f);
    CHECK_EQ(hooks().destroy_graph(graph), 0);
    peer.finish();
  });
}

// --- the direct path ---------------------------------------------------------

TEST(fake_direct_step) {
  const Clean clean;
  constexpr int kRanks = 3;
  constexpr uint64_t kShard = 64, kCount = kRanks * kShard - 10,
                     kTensors = 8192;
  on_threads(kRanks, [](int rank, Store& store) {
    const OwnStream stream;
    const auto mine = SharedBlocks::make(kTensors + sizeof(DirectRoom));
    char* base = mine.get();
    std::memset(base + kTensors, 0, sizeof(DirectRoom));
    const auto all = SharedBlocks::meet(store, "blocks", rank, kRanks, mine);
    uint64_t stop = 0;
    PeerAccess peers{};
    peers.rank = rank;
    peers.size = kRanks;
    for (int p = 0; p < kRanks; ++p) {
      peers.arenas[p] = all[static_cast<size_t>(p)].get();
    }
    peers.room = kTensors;
    peers.stop = &stop;
    peers.nanoseconds = 60'000'000'000;
    peers.late = &stop;
    peers.sequence = 1;

    // Each rank keeps them elsewhere in its arena.
    const uint64_t offsets[] = {
        64 * uint64_t(rank), 4096 + 64 * uint64_t(rank)};
    auto* grad = reinterpret_cast<float*>(base + offsets[0]);
    auto* param = reinterpret_cast<float*>(base + offsets[1]);
    for (uint64_t i = 0; i < kCount; ++i) {
      grad[i] = static_cast<float>(input(rank, i));
      param[i] = 100;
    }
    constexpr size_t kWords = (header_bytes(1) + 7) / sizeof(uint64_t);
    const auto hash_of = [](int p) { return 7 + 13 * uint64_t(p); };
    uint64_t headers[kRanks][kWords] = {};
    const auto bytes_of = [&](int p) {
      return reinterpret_cast<char*>(headers[p]);
    };
    headers[rank][0] = hash_of(rank);
    store_as(bytes_of(rank) + kHeaderWeight, 1.0 + rank);
    bytes_of(rank)[kHeaderFlags + rank % 2] = 1;
    uint64_t all_offsets[2 * kRanks] = {};
    ExchangeArgs exchange{};
    exchange.peers = peers;
    exchange.headers = headers[0];
    exchange.offsets = offsets;
    exchange.all_offsets = all_offsets;
    exchange.num_tensors = 1;
    exchange.header_words = kWords;
    CHECK_EQ(gpu().exchange(&exchange, stream), 0);
    stream.sync();
    for (int p = 0; p < kRanks; ++p) {
      CHECK_EQ(headers[p][0], hash_of(p));
      CHECK_EQ(load_as<double>(bytes_of(p) + kHeaderWeight), 1.0 + p);
      for (int flag = 0; flag < 2; ++flag) {
        CHECK_EQ(int(bytes_of(p)[kHeaderFlags + flag]), int(flag == p % 2));
      }
      CHECK_EQ(all_offsets[2 * p], 64u * p);
      CHECK_EQ(all_offsets[2 * p + 1], 4096 + 64u * p);
    }

    TensorInfo tensor{};
    tensor.param = param;
    tensor.count = kCount;
    tensor.shard = kShard;
    const ShardPiece piece{0, 0, 0, kShard, 0};
    const Tile tile{0, 0};
    TensorScalars scalars;
    scalars.grad_factor = 0.5;
    scalars.skip = false;
    scalars.sgd.lr = 2;
    DirectArgs step{};
    step.update.chunk = {&tensor, &piece, &tile, 1, rank, kRanks, 0, kShard};
    step.update.formula = kernels::Formula::kSgd;
    step.update.param_type = DType::kFloat32;
    step.update.grad_type = DType::kFloat32;
    step.update.state_type = DType::kFloat32;
    step.update.scalars = &scalars;
    step.peers = peers;
    step.offsets = all_offsets;
    step.num_tensors = 1;
    CHECK_EQ(gpu().direct_step(&step, stream), 0);
    stream.sync();
    for (uint64_t i = 0; i < kCount; ++i) {
      CHECK_EQ(
          param[i], static_cast<float>(100 - combined(kNcclSum, kRanks, i)));
    }
  });
}

} // namespace fusedpg::test
