// How the CUDA engine ends: what carrier and GPU still do then holds nobody.

#include "cuda_training.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

// A call of the carrier that does not return: its caller holds the engine.
TEST(cuda_teardown_caller_inside_the_carrier) {
  const Clean clean;
  on_threads(2, [&](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    r.meet("begin");
    if (rank == 0) {
      hooks().fail_rank("ncclReduceScatter", 0, 1, fake::kHang);
      const auto begin = Clock::now();
      std::thread aborter([&] {
        std::this_thread::sleep_for(milliseconds(50));
        r.engine.abort("fused: enough");
      });
      expect_error(ErrorKind::kAborted, {"enough"}, [&] { training.step(); });
      aborter.join();
      CHECK(seconds_since(begin) < 8);
    }
    r.meet("end");
  });
}

// The end of a group whose other thread is inside such a call.
TEST(cuda_teardown_shutdown_beside_a_caller) {
  const Clean clean;
  on_threads(2, [&](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    training.step();
    training.check();
    training.load();
    const uint64_t calls = hooks().calls("ncclReduceScatter");
    r.meet("begin");
    if (rank == 0) {
      hooks().fail_rank("ncclReduceScatter", 0, 1, fake::kHang);
      const auto begin = Clock::now();
      std::thread ender([&] {
        wait_until([=] { return hooks().calls("ncclReduceScatter") > calls; });
        r.engine.shutdown(Deadline(milliseconds(100)));
        CHECK(seconds_since(begin) < 8);
      });
      expect_error(ErrorKind::kAborted, {"was destroyed on rank 0 while"}, [&] {
        training.step();
      });
      ender.join();
      CHECK(seconds_since(begin) < 8);
    }
    r.meet("end");
  });
}

// An abort while a kernel of the direct path waits for a rank, in the step or in
// the exchange before it, without which a step must not begin.
TEST(cuda_teardown_abort_in_a_direct_step) {
  struct Case {
    int nth; // what rank 1 begins late: the exchange, the step
    int milliseconds;
    int aborts; // which rank
  };
  for (const Case c :
       {Case{2, 700, 0}, Case{2, 1500, 1}, Case{1, 1500, 1}, Case{1, 700, 0}}) {
    const Clean clean;
    hooks().set_delay(0);
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store, with_arena());
      GpuTraining training(
          r,
          adam(),
          kSingles,
          {3000, 70},
          static_cast<char*>(r.engine.arena()));
      training.direct = true;
      training.load();
      training.step(); // the first one waits for all ranks
      training.check();
      training.load();
      r.meet("first step");
      const uint64_t begun = hooks().now().collectives_begun;
      if (rank == 1) {
        hooks().stall(1, c.nth, c.milliseconds);
      }
      r.meet("begin");
      const auto begin = Clock::now();
      const OperationPtr op = training.step();
      wait_until(
          [=] { return hooks().now().collectives_begun >= begun + 2 * c.nth; });
      if (rank == c.aborts) {
        r.engine.abort("fused: enough");
        expect_error(ErrorKind::kAborted, {"enough"}, [&] { finish(op); });
      }
      r.meet("aborted");
      r.engine.close();
      CHECK(seconds_since(begin) < 8);
    });
    CHECK_EQ(hooks().now().bad_handles, 0u);
  }
}

// A graph may be launched for as long as the engine lives.
TEST(cuda_teardown_graph_of_the_direct_path) {
  const Clean clean;
  on_threads(2, [&](int rank, Store& store) {
    GpuRank r(rank, 2, store, with_arena());
    GpuTraining training(
        r, adam(), kSingles, {3000, 70}, static_cast<char*>(r.engine.arena()));
    training.direct = true;
    training.load();
    training.step();
    training.check();
    r.engine.drain(kLong);
    CHECK(!r.engine.has_unseen_graphs());
    void* graph = nullptr;
    CHECK_EQ(hooks().begin_capture(r.stream), 0);
    training.step();
    r.engine.join(r.stream);
    CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
    CHECK(r.engine.has_unseen_graphs());
    r.engine.shutdown(Deadline(kLong));
    r.meet("shut down");
    training.load();
    CHECK_EQ(hooks().launch(graph, r.stream), 0);
    training.check();
    r.meet("launched");
    CHECK_EQ(hooks().destroy_graph(graph), 0);
  });
  CHECK_EQ(SharedBlocks::alive, 0);
  CHECK_EQ(hooks().now().bad_handles, 0u);
}

