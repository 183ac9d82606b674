// What the CUDA engine says and does when something fails.

#include "cuda_training.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

namespace {

// The operation that `call` enqueues fails with this, and so do later ones.
void expect_failure(
    GpuRank& r,
    ErrorKind kind,
    const std::vector<std::string>& parts,
    const std::function<OperationPtr()>& call) {
  expect_error(kind, parts, [&] { finish(call()); });
  CHECK(r.engine.failed());
  CHECK_EQ(static_cast<int>(r.engine.failure_kind()), static_cast<int>(kind));
  expect_error(kind, parts, [&] { call(); });
  expect_error(kind, parts, [&] { r.engine.join(r.stream); });
}

} // namespace

TEST(cuda_engine_mismatches) {
  const Clean clean;
  struct Difference {
    const char* text; // what differs, as ranks 0 and 2 say it
    Recipe recipe;
    StepTypes types;
    std::vector<size_t> counts;
    std::function<void(GpuTraining&)> change;
    bool shards = false;
  };
  const std::vector<size_t> counts{3000, 70};
  const auto none = [](GpuTraining&) {};
  const Difference differences[] = {
      {"number of tensors 2 here, 3 there",
       adam(),
       kSingles,
       {3000, 70, 1},
       none},
      {"number of elements 3070 here, 4070 there",
       adam(),
       kSingles,
       {3000, 1070},
       none},
      {"sizes or memory layouts", adam(), kSingles, {70, 3000}, none},
      {"dtype float32 here, float64 there",
       adam(),
       kStepTypes[1],
       counts,
       none},
      {"operation fused_adamw_ here, fused_sgd_ there",
       recipe(OpCode::kFusedSgd),
       kSingles,
       counts,
       none},
      {"operation fused_adamw_ here, fused_lamb_ there",
       recipe(OpCode::kFusedLamb),
       kSingles,
       counts,
       none},
      {"operation fused_adamw_ here, reduce_shards there",
       adam(),
       kSingles,
       counts,
       none,
       true},
      {"scalar arguments (learning rate",
       recipe(OpCode::kFusedAdamW, [](StepHyper& h) { h.lr = 0.02; }),
       kSingles,
       counts,
       none},
      {"options none here, weighted there",
       adam(),
       kSingles,
       counts,
       [](GpuTraining& t) { t.weights = {1, 2, 3}; }},
      {"options none here, with used flags there",
       adam(),
       kSingles,
       counts,
       [](GpuTraining& t) { t.uses = [](int, size_t) { return true; }; }}};
  hooks().set_delay(kShortDelay);
  on_threads(3, [&](int rank, Store& store) {
    int turn = 0;
    for (const Difference& d : differences) {
      EngineWith with;
      with.name = formatted("group{}/", turn++);
      GpuRank r(rank, 3, store, with);
      const bool odd = rank == 1;
      GpuTraining training(
          r,
          odd ? d.recipe : adam(),
          odd ? d.types : kSingles,
          odd ? d.counts : counts);
      if (odd) {
        d.change(training);
      }
      training.load();
      const auto begin = Clock::now();
      expect_failure(
          r,
          ErrorKind::kMismatch,
          {"ranks disagree",
           "rank 0: fused_adamw",
           formatted("rank 1: {}", d.shards ? "reduce_shards" : ""),
           odd ? "rank 1 (here) and rank 0 (there) in"
               : formatted(
                     "rank {} (here) and rank 1 (there) in {}", rank, d.text)},
          [&] {
            return odd && d.shards
                ? r.engine.reduce_shards(
                      training.shards(), training.submission())
                : training.step();
          });
      CHECK(seconds_since(begin) < 8);
      // The tensors are as they were.
      CHECK(training.param(0).holds(training.expected_param(0)));
    }
  });
}

