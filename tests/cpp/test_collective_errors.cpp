#include <algorithm>
#include <limits>
#include <string>

#include "collective_cases.hpp"
#include "collectives/fused_step.hpp"
#include "messages/mailbox.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr DType kF32 = DType::kFloat32;

// What one rank calls.
using Turn = std::function<void(Group&, Context&)>;

Turn call_all_reduce(size_t bytes, ReduceArgs args) {
  return [=](Group& g, Context& ctx) {
    PlacedMemory b = placed(g, Place::kMixed, bytes);
    all_reduce(ctx, {{b.data(), bytes / dtype_size(args.dtype)}}, args);
  };
}

Turn call_reduce(size_t bytes, int root) {
  return [=](Group& g, Context& ctx) {
    PlacedMemory b = placed(g, Place::kMixed, bytes);
    reduce(ctx, b.data(), bytes / 4, sum_of(), root);
  };
}

Turn call_broadcast(size_t bytes, int root, DType dtype = kF32) {
  return [=](Group& g, Context& ctx) {
    PlacedMemory b = placed(g, Place::kMixed, bytes);
    broadcast(ctx, {b.data(), b.bytes()}, dtype, root);
  };
}

// Sends `to_next` bytes to the next rank and expects `from_last` from the one
// before.
Turn call_all_to_all(size_t to_next, size_t from_last) {
  return [=](Group& g, Context& ctx) {
    PlacedMemory in = placed(g, Place::kMixed, to_next);
    PlacedMemory out = placed(g, Place::kMixed, from_last);
    std::vector<Span> inputs(g.size), outputs(g.size);
    inputs[(g.rank + 1) % g.size] = {in.data(), to_next};
    outputs[(g.rank + g.size - 1) % g.size] = {out.data(), from_last};
    all_to_all(ctx, outputs, inputs, kF32);
  };
}

Turn call_all_gather(size_t input, size_t output) {
  return [=](Group& g, Context& ctx) {
    PlacedMemory in = placed(g, Place::kMixed, input);
    std::vector<PlacedMemory> rooms;
    std::vector<Span> outputs;
    for (int p = 0; p < g.size; ++p) {
      rooms.push_back(placed(g, Place::kMixed, output));
      outputs.push_back({rooms[p].data(), output});
    }
    all_gather(ctx, outputs, {in.data(), input}, kF32);
  };
}

Turn call_lists(std::vector<size_t> counts) {
  return [=](Group& g, Context& ctx) {
    std::vector<PlacedMemory> buffers;
    std::vector<Buffer> tensors;
    for (size_t count : counts) {
      buffers.push_back(placed(g, Place::kMixed, count * 4));
      tensors.push_back({buffers.back().data(), count});
    }
    all_reduce(ctx, tensors, sum_of());
  };
}

const Turn kBarrier = [](Group&, Context& ctx) { barrier(ctx); };

struct Disagreement {
  Turn all;
  Turn one; // what a single rank calls instead
  std::string says;
};

std::vector<Disagreement> disagreements() {
  const auto with = [](RedOp op, double factor) {
    ReduceArgs args;
    args.op = op;
    args.factor = factor;
    return args;
  };
  std::vector<Disagreement> list{
      {kBarrier, call_all_reduce(4, sum_of()), "operation"},
      {call_all_reduce(100, sum_of()),
       call_all_reduce(300000, sum_of()),
       "number of elements"},
      {call_broadcast(1000, 0), call_reduce(1000, 0), "operation"},
      {call_broadcast(1000, 0), call_broadcast(4000, 0), "number of elements"},
      {call_lists({10, 20}), call_lists({20, 10}), "sizes or memory layouts"},
      {call_lists({10, 20}), call_lists({10, 10, 10}), "number of tensors"},
      {call_all_gather(1000, 1000),
       call_all_gather(1000, 2000),
       "number of elements"},
      {call_all_gather(1000, 1000),
       call_all_gather(500, 1000),
       "which expects 1000"},
      {call_all_gather(100000, 100000),
       call_all_gather(50000, 100000),
       "which expects 100000"},
      {call_all_to_all(100, 100), call_all_to_all(104, 100), "which expects"},
      {call_all_to_all(400000, 400000),
       call_all_to_all(400000, 0),
       "which expects 0"}};
  for (size_t bytes : {size_t{1000}, size_t{200000}}) {
    list.push_back(
        {call_all_reduce(bytes, sum_of()),
         call_all_reduce(bytes, sum_of(DType::kInt32)),
         "dtype"});
    list.push_back(
        {call_all_reduce(bytes, sum_of()),
         call_all_reduce(bytes, with(RedOp::kMax, 1)),
         "reduction"});
    list.push_back(
        {call_all_reduce(bytes, with(RedOp::kPremulSum, 0.5)),
         call_all_reduce(bytes, with(RedOp::kPremulSum, 0.25)),
         "scalar arguments"});
    list.push_back({call_reduce(bytes, 0), call_reduce(bytes, 1), "root"});
    list.push_back(
        {call_broadcast(bytes, 0), call_broadcast(bytes, 1), "root"});
    list.push_back(
        {call_broadcast(bytes, 0),
         call_broadcast(bytes, 0, DType::kInt32),
         "dtype"});
  }
  return list;
}

} // namespace