// What was left of a captured call's time says nothing about replays: a peer
// that is later than that is awaited.
TEST(cuda_teardown_replay_after_the_timeout) {
  const Clean clean;
  hooks().set_delay(0);
  on_threads(2, [&](int rank, Store& store) {
    GpuRank r(rank, 2, store, with_arena());
    GpuTraining training(
        r, adam(), kSingles, {3000, 70}, static_cast<char*>(r.engine.arena()));
    training.direct = true;
    training.load();
    training.step();
    training.check();
    r.engine.drain(kLong);
    training.timeout = milliseconds(200);
    void* graph = nullptr;
    CHECK_EQ(hooks().begin_capture(r.stream), 0);
    training.step();
    r.engine.join(r.stream);
    CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
    training.load();
    r.meet("captured");
    if (rank == 1) {
      hooks().stall(1, 2, 1000); // the step itself
    }
    r.meet("begin");
    CHECK_EQ(hooks().launch(graph, r.stream), 0);
    training.check();
    r.meet("launched");
    CHECK(!r.engine.failed());
    r.engine.shutdown(Deadline(kLong));
    CHECK_EQ(hooks().destroy_graph(graph), 0);
  });
  CHECK_EQ(hooks().now().bad_handles, 0u);
}

// Nobody looks: a kernel that waits for a rank ends by itself, and it is known.
// What a late exchange has not left, no step behind it uses: the header that lies
// there from the step before may agree, or not. Nor does a step use what some
// blocks of a late one have left.
TEST(cuda_teardown_direct_step_without_a_peer) {
  struct Case {
    int nth; // what rank 1 begins late: the exchange, the step
    double faster; // what lr is multiplied by
    bool first_met = false; // its first block does not wait for rank 1's
    std::vector<size_t> counts = {3000, 70};
  };
  const Case cases[] = {
      {1, 1},
      {1, 2},
      {2, 1},
      {1, 1, true},
      // The second block has flags.
      {1, 1, true, std::vector<size_t>(2100, 8)}};
  for (const Case& c : cases) {
    const int nth = c.nth;
    EngineWith with = with_arena();
    with.settings.cuda_arena_bytes *= 4;
    const Clean clean;
    hooks().set_delay(0);
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store, with);
      auto* arena = static_cast<char*>(r.engine.arena());
      GpuTraining training(r, adam(), kSingles, c.counts, arena);
      training.direct = true;
      training.load();
      training.step();
      training.check();
      training.load();
      training.timeout = milliseconds(300);
      training.call.hypers[0].lr *= c.faster;
      r.sync();
      const GpuBuffer& param = training.param(0);
      const Bytes before(param.data(), param.data() + param.bytes());
      const float counted = training.counted(0);
      const size_t last = c.counts.size() - 1;
      r.meet("first step");
      if (rank == 1) {
        hooks().stall(1, nth, 2000);
      } else if (c.first_met) {
        auto* room =
            reinterpret_cast<DirectRoom*>(arena + r.engine.arena_bytes());
        ++room->signals[0].passed[1];
      }
      r.meet("begin");
      const auto begin = Clock::now();
      const OperationPtr op = training.step();
      if (rank == 0) {
        r.sync();
        CHECK(seconds_since(begin) < 1.5);
        CHECK(nth == 2 || param.holds(before));
        CHECK(nth == 2 || training.counted(0) == counted);
        CHECK(nth == 2 || training.counted(last) == counted);
        expect_error(
            ErrorKind::kTimeout, {"did not finish within 300 ms"}, [&] {
              training.step();
            });
      }
      r.meet("end");
      r.engine.close();
    });
  }
}