// What was right once may be wrong the next time; the sizes fit, so no rank
// waits, and nothing is written.
TEST(cuda_engine_mismatch_of_a_later_step) {
  const Clean clean;
  constexpr size_t kLarge = 262144; // a chunk by itself
  const struct {
    StepTypes types;
    std::vector<size_t> counts;
    bool half_sums_on_the_wire;
    OpCode op = OpCode::kFusedAdamW;
    std::vector<double> weights;
    bool reduced = false;
  } cases[] = {
      {kSingles, {3000, 70}, false},
      {kSingles, {kLarge}, false},
      {kSingles, {kLarge, kLarge}, false},
      {kSingles, {kLarge, 5}, false},
      {kSingles, {0, 0}, false},
      {kStepTypes[2], {3000, 70}, false},
      {kStepTypes[2], {2 * kLarge}, false},
      {kStepTypes[2], {3000, 70}, true},
      {kSingles, {3000, 70}, false, OpCode::kFusedLamb},
      {kSingles, {3000, 70}, false, OpCode::kFusedAdamW, {0.5, 2}},
      {kStepTypes[2], {3000, 70}, false, OpCode::kFusedAdamW, {0.5, 2}},
      {kSingles, {3000, 70}, false, OpCode::kFusedAdamW, {}, true}};
  for (const auto& c : cases) {
    on_threads(2, [&](int rank, Store& store) {
      EngineWith with;
      with.settings = cuda_settings(size_t{1} << 20);
      with.settings.wide_half_sums = !c.half_sums_on_the_wire;
      GpuRank r(rank, 2, store, with);
      GpuTraining training(r, recipe(c.op), c.types, c.counts);
      training.weights = c.weights;
      const auto step = [&] {
        c.reduced ? training.reduce_and_step(true) : void(training.step());
      };
      training.load();
      step();
      training.check();
      r.engine.drain(kLong);
      training.call.hypers[0].lr *= rank + 1;
      training.load();
      expect_error(
          ErrorKind::kMismatch,
          {"ranks disagree", "rank 1: fused", "learning rate"},
          [&] {
            step();
            r.engine.drain(kLong);
          });
      r.sync();
      for (size_t t = 0; t < c.counts.size(); ++t) {
        CHECK(training.param(t).holds(training.expected_param(t)));
      }
    });
  }
}

// Both are known, and their sizes fit.
TEST(cuda_engine_mismatch_of_known_shards) {
  const Clean clean;
  for (const StepTypes& types : {kSingles, kStepTypes[2]}) {
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store);
      GpuTraining training(r, adam(), types, {3000, 70});
      ShardsCall shards = training.shards();
      const auto reduce = [&](bool mean) {
        shards.reduction.mean = mean;
        return r.engine.reduce_shards(shards, training.submission());
      };
      for (const bool mean : {false, true}) {
        training.load();
        finish(reduce(mean));
      }
      training.load();
      expect_failure(
          r,
          ErrorKind::kMismatch,
          {"ranks disagree", "rank 1: reduce_shards", "reduction"},
          [&] { return reduce(rank == 1); });
      r.sync();
      CHECK(training.holds_gradients());
    });
  }
}

// An operation that has ended well before nobody has looked stays so.
TEST(cuda_engine_mismatch_behind_another_step) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000, 70});
    training.load();
    training.step();
    training.check();
    r.engine.drain(kLong);
    std::atomic<bool> go{false};
    CHECK_EQ(hooks().hold(r.stream, &go), 0);
    const OperationPtr first = training.step();
    training.call.hypers[0].lr *= rank + 1;
    const OperationPtr second = training.step();
    go = true;
    r.sync();
    finish(first);
    expect_error(
        ErrorKind::kMismatch,
        {"ranks disagree about operation 3", "learning rate"},
        [&] { finish(second); });
  });
}

// A rank that knows its call does not wait, nor does another one that knows its
// own, of other sizes: they hang in different collectives, and ask each other.
TEST(cuda_engine_mismatch_of_a_known_step) {
  const Clean clean;
  for (const bool both_known : {false, true}) {
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store);
      GpuTraining known(r, adam(), kSingles, {3000, 70});
      GpuTraining other(r, adam(), kSingles, {4000, 70});
      for (GpuTraining* one : {&known, &other}) {
        if (one == &known || both_known) {
          one->load();
          one->step();
          one->check();
        }
      }
      r.engine.drain(kLong);
      GpuTraining& training = rank == 0 ? known : other;
      training.load();
      const auto begin = Clock::now();
      expect_failure(
          r,
          ErrorKind::kMismatch,
          {"ranks disagree",
           rank == 0 ? "number of elements 3070 here, 4070 there"
                     : "number of elements 4070 here, 3070 there"},
          [&] { return training.step(); });
      CHECK(seconds_since(begin) < 8);
      r.sync();
      CHECK(training.param(0).holds(training.expected_param(0)));
    });
  }
}

// Where ranks' settings make other chunks of the same tensors.
TEST(cuda_engine_mismatched_settings) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    EngineWith with;
    with.settings = cuda_settings(rank == 0 ? 2048 : 4096);
    expect_error(
        ErrorKind::kMismatch,
        {"rank 0: cuda_chunk_bytes=2048", "rank 1: cuda_chunk_bytes=4096"},
        [&] { GpuRank r(rank, 2, store, with); });
  });
}

TEST(cuda_engine_rank_that_never_calls) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    if (rank == 0) {
      training.timeout = milliseconds(200);
      const auto begin = Clock::now();
      // The call itself: it is the first of its kind.
      expect_error(ErrorKind::kTimeout, {"200 ms"}, [&] { training.step(); });
      expect_failure(
          r,
          ErrorKind::kTimeout,
          {"fused_adamw", "200 ms", "rank 0 of 2"},
          [&] { return training.step(); });
      CHECK(seconds_since(begin) > 0.19);
      CHECK(seconds_since(begin) < 8);
    }
    r.meet("late");
    if (rank == 1) { // which hears of it
      expect_failure(
          r, ErrorKind::kPeerFailed, {"another rank has failed: rank 0"}, [&] {
            return training.step();
          });
    }
  });
}

