// The CUDA engine on the fake GPU.

#include <dlfcn.h>
#include <unistd.h>

#include "cuda_steps.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

TEST(cuda_engine_equals_one_process) {
  const Clean clean;
  for (int size = 1; size <= (kSanitized ? 3 : 4); ++size) {
    with_gpus(size, train);
  }
  CHECK_EQ(hooks().now().mismatches, 0u);
  CHECK_EQ(hooks().now().freed_written, 0u);
}

// Tensors that are chunks by themselves, between packed ones.
TEST(cuda_engine_whole_tensors) {
  const Clean clean;
  EngineWith with;
  with.settings = cuda_settings(size_t{1} << 19);
  for (const int size : {2, 3}) {
    if (kSanitized && size == 2) {
      continue;
    }
    with_gpus(
        size,
        [](GpuRank& r) {
          hooks().set_delay(200);
          const auto unit = static_cast<size_t>(32 * r.size);
          const size_t large = (262144 + unit - 1) / unit * unit;
          const std::vector<size_t> counts = kSanitized
              ? std::vector<size_t>{70, large, 262145, 31}
              : std::vector<size_t>{70, large, 262145, large + unit, 31, large};
          for (const StepTypes& types : step_types({kSingles, kStepTypes[2]})) {
            if (kSanitized && types.master) {
              continue;
            }
            GpuTraining training(r, adam(), types, counts);
            for (int step = 0; step < (kSanitized ? 1 : 2); ++step) {
              training.load();
              training.step();
              training.check();
            }
            training.set_found_inf(r.rank == 1);
            training.load();
            training.step();
            training.check(0);
          }
          // Nothing is packed: the header is alone.
          for (const StepTypes& types : step_types({kSingles, kStepTypes[2]})) {
            GpuTraining training(r, adam(), types, {2 * large});
            training.weights.assign(types.master ? size_t(r.size) : 0, 0.5);
            training.uses = [](int rank, size_t) { return rank == 1; };
            for (int step = 0; step < 2; ++step) {
              training.load();
              training.step();
              training.check();
            }
          }
          GpuTraining lamb(r, recipe(OpCode::kFusedLamb), kSingles, {large, 5});
          lamb.load();
          lamb.reduce_and_step(true);
          lamb.check();
        },
        with);
  }
}

TEST(cuda_engine_skips_steps) {
  const Clean clean;
  with_gpus(3, [](GpuRank& r) {
    hooks().set_delay(kShortDelay);
    for (const Recipe& recipe : one_of_each()) {
      GpuTraining training(r, recipe, kSingles, {1000, 0, 77});
      training.set_found_inf(false);
      training.load();
      training.step();
      training.check();
      training.set_found_inf(r.rank == 2);
      training.load();
      training.step();
      training.check(0);
      CHECK(training.found_inf());
      training.set_found_inf(false);
      training.load();
      training.step();
      training.check();
      CHECK(!training.found_inf());
    }
  });
}

TEST(cuda_engine_is_asynchronous) {
  const Clean clean;
  with_gpus(2, [](GpuRank& r) {
    GpuTraining training(r, adam(), kSingles, {5000, 64, 1});
    training.load();
    training.step(); // the first one waits for all ranks
    training.check();
    GpuBuffer copied(training.param(0).bytes());
    const StreamOn other(r.rank);
    std::atomic<bool> go{false};
    CHECK_EQ(hooks().hold(r.stream, &go), 0);
    const auto before = Clock::now();
    training.load();
    const auto keep = std::make_shared<int>(0);
    const OperationPtr first = training.step(keep);
    const OperationPtr second = training.step();
    r.engine.wait(*second, other.stream);
    CHECK_EQ(
        gpu().copy(
            copied.data(),
            training.param(0).data(),
            copied.bytes(),
            other.stream),
        0);
    CHECK(seconds_since(before) < 5);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(!first->is_completed());
    CHECK(!second->wait_for(milliseconds(1)));
    CHECK(!r.engine.idle());
    CHECK_THROWS(r.engine.drain(milliseconds(1)), Error, "has not ended");
    CHECK_EQ(keep.use_count(), 2);
    CHECK(training.param(0).holds(training.expected_param(0)));
    r.meet("seen");
    go = true;
    CHECK_EQ(gpu().stream_synchronize(other.stream), 0);
    training.check(2);
    CHECK(copied.holds(training.expected_param(0)));
    r.engine.drain(kLong);
    CHECK(first->is_completed() && second->is_completed());
    CHECK(r.engine.idle());
    CHECK_EQ(keep.use_count(), 1);
    CHECK_EQ(std::strcmp(r.engine.path_of_last_step(), "stock"), 0);

    const OperationPtr third = training.step(keep);
    third->release_tensors();
    CHECK_EQ(keep.use_count(), 1);
    r.engine.join(other.stream);
    CHECK_EQ(gpu().stream_synchronize(other.stream), 0);
    training.check();
  });
}