// Nothing of the arena is left.
TEST(cuda_teardown_arena) {
  const Clean clean;
  for (const bool fails : {false, true}) {
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store, with_arena());
      GpuTraining training(
          r, adam(), kSingles, {3000}, static_cast<char*>(r.engine.arena()));
      training.direct = true;
      training.load();
      training.step();
      training.check();
      r.engine.drain(kLong);
      r.meet("done");
      if (fails) {
        r.engine.abort("fused: enough");
        r.engine.close();
      } else {
        r.engine.shutdown(Deadline(kLong));
      }
    });
    CHECK_EQ(SharedBlocks::alive, 0);
  }
  CHECK_EQ(hooks().now().bad_handles, 0u);
}

TEST(cuda_teardown_start_in_the_rendezvous) {
  const Clean clean;
  EngineWith with = with_arena();
  with.reach = Reach::kNever;
  with.deadline = milliseconds(500);
  on_threads(2, [&](int rank, Store& store) {
    expect_error(
        ErrorKind::kTimeout,
        {"the rendezvous of symmetric memory of a group did not end"},
        [&] { GpuRank r(rank, 2, store, with); });
  });
  CHECK_EQ(SharedBlocks::alive, 0);
  CHECK_EQ(hooks().now().bad_handles, 0u);
}

// A start that ends while a call of its own is inside the ring: that launches on the engine's stream when it goes
// on, in a communicator that lives for it.
TEST(cuda_teardown_start_left_inside_the_ring) {
  if (kOnlyThreads) {
    return;
  }
  const Clean clean("FUSEDPG_FAKE_PATCHED", "1");
  on_processes(2, [](int rank, Store& store) { // where what is left ends, too
    static std::atomic<bool> held{true};
    static std::atomic<int> late{0};
    static NcclApi nccl = fake_gpu::nccl(); // its last call may end late
    nccl.reduce_scatter_update = [](const void*,
                                    void*,
                                    size_t,
                                    NcclDataType,
                                    const void*,
                                    int,
                                    NcclComm,
                                    Stream stream) -> NcclResult {
      wait_until([] { return !held; });
      uint64_t capture = 0;
      CHECK_EQ(gpu().stream_capture(stream, &capture), 0);
      CHECK_EQ(gpu().stream_synchronize(stream), 0);
      ++late;
      return kNcclInternalError;
    };
    EngineWith with;
    with.settings.nccl = NcclChoice::kPatched;
    with.nccl = &nccl;
    with.deadline = milliseconds(500);
    bool left_behind = false;
    try {
      GpuRank r(rank, 2, store, with);
    } catch (const CallLeftBehind&) {
      left_behind = true;
    }
    CHECK(left_behind);
    held = false;
    wait_until([] { return late == 1; });
    CHECK_EQ(hooks().now().bad_handles, 0u);
    store.meet("end", 2);
  });
}

// What kernels may use is never freed if they do not come to an end.
TEST(cuda_teardown_busy_gpu) {
  if (kOnlyThreads) {
    return;
  }
  const Clean clean;
  on_processes(1, [](int rank, Store& store) { // where what is left ends, too
    static std::atomic<bool> go{false};
    const auto* behind = new StreamOn(rank);
    fake::Stats before{};
    {
      GpuRank r(rank, 1, store);
      GpuTraining training(r, adam(), kSingles, {3000, 70});
      training.load();
      CudaEngine::Submission submission = training.submission();
      submission.current = behind->stream;
      CHECK_EQ(hooks().hold(behind->stream, &go), 0);
      r.engine.fused_step(training.call, submission);
      r.engine.close(milliseconds(50));
      before = hooks().now();
    }
    CHECK_EQ(hooks().now().device_bytes, before.device_bytes);
    CHECK_EQ(hooks().now().host_bytes, before.host_bytes);
    go = true;
    hooks().synchronize();
    CHECK_EQ(hooks().now().bad_handles, 0u);
  });
}

} // namespace fusedpg::test