// What all ranks have called before is not waited for: whoever asks finds out.
TEST(cuda_engine_peer_that_is_late) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    training.step();
    training.check();
    training.load();
    r.meet("first step");
    if (rank == 0) {
      training.timeout = milliseconds(200);
      const auto begin = Clock::now();
      const OperationPtr op = training.step();
      CHECK(seconds_since(begin) < 0.15);
      expect_error(
          ErrorKind::kTimeout,
          {"did not finish within 200 ms", "rank 1: does not answer"},
          [&] { finish(op); });
      CHECK(seconds_since(begin) < 8);
    }
    r.meet("late");
  });
}

// The store's host may be stopped, or another thread's wait hold the store:
// deadlines hold all the same.
TEST(cuda_engine_store_that_does_not_answer) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    std::atomic<bool> stuck{false};
    EngineWith with;
    with.stuck = &stuck;
    {
      GpuRank r(rank, 2, store, with);
      GpuTraining training(r, adam(), kSingles, {3000});
      training.load();
      stuck = true;
      if (rank == 0) {
        training.timeout = milliseconds(1500); // it asks for news after 1000
        const auto begin = Clock::now();
        expect_failure(
            r,
            ErrorKind::kTimeout,
            {"fused_adamw", "1500 ms", "the store does not answer"},
            [&] { return training.step(); });
        CHECK(seconds_since(begin) < 8);
      }
      r.meet("late");
    }
    stuck = false;
    // What was asked comes to its end, and uses the store until then.
    store.get("cuda/failed", Deadline(kLong));
    std::this_thread::sleep_for(milliseconds(200));
    store.meet("end", 2);
  });
}

// A store whose host has gone throws what is not an Error: the engine fails all
// the same, and its end throws nothing.
TEST(cuda_engine_store_that_throws) {
  const Clean clean;
  for (const bool expires : {false, true}) {
    std::atomic<bool> gone{false};
    on_threads(2, [&](int rank, Store& store) {
      EngineWith with;
      with.gone = &gone;
      GpuRank r(rank, 2, store, with);
      GpuTraining training(r, adam(), kSingles, {3000});
      training.load();
      training.step();
      training.check();
      training.load();
      r.meet("first step");
      if (rank == 0) {
        gone = true;
        training.timeout = expires ? milliseconds(300) : kLong;
        const OperationPtr op = training.step();
        const auto begin = Clock::now();
        expect_error(
            expires ? ErrorKind::kTimeout : ErrorKind::kSystem,
            {expires ? "the store does not answer" : "the store has gone"},
            [&] { finish(op); });
        CHECK(r.engine.failed());
        r.engine.shutdown(Deadline(milliseconds(100)));
        CHECK(seconds_since(begin) < 8);
      }
      r.meet("end");
    });
  }
}

TEST(cuda_engine_rank_without_engine) {
  const Clean clean;
  Store store;
  expect_error(ErrorKind::kTimeout, {"rank 1 has not", "100 ms"}, [&] {
    CudaEngine(
        gpu(),
        fake_gpu::nccl(),
        0,
        2,
        0,
        cuda_settings(),
        false,
        std::make_shared<StorePart>(store, "", nullptr),
        nullptr,
        Deadline(milliseconds(100)),
        nullptr);
  });
}

// Calls that fail on one rank; the others are told.
TEST(cuda_engine_failing_calls) {
  struct Fault {
    const char* function;
    int nth;
    int code;
    const char* text;
  };
  const Fault faults[] = {
      {"ncclReduceScatter", 2, kNcclInternalError, "internal error"},
      {"update", 1, 719, "CUDA error in update"},
      {"event_create", 1, 2, "cudaEventCreate"}};
  const Clean clean;
  for (size_t i = 0; i < (kSanitized ? 2 : std::size(faults)); ++i) {
    const Fault& fault = faults[i];
    std::atomic<int> threw{0};
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store);
      GpuTraining training(r, adam(), kSingles, {3000});
      training.load();
      training.step();
      training.check();
      training.load();
      r.meet("begin");
      if (rank == 0) {
        if (fault.function[0] == 'n') {
          hooks().fail_rank(fault.function, 1, fault.nth, fault.code);
        } else {
          hooks().fail(fault.function, fault.nth, fault.code);
        }
      }
      r.meet("armed");
      const auto keep = std::make_shared<int>(0);
      OperationPtr op;
      try {
        op = training.step(keep);
      } catch (const Error& error) {
        ++threw;
        CHECK(std::strstr(error.what(), fault.text) != nullptr);
        CHECK(std::strstr(error.what(), "fused_adamw") != nullptr);
        // Its kernels may be under way.
        CHECK_EQ(keep.use_count(), 2);
        CHECK_THROWS(training.step(), Error, fault.text);
      }
      if (op) {
        expect_error(
            ErrorKind::kPeerFailed,
            {"another rank has failed", fault.text},
            [&] { finish(op); });
      }
    });
    CHECK_EQ(threw.load(), 1);
  }
}