// A collective that stalls on one rank holds up nobody's host.
TEST(cuda_engine_order_of_calls) {
  const Clean clean;
  hooks().stall(1, 4, 50);
  with_gpus(3, [](GpuRank& r) {
    GpuTraining training(r, adam(), kSingles, {5000, 64, 1});
    GpuTraining lamb(r, recipe(OpCode::kFusedLamb), kSingles, {700, 3000});
    training.load();
    lamb.load();
    for (int i = 0; i < 3; ++i) {
      training.step();
      lamb.step();
    }
    training.check(3);
    lamb.check(3);
  });
}

// A step of a known kind needs its data's collectives alone, and no host waits:
// each rank's call returns before the next one's.
TEST(cuda_engine_calls_of_a_steady_step) {
  const Clean clean;
  constexpr size_t kLarge = 262144; // a chunk by itself
  const struct {
    StepTypes types;
    std::vector<size_t> counts;
    uint64_t reduce_scatters, all_to_alls, all_gathers;
    OpCode op = OpCode::kFusedAdamW;
    std::vector<double> weights;
    size_t chunk_bytes = size_t{1} << 20;
  } cases[] = {
      {kSingles, {3000, 70}, 1, 0, 1},
      {kSingles, {3000, 70}, 1, 0, 1, OpCode::kFusedAdamW, {0.5, 3}},
      {kStepTypes[2], {3000, 70}, 0, 1, 1},
      {kStepTypes[2], {3000, 70}, 0, 1, 1, OpCode::kFusedAdamW, {0.5, 3}},
      {kSingles, {3000, 70}, 1, 0, 2, OpCode::kFusedLamb}, // and norms
      {kSingles, {kLarge, 70}, 2, 0, 2},
      {kSingles, {kLarge}, 2, 0, 1}, // its header is a chunk by itself
      {kSingles, {}, 1, 0, 0},
      // Of 256 floats of either rank's shard; and what the engine chooses.
      {kSingles, {3000}, 6, 0, 6, OpCode::kFusedAdamW, {}, 2048},
      {kSingles, {3000, 70}, 1, 0, 1, OpCode::kFusedAdamW, {}, 0}};
  constexpr const char* kWaits[] = {
      "stream_synchronize", "ncclAllReduce", "allocate", "host_allocate"};
  for (const auto& c : cases) {
    EngineWith with;
    with.settings = cuda_settings(c.chunk_bytes);
    with.settings.wide_half_sums = true;
    std::map<std::string, uint64_t> before;
    const auto made = [&](const char* name) {
      return hooks().calls(name) - before[name];
    };
    on_threads(2, [&](int rank, Store& store) {
      GpuRank r(rank, 2, store, with);
      GpuTraining training(r, recipe(c.op), c.types, c.counts);
      training.weights = c.weights;
      for (int step = 0; step < 2; ++step) {
        training.load();
        training.step();
        training.check();
      }
      training.load();
      r.sync();
      r.meet("known");
      if (rank == 0) {
        for (const char* name :
             {"ncclReduceScatter", "ncclAlltoAll", "ncclAllGather"}) {
          before[name] = hooks().calls(name);
        }
        for (const char* name : kWaits) {
          before[name] = hooks().calls(name);
        }
      }
      r.meet("counted");
      for (int turn = 0; turn < 2; ++turn) {
        if (turn == rank) {
          training.step();
        }
        r.meet(formatted("turn {}", turn).c_str());
      }
      CHECK_EQ(made("ncclReduceScatter"), 2 * c.reduce_scatters);
      CHECK_EQ(made("ncclAlltoAll"), 2 * c.all_to_alls);
      CHECK_EQ(made("ncclAllGather"), 2 * c.all_gathers);
      for (const char* name : kWaits) {
        CHECK_EQ(made(name), 0u);
      }
      r.meet("seen");
      training.check();
    });
  }
}