TEST(collectives_disagreements_raise_everywhere) {
  const auto list = disagreements();
  for (int size : {2, 3}) {
    with_group(size, 1, [&](Group& g) {
      for (size_t i = 0; i < list.size(); ++i) {
        const int odd = static_cast<int>(i) % g.size;
        const Turn& call = g.rank == odd ? list[i].one : list[i].all;
        const std::string number =
            "sequence number " + std::to_string(g.sequence + 1);
        expect_error(ErrorKind::kMismatch, {list[i].says, number}, [&] {
          g.run([&](Context& ctx) { call(g, ctx); });
        });
        CHECK(!g.engine.domain().failed());
        check_usable(g);
      }
    });
  }
}

TEST(collectives_disagreement_names_both_sides) {
  with_group(2, 1, [](Group& g) {
    const std::string sum = "all_reduce(SUM, float32, 25 elements)";
    const std::string max = "all_reduce(MAX, float32, 25 elements)";
    ReduceArgs args;
    args.op = g.rank == 0 ? RedOp::kSum : RedOp::kMax;
    const std::string me = std::to_string(g.rank);
    const std::string other = std::to_string(1 - g.rank);
    expect_error(
        ErrorKind::kMismatch,
        {"rank " + me + " (here) called " + (g.rank == 0 ? sum : max),
         "rank " + other + " (there) called " + (g.rank == 0 ? max : sum),
         g.rank == 0 ? "SUM here, MAX there" : "MAX here, SUM there"},
        [&] {
          g.run([&](Context& ctx) { call_all_reduce(100, args)(g, ctx); });
        });
  });
}

TEST(collectives_sequence_numbers_must_agree) {
  with_group(3, 1, [](Group& g) {
    const auto skew = [&](uint64_t by) { g.sequence += g.rank == 1 ? by : 0; };
    skew(3);
    expect_error(ErrorKind::kMismatch, {"sequence number", "here"}, [&] {
      g.run([](Context& ctx) { barrier(ctx); });
    });
    skew(uint64_t(0) - 3);
    check_usable(g);
  });
}

TEST(collectives_refuse_undefined_reductions) {
  with_group(2, 1, [](Group& g) {
    ReduceArgs args;
    args.op = RedOp::kBand;
    expect_error(ErrorKind::kInvalid, {"BAND is not defined for float32"}, [&] {
      g.run([&](Context& ctx) { call_all_reduce(100, args)(g, ctx); });
    });
    expect_error(ErrorKind::kInvalid, {"reduce_scatter", "the output"}, [&] {
      g.run([&](Context& ctx) {
        float x[8] = {};
        reduce_scatter(ctx, {x, 3}, {{x, 4}, {x + 4, 4}}, sum_of());
      });
    });
    check_usable(g);
    // A rank that cannot take part tells the others why.
    for (size_t bytes : {size_t{100}, size_t{300000}}) {
      const bool odd = g.rank == 1;
      args.op = odd ? RedOp::kBand : RedOp::kSum;
      expect_error(
          odd ? ErrorKind::kInvalid : ErrorKind::kMismatch,
          {"BAND is not defined for float32",
           odd ? "" : "rank 1 refused to take part",
           odd ? "" : "all_reduce(SUM, float32, "},
          [&] {
            g.run([&](Context& ctx) { call_all_reduce(bytes, args)(g, ctx); });
          });
      check_usable(g);
    }
  });
}