// What is not an Error ends the engine, too: others wait for the operation.
TEST(cuda_engine_out_of_host_memory) {
  const Clean clean;
  static std::atomic<bool> armed;
  static const CudaApi& behind = gpu();
  CudaApi cuda = gpu();
  cuda.prepare = [](const PrepareArgs* args, Stream stream) {
    if (armed.exchange(false)) {
      throw std::bad_alloc();
    }
    return behind.prepare(args, stream);
  };
  EngineWith with;
  with.cuda = &cuda;
  on_threads(2, [&](int rank, Store& store) {
    GpuRank r(rank, 2, store, with);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    const auto begin = Clock::now();
    if (rank == 0) {
      armed = true;
      for (int call = 0; call < 2; ++call) {
        expect_error(ErrorKind::kSystem, {"bad_alloc", "fused_adamw"}, [&] {
          training.step();
        });
      }
    }
    r.meet("failed");
    if (rank == 1) {
      expect_failure(r, ErrorKind::kPeerFailed, {"rank 0", "bad_alloc"}, [&] {
        return training.step();
      });
    }
    CHECK(seconds_since(begin) < 8);
    r.meet("end");
  });
}

// A call that waits for a rank to come to its first one of a kind.
TEST(cuda_engine_abort_in_a_first_call) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    GpuRank r(rank, 2, store);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    if (rank == 0) {
      const auto begin = Clock::now();
      std::thread aborter([&] {
        std::this_thread::sleep_for(milliseconds(50));
        r.engine.abort("fused: enough");
      });
      expect_error(ErrorKind::kAborted, {"enough"}, [&] { training.step(); });
      aborter.join();
      CHECK(seconds_since(begin) < 8);
      r.sync();
      CHECK(training.param(0).holds(training.expected_param(0)));
    }
    r.meet("aborted");
  });
}

TEST(cuda_engine_abort_and_again) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    for (int turn = 0; turn < 2; ++turn) {
      EngineWith with;
      with.name = formatted("group{}/", turn);
      GpuRank r(rank, 2, store, with);
      GpuTraining training(r, adam(), kSingles, {3000});
      training.load();
      training.step();
      training.check();
      if (turn == 1) {
        r.engine.shutdown(Deadline(kLong));
        continue;
      }
      training.load();
      if (rank == 0) {
        const auto keep = std::make_shared<int>(0);
        const OperationPtr op = training.step(keep);
        std::thread aborter([&] {
          std::this_thread::sleep_for(milliseconds(30));
          r.engine.abort("fused: enough");
        });
        expect_error(ErrorKind::kAborted, {"enough"}, [&] { finish(op); });
        aborter.join();
        // Kernels may still use them.
        CHECK_EQ(keep.use_count(), 2);
        expect_error(ErrorKind::kAborted, {"enough"}, [&] { training.step(); });
      }
      r.meet("aborted");
      r.engine.close();
      expect_error(
          ErrorKind::kAborted, {rank == 0 ? "enough" : "destroyed"}, [&] {
            training.step();
          });
    }
  });
}

// Of ranks that take different paths nobody may hang.
TEST(cuda_engine_direct_mismatch) {
  const Clean clean;
  enum class Other { kPlace, kTensors, kSkips };
  constexpr const char* names[] = {
      "path (are the tensors in the arena?)",
      "number of tensors",
      "size of blocks"};
  for (const Other other : {Other::kPlace, Other::kTensors, Other::kSkips}) {
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store, with_arena());
      const auto differs = [&](Other what) {
        return rank == 1 && other == what;
      };
      std::vector<size_t> counts{3000, 70};
      if (differs(Other::kTensors)) {
        counts.push_back(1);
      }
      char* arena = static_cast<char*>(r.engine.arena());
      GpuTraining training(
          r,
          adam(),
          kSingles,
          counts,
          differs(Other::kPlace) ? nullptr : arena);
      training.call.skip_block = differs(Other::kSkips) ? 256 : 0;
      training.load();
      const auto begin = Clock::now();
      expect_failure(
          r,
          ErrorKind::kMismatch,
          {"rank 0: fused", "rank 1: fused", names[int(other)]},
          [&] { return training.step(); });
      CHECK(seconds_since(begin) < 8);
    });
  }
}

} // namespace fusedpg::test