// In a step of more than a second each look is one request to the store, once a
// rank knows that the next one is in the same step.
TEST(cuda_engine_looks_of_a_long_step) {
  const Clean clean;
  std::atomic<bool> go{false};
  on_threads(2, [&](int rank, Store& store) {
    std::atomic<int> requests{0};
    std::atomic<int> looks{0};
    EngineWith with;
    with.requests = &requests;
    with.check_peers = [&](const std::string&) { ++looks; };
    GpuRank r(rank, 2, store, with);
    GpuTraining training(r, adam(), kSingles, {3000});
    training.load();
    training.step();
    training.check();
    r.engine.drain(kLong);
    training.load();
    CHECK_EQ(hooks().hold(r.stream, &go), 0);
    const OperationPtr op = training.step();
    const auto look = [&](int times) {
      const int until = looks + times;
      wait_until([&] { return op->is_completed() || looks >= until; });
    };
    look(2);
    r.meet("told");
    look(2);
    const int others = requests - looks;
    look(6);
    // The one before the first of these may have been late.
    CHECK(requests - looks <= others + 3);
    r.meet("counted");
    go = true;
    training.check();
  });
}

// Headers of a reduce-scatter have no room for so many weights.
TEST(cuda_engine_weights_of_many_ranks) {
  constexpr int kRanks = 65;
  const Clean clean("FUSEDPG_FAKE_DEVICES", "65");
  EngineWith with;
  with.settings = cuda_settings(size_t{1} << 20); // one chunk
  with_gpus(
      kRanks,
      [](GpuRank& r) {
        hooks().set_delay(0);
        GpuTraining training(r, adam(), kSingles, {70, 3});
        training.weights.assign(kRanks, 0.5);
        training.weights[64] = 3;
        for (int step = 0; step < 2; ++step) {
          training.load();
          training.step();
          training.check();
        }
      },
      with);
  // The kind; in each step headers and parameters.
  CHECK_EQ(hooks().calls("ncclAllGather"), kRanks * (1 + 2 * 2u));
  CHECK_EQ(hooks().calls("ncclReduceScatter"), kRanks * 2u);
}

TEST(cuda_engine_reuses_memory) {
  const Clean clean;
  with_gpus(2, [](GpuRank& r) {
    hooks().set_delay(0);
    GpuTraining training(r, adam(), kSingles, {3000, 70});
    fake::Stats before{};
    for (int step = 0; step < (kOnlyThreads ? 15 : 50); ++step) {
      training.load();
      training.step();
      training.check();
      r.engine.drain(kLong);
      if (step == 3) {
        r.meet("begin");
        before = hooks().now();
        r.meet("counted");
      }
    }
    r.meet("end");
    const fake::Stats after = hooks().now();
    CHECK_EQ(after.device_bytes, before.device_bytes);
    CHECK_EQ(after.host_bytes, before.host_bytes);
    // The last operation of either rank keeps its event.
    CHECK_EQ(after.events, before.events);
    CHECK_EQ(after.streams, before.streams);
    r.meet("compared");
  });
}

// Buffers grow while an operation is to use the smaller ones.
TEST(cuda_engine_grows_memory) {
  const Clean clean;
  EngineWith with;
  with.settings = cuda_settings(size_t{1} << 18);
  with_gpus(
      2,
      [](GpuRank& r) {
        GpuTraining training(r, adam(), kSingles, {3000, 70});
        GpuTraining larger(r, adam(), kStepTypes[1], {90, 20000});
        larger.load();
        CHECK_EQ(hooks().sleep(r.stream, 20), 0);
        training.load();
        training.step();
        larger.step();
        training.check();
        larger.check();
      },
      with);
  CHECK_EQ(hooks().now().freed_written, 0u);
}

// Layouts of past calls are forgotten at some time, but not those in use.
TEST(cuda_engine_many_layouts) {
  const Clean clean;
  with_gpus(1, [](GpuRank& r) {
    hooks().set_delay(kShortDelay);
    uint64_t most = 0;
    for (size_t n = 1; n < 200; ++n) {
      GpuTraining one(r, adam(), kSingles, {n});
      GpuTraining two(r, adam(), kSingles, {n + 1000});
      one.load();
      two.load();
      one.step();
      two.step();
      one.check();
      two.check();
      r.engine.drain(kLong);
      most = std::max(most, hooks().now().device_allocations);
    }
    CHECK(most > 256);
    CHECK(most < 300);
  });
}