TEST(collectives_nan_check) {
  on_threads(3, [](int rank, Store& store) {
    Settings s = test_settings();
    s.nan_check = true;
    Group g(rank, 3, store, s);
    for (size_t count : {size_t{100}, size_t{50000}}) {
      std::vector<float> data(count, 1);
      std::vector<std::vector<float>> rooms(3, data);
      std::vector<Span> outputs;
      for (auto& room : rooms) {
        outputs.push_back({room.data(), count * 4});
      }
      ShardsCall shards;
      shards.grads = {rooms[0].data(), data.data()};
      shards.outputs = {rooms[0].data(), rooms[1].data()};
      shards.counts = {count, count};
      const auto calls = {
          Turn([&](Group&, Context& ctx) {
            ShmWay way(ctx);
            reduce_shards(way, shards);
          }),
          Turn([&](Group&, Context& ctx) {
            all_reduce(ctx, {{data.data(), count}}, sum_of());
          }),
          Turn([&](Group&, Context& ctx) {
            sparse_all_reduce(ctx, {{data.data(), count}}, sum_of(), {16});
          }),
          Turn([&](Group&, Context& ctx) {
            all_gather(ctx, outputs, {data.data(), count * 4}, kF32);
          }),
          Turn([&](Group&, Context& ctx) {
            all_to_all(ctx, outputs, {3, {data.data(), count * 4}}, kF32);
          }),
          Turn([&](Group&, Context& ctx) {
            broadcast(ctx, {data.data(), count * 4}, kF32, 2);
          })};
      for (const Turn& call : calls) {
        data.assign(count, 1);
        if (rank == 2) {
          data[count - 1] = std::numeric_limits<float>::quiet_NaN();
        }
        expect_error(
            ErrorKind::kInvalid, {"the input of rank 2 holds a NaN"}, [&] {
              g.run([&](Context& ctx) { call(g, ctx); });
            });
        CHECK_EQ(data[0], 1.0f); // untouched
        data.assign(count, 1);
        g.run([&](Context& ctx) { call(g, ctx); });
      }
      // A broadcast writes over what other ranks than its root have.
      const float nan = std::numeric_limits<float>::quiet_NaN();
      data.assign(count, rank == 2 ? 1 : nan);
      g.run([&](Context& ctx) {
        broadcast(ctx, {data.data(), count * 4}, kF32, 2);
      });
      CHECK_EQ(data[count - 1], 1.0f);
    }
    check_usable(g);
    g.run([](Context& ctx) { barrier(ctx); });
  });
}

TEST(engine_failure_lasts) {
  on_threads(2, [](int rank, Store& store) {
    Group g(rank, 2, store);
    g.engine.check_failed();
    if (rank == 0) {
      expect_error(ErrorKind::kTimeout, {"barrier", "rank 1"}, [&] {
        g.run([](Context& ctx) { barrier(ctx); }, milliseconds(100));
      });
      for (int i = 0; i < 2; ++i) {
        expect_error(
            ErrorKind::kTimeout,
            {"must be destroyed", "barrier", "100 ms"},
            [&] { g.run([](Context& ctx) { barrier(ctx); }); });
      }
      store.set("failed", "");
    } else {
      store.get("failed", Deadline(kLong));
      // It had arrived, so this barrier passes; the next one tells.
      CHECK_THROWS(
          [&] {
            g.run([](Context& ctx) { barrier(ctx); });
            g.run([](Context& ctx) { barrier(ctx); });
          }(),
          Error,
          "rank 0 reported: fused: barrier");
      CHECK(g.engine.domain().failed());
    }
    store.meet("done", 2);
  });
}

TEST(engine_abort_stops_an_operation) {
  on_threads(2, [](int rank, Store& store) {
    Group g(rank, 2, store);
    if (rank == 0) {
      std::atomic<bool> threw{false};
      g.executor().submit([&](uint64_t sequence) {
        expect_error(ErrorKind::kAborted, {"all_reduce(", "aborted"}, [&] {
          g.execute(
              [&](Context& ctx) { call_all_reduce(300000, sum_of())(g, ctx); },
              sequence,
              kLong);
        });
        threw = true;
      });
      std::this_thread::sleep_for(milliseconds(30));
      g.engine.abort();
      CHECK(threw);
      store.set("aborted", "");
      CHECK(g.engine.domain().failed());
      expect_error(ErrorKind::kAborted, {"must be destroyed"}, [&] {
        g.engine.check_failed();
      });
    } else {
      store.get("aborted", Deadline(kLong));
      // Rank 0 had arrived at the first barrier of this, not at the last.
      CHECK_THROWS(
          [&] {
            g.run([&](Context& ctx) {
              call_all_reduce(300000, sum_of())(g, ctx);
            });
          }(),
          Error,
          "rank 0 reported: fused: all_reduce");
    }
    store.meet("done", 2);
  });
}

// A rank that fails takes its memory away, also while its peers (or its own
// other thread) are in a collective. That must raise: zeros instead of another
// rank's data would be a wrong result.
TEST(engine_failure_beside_a_collective) {
  constexpr size_t kCount = kSanitized ? 1000000 : 4000000;
  for (int round = 0; round < (kSanitized ? 3 : 15); ++round) {
    on_threads(2, [&](int rank, Store& store) {
      Group g(rank, 2, store);
      Mailbox mailbox(g.engine.domain(), *kernels::table());
      const PlacedMemory b = placed(g, Place::kArena, kCount * sizeof(float));
      auto* x = b.as<float>();
      std::fill(x, x + kCount, 1.0f);
      store.meet("start", 2);
      char never = 0;
      if (rank == 0) {
        const milliseconds timeout(10 + round % 7);
        mailbox.receive(&never, 1, 1, 0, timeout, [](auto, int) {});
      }
      float expected = 1;
      const auto run_until_failure = [&] {
        for (int i = 0; i < 100; ++i) {
          g.run(
              [&](Context& ctx) { all_reduce(ctx, {{x, kCount}}, sum_of()); });
          expected *= 2;
          if (!CHECK(std::all_of(x, x + kCount, [&](float value) {
                return value == expected;
              }))) {
            return;
          }
        }
        std::this_thread::sleep_for(milliseconds(500));
        g.run([](Context& ctx) { barrier(ctx); });
      };
      CHECK_THROWS(run_until_failure(), Error, "recv(1 bytes, tag 0");
      store.meet("end", 2);
    });
  }
}

// The same at the last moment: an operation that has gone to its end read memory
// that peers may have taken away.
TEST(engine_failure_during_the_last_phase) {
  on_threads(2, [](int rank, Store& store) {
    Group g(rank, 2, store);
    const auto run = [&] {
      g.run([&](Context& ctx) {
        barrier(ctx);
        ctx.domain.mark_failed(Error(ErrorKind::kTimeout, "recv: timeout"));
      });
    };
    expect_error(ErrorKind::kTimeout, {"recv: timeout"}, run);
    store.meet("end", 2);
  });
}

// What one rank throws before it has entered all hear of; it harms nobody.
TEST(engine_refusal_of_one_rank) {
  on_threads(3, [](int rank, Store& store) {
    Group g(rank, 3, store);
    const auto run = [&] {
      g.run([&](Context& ctx) {
        if (rank == 1) {
          throw std::runtime_error("too large");
        }
        barrier(ctx);
      });
    };
    if (rank == 1) {
      CHECK_THROWS(run(), std::runtime_error, "too large");
    } else {
      expect_error(
          ErrorKind::kMismatch,
          {"rank 1 refused to take part: too large"},
          run);
    }
    CHECK(!g.engine.domain().failed());
    check_usable(g);
  });
}

// In the middle of an operation it leaves the peers there, so it ends the group.
TEST(engine_ends_by_what_nobody_has_foreseen) {
  on_threads(2, [](int rank, Store& store) {
    Group g(rank, 2, store);
    if (rank == 0) {
      CHECK_THROWS(
          g.run([](Context& ctx) {
            barrier(ctx);
            throw std::runtime_error("no memory");
          }),
          std::runtime_error,
          "no memory");
      CHECK(g.engine.domain().failed());
      store.set("thrown", "");
    } else {
      g.run([](Context& ctx) { barrier(ctx); });
      store.get("thrown", Deadline(kLong));
      expect_error(ErrorKind::kPeerFailed, {"rank 0 reported: no memory"}, [&] {
        g.run([](Context& ctx) { barrier(ctx); });
      });
    }
    store.meet("done", 2);
  });
}

TEST(collectives_tables_have_an_end) {
  on_threads(1, [](int rank, Store& store) {
    Group g(rank, 1, store);
    const std::vector<uint64_t> table(kTableEntries + 1);
    const auto run = [&](size_t entries) {
      g.run([&](Context& ctx) {
        OpDescriptor d;
        d.op = OpCode::kBarrier;
        enter(ctx, d, table.data(), entries);
      });
    };
    run(kTableEntries);
    expect_error(
        ErrorKind::kInvalid, {"split the list"}, [&] { run(table.size()); });
  });
}

TEST(collectives_lists_must_be_of_one_length) {
  on_threads(3, [](int rank, Store& store) {
    Group g(rank, 3, store);
    expect_error(
        ErrorKind::kMismatch, {"number of tensors in the list", "2", "3"}, [&] {
          g.run([&](Context& ctx) {
            ctx.begin_item(0, rank == 1 ? 3 : 2);
            barrier(ctx);
          });
        });
    check_usable(g);
  });
}

TEST(engine_refuses_unknown_instruction_sets) {
  on_threads(1, [](int rank, Store& store) {
    Settings s = test_settings();
    s.isa = "sparc";
    expect_error(ErrorKind::kInvalid, {"FUSEDPG_ISA=sparc"}, [&] {
      Group g(rank, 1, store, s);
    });
  });
}