TEST(cuda_engine_capture) {
  const Clean clean;
  EngineWith with;
  for (int size = 1; size <= 3; ++size) {
    // Room for buffers to grow, or several chunks in a graph.
    with.settings = cuda_settings(size == 2 ? size_t{1} << 18 : 2048);
    const auto body = [](GpuRank& r) {
      hooks().set_delay(kShortDelay);
      const bool lamb = r.size == 2;
      GpuTraining training(
          r,
          lamb ? recipe(OpCode::kFusedLamb) : adam(),
          kSingles,
          {3000, 0, 70});
      training.uses = [](int, size_t t) { return t != 2; };
      if (r.size == 3) {
        training.weights = some_weights(3);
      }
      training.load();
      training.step();
      training.check();
      r.engine.drain(kLong);
      void* graph = nullptr;
      const auto keep = std::make_shared<int>(0);
      CHECK_EQ(hooks().begin_capture(r.stream), 0);
      const OperationPtr op = training.step(keep);
      CHECK_EQ(keep.use_count(), 2);
      CHECK(!r.engine.idle());
      r.engine.join(r.stream);
      CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
      CHECK(r.engine.idle());
      r.engine.join(r.stream); // not with what was captured
      op->release_tensors();
      CHECK_EQ(keep.use_count(), 1);
      r.sync();
      training.check(0);
      for (int i = 0; i < 3; ++i) {
        CHECK_EQ(hooks().launch(graph, r.stream), 0);
      }
      training.check(3);
      // Larger ones, which need other memory.
      for (const size_t count : {size_t(20000), size_t(70000)}) {
        GpuTraining larger(r, adam(), kStepTypes[1], {count, 31});
        for (int i = 0; i < 2; ++i) {
          larger.load();
          larger.step();
          larger.check();
        }
      }
      training.load();
      CHECK_EQ(hooks().launch(graph, r.stream), 0);
      training.check();
      CHECK_EQ(hooks().destroy_graph(graph), 0);
    };
    with_gpus(size, body, with);
  }
  CHECK_EQ(hooks().now().freed_written, 0u);
}

// --- capabilities ------------------------------------------------------------

namespace {

// Steps on tensors in the arena, or all but one.
void step_in_arena(
    GpuRank& r,
    const char* path,
    const StepTypes& types,
    bool outside,
    bool weighted = false) {
  const Recipe recipes[] = {adam(), recipe(OpCode::kFusedSgd)};
  for (const Recipe& recipe : recipes) {
    GpuBuffer elsewhere(3000 * 8);
    GpuTraining training(
        r, recipe, types, {3000, 0, 129}, static_cast<char*>(r.engine.arena()));
    training.direct = std::strcmp(path, "direct") == 0;
    if (weighted) {
      training.weights = some_weights(r.size);
    }
    if (outside) {
      std::memcpy(elsewhere.data(), training.param(0).data(), 3000 * 4);
      training.call.tensors[0].param = elsewhere.data();
    }
    for (int step = 0; step < 2; ++step) {
      training.load();
      training.step();
      if (outside) {
        r.sync();
        std::memcpy(training.param(0).data(), elsewhere.data(), 3000 * 4);
      }
      training.check();
      CHECK_EQ(std::string(r.engine.path_of_last_step()), path);
    }
    if (!outside) {
      training.uses = [](int rank, size_t t) { return rank == 1 && t < 2; };
      training.load();
      training.step();
      training.check();
      training.set_found_inf(r.rank == 0);
      training.load();
      training.step();
      training.check(0);
      CHECK(training.found_inf());
    }
    r.engine.drain(kLong); // nobody uses this part of the arena
  }
}

} // namespace

TEST(cuda_engine_direct_path) {
  const Clean clean;
  for (int size = 2; size <= (kOnlyThreads ? 3 : 4); ++size) {
    with_gpus(
        size,
        [](GpuRank& r) {
          hooks().set_delay(kShortDelay);
          if (!CHECK(r.engine.arena() != nullptr)) {
            return;
          }
          CHECK(r.engine.arena_bytes() >= kArena);
          for (const StepTypes& types : step_types(
                   {kSingles, kStepTypes[1], kStepTypes[2], kStepTypes[3]})) {
            step_in_arena(r, "direct", types, false);
          }
          step_in_arena(r, "direct", kSingles, false, true);
          step_in_arena(r, "stock", kSingles, true);
          char* arena = static_cast<char*>(r.engine.arena());
          GpuTraining empty(r, adam(), kSingles, {0, 0}, arena);
          empty.step();
          empty.check();
          CHECK_EQ(std::string(r.engine.path_of_last_step()), "direct");
          r.engine.drain(kLong);
          GpuTraining lamb(
              r,
              recipe(OpCode::kFusedLamb),
              kSingles,
              {300},
              arena + kArena / 2);
          lamb.load();
          lamb.step();
          lamb.check();
          CHECK_EQ(std::string(r.engine.path_of_last_step()), "stock");
        },
        with_arena());
  }
}

// Several tiles an owner, and ranks that begin together and look at once.
TEST(cuda_engine_direct_path_of_many_tiles) {
  const Clean clean;
  with_gpus(
      3,
      [](GpuRank& r) {
        hooks().set_delay(0);
        int step = 0;
        for (const StepTypes& types : step_types(
                 {kSingles, kStepTypes[1], kStepTypes[2], kStepTypes[3]})) {
          GpuTraining training(
              r,
              adam(),
              types,
              {30000, 0, 129},
              static_cast<char*>(r.engine.arena()));
          training.direct = true;
          for (int i = 0; i < 6; ++i) {
            training.weights =
                i % 2 == 0 ? std::vector<double>() : some_weights(r.size);
            r.meet(formatted("before {}", ++step));
            training.load();
            training.step();
            training.check();
            r.meet(formatted("after {}", step));
          }
          r.engine.drain(kLong);
        }
      },
      with_arena(1 << 20));
}

TEST(cuda_engine_without_direct_path) {
  const auto stock = [](const EngineWith& with) {
    with_gpus(
        2,
        [](GpuRank& r) {
          CHECK(r.engine.arena() == nullptr);
          CHECK_EQ(r.engine.arena_bytes(), 0u);
          GpuTraining training(r, adam(), kSingles, {3000});
          training.load();
          training.step();
          training.check();
          CHECK_EQ(std::string(r.engine.path_of_last_step()), "stock");
        },
        with);
  };
  for (const Reach reach :
       {Reach::kNone, Reach::kNotTheFirst, Reach::kFirstFails}) {
    const Clean clean;
    EngineWith with = with_arena();
    with.reach = reach;
    stock(with);
    CHECK_EQ(SharedBlocks::alive, 0);
  }
}

// After the first step of its kind, whose sizes all ranks must have the same,
// nothing goes by the carrier.
TEST(cuda_engine_direct_path_calls_nobody) {
  const Clean clean;
  with_gpus(
      2,
      [](GpuRank& r) {
        GpuTraining training(
            r, adam(), kSingles, {3000}, static_cast<char*>(r.engine.arena()));
        training.direct = true;
        for (int i = 0; i < 3; ++i) {
          training.weights =
              i == 2 ? some_weights(r.size) : std::vector<double>();
          training.load();
          training.step();
          training.check();
        }
      },
      with_arena());
  CHECK_EQ(hooks().calls("ncclAllReduce"), 0u);
  // Two ranks; the last step is of another kind than the first.
  CHECK_EQ(hooks().calls("ncclAllGather"), 4u);
}

// A link by which the library is another one.
TEST(cuda_engine_libraries) {
  CHECK(fake_gpu::nccl().is_torchs); // no torch for CUDA is there
  const Clean clean("FUSEDPG_FAKE_NCCL_VERSION", "22704");
  const std::string link = formatted("/tmp/fusedpg-fake-{}.so", getpid());
  unlink(link.c_str());
  CHECK_EQ(symlink(FUSEDPG_FAKE_GPU_LIB, link.c_str()), 0);
  CHECK_THROWS(load_nccl_api(link), Error, "2.28 or newer is needed");
  setenv("FUSEDPG_FAKE_NCCL_VERSION", "22803", 1);
  CHECK_EQ(load_nccl_api(link).version, 22803);
  unlink(link.c_str());

  // Beside torch's, whose symbols are global, and which is linked into torch:
  // somebody else has loaded this one.
  CHECK(dlopen(FUSEDPG_SECOND_NCCL_22800, RTLD_NOW | RTLD_GLOBAL) != nullptr);
  CHECK(load_nccl_api(FUSEDPG_SECOND_NCCL_22800).is_torchs);
  if (!kSanitized) {
    CHECK(
        dlopen(FUSEDPG_SECOND_NCCL_22900, RTLD_NOW | RTLD_DEEPBIND) != nullptr);
    const NcclApi& other = load_nccl_api(FUSEDPG_SECOND_NCCL_22900);
    CHECK_EQ(other.version, 22900);
    CHECK(!other.is_torchs);
  }

  CHECK_THROWS(load_nccl_api("/none.so"), Error, "FUSEDPG_NCCL_LIB");
  CHECK_THROWS(load_nccl_api("libm.so.6"), Error, "without it");
  CHECK_THROWS(load_cuda_api("/none.so"), Error, "FUSEDPG_CUDA_LIB");
  CHECK_THROWS(load_cuda_api("libm.so.6"), Error, "another version");
}

} // namespace fusedpg::test
