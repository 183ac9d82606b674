// The rule for failures, which both engines of CPU tensors have.

#include <execinfo.h>

#include <array>
#include <new>
#include <stdexcept>

#include "collectives/hosts_engine.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/perform.hpp"
#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr int kSize = 3;

int frames() {
  std::array<void*, 64> stack{};
  return backtrace(stack.data(), static_cast<int>(stack.size()));
}

// The best kernels, which note from how deep on the stack they reduce.
thread_local int deepest = 0;
const kernels::Table& noting_kernels() {
  static const kernels::Table table = [] {
    kernels::Table noting = *kernels::table();
    noting.reduce = [](const kernels::ReduceArgs& args,
                       void* const* dsts,
                       size_t num_dsts,
                       const void* const* srcs,
                       size_t num_srcs,
                       size_t count,
                       bool stream) {
      deepest = std::max(deepest, frames());
      kernels::table()->reduce(
          args, dsts, num_dsts, srcs, num_srcs, count, stream);
    };
    return noting;
  }();
  return table;
}

// One rank of a group, in one machine or on as many as `hosts`.
struct Rank : GroupBase {
  Rank(int rank, const std::shared_ptr<Store>& store, int hosts)
      : GroupBase(
            rank,
            kSize,
            settings_of(rank, hosts),
            noting_kernels(),
            as_error),
        bootstrap(met(rank, kSize, *store, settings)) {
    const Deadline deadline(kLong);
    if (hosts == 1) {
      engine = std::make_unique<ShmEngine>(*this, bootstrap, deadline);
    } else {
      // A thread that tells others of a failure may need the store for longer
      // than the test lasts.
      engine = std::make_unique<HostsEngine>(*this, bootstrap, store, deadline);
    }
  }

  ~Rank() {
    executor().stop(); // an abort may be queued
    engine->shutdown();
  }

  static Settings settings_of(int rank, int hosts) {
    Settings s = test_settings();
    s.host_id = formatted("host {}", rank % hosts);
    return s;
  }

  void run(const auto& op) {
    engine->execute(op, "fused:test", ++sequence, kLong);
  }
  void barrier() {
    run([](Way& way) { perform(way, {OpCode::kBarrier}); });
  }
  bool usable() {
    barrier();
    return !engine->failure();
  }

  Bootstrap bootstrap;
  std::unique_ptr<Engine> engine;
  uint64_t sequence = 0;
};

// In one machine, on two and on three.
void with_engines(const std::function<void(Rank&, Store&)>& body) {
  for (int hosts = 1; hosts <= kSize; ++hosts) {
    const auto shared = std::make_shared<Store>();
    on_threads(kSize, [&](int rank, Store& store) {
      Rank r(rank, shared, hosts);
      body(r, store);
      store.meet("end", kSize);
    });
  }
}

// Rank 1 throws this, its peers begin a barrier.
void refuse(Rank& r, const std::function<void()>& throw_it) {
  r.run([&](Way& way) {
    if (r.rank == 1) {
      throw_it();
    }
    perform(way, {OpCode::kBarrier});
  });
}

void expect_refusal(Rank& r, const std::string& reason, const auto& run) {
  expect_error(
      ErrorKind::kMismatch,
      {"sequence number " + std::to_string(r.sequence + 1),
       "rank 1 refused to take part: " + reason},
      run);
}

} // namespace

TEST(engines_tell_peers_what_a_rank_throws_before_it_has_entered) {
  with_engines([](Rank& r, Store&) {
    CHECK(r.usable());
    const auto raises = [&](const auto& error, const std::string& reason) {
      const auto run = [&] { refuse(r, [&] { throw error; }); };
      if (r.rank == 1) {
        try {
          run();
          report_failure(__FILE__, __LINE__, "nothing was thrown");
        } catch (const std::decay_t<decltype(error)>& same) {
          CHECK_EQ(std::string(same.what()), reason);
        }
      } else {
        expect_refusal(r, reason, run);
      }
      CHECK(r.usable());
    };
    raises(std::runtime_error("too large"), "too large");
    raises(std::bad_alloc(), "std::bad_alloc");
    for (const ErrorKind kind :
         {ErrorKind::kInvalid,
          ErrorKind::kOutOfMemory,
          ErrorKind::kSystem,
          ErrorKind::kTimeout}) {
      raises(Error(kind, "fused: not here"), "fused: not here");
    }
  });
}

// From here: Rank::run, execute, the function, perform, all_reduce, combine, and
// the kernel. The other half of the walk is in docs/develop/architecture.md.
TEST(engines_reach_the_kernel_through_few_frames) {
  with_engines([](Rank& r, Store&) {
    std::vector<float> data(1024, 1);
    const Buffer tensor{data.data(), data.size()};
    Call call{.op = OpCode::kAllReduce, .dtype = DType::kFloat32};
    call.inputs = single(tensor);
    deepest = 0;
    const int here = frames();
    r.run([&](Way& way) { perform(way, call); });
    CHECK_EQ(data[0], float{kSize});
    CHECK(deepest > here);
    // Sanitizers keep functions apart that are one otherwise.
    CHECK(kSanitized || deepest - here <= 7);
  });
}

TEST(engines_refuse_within_a_list) {
  with_engines([](Rank& r, Store&) {
    const auto run = [&] {
      r.run([&](Way& way) {
        for (uint64_t i = 0; i < 3; ++i) {
          way.begin_item(i, 3);
          if (i == 1 && r.rank == 1) {
            throw std::runtime_error("the second is too large");
          }
          perform(way, {OpCode::kBarrier});
        }
      });
    };
    if (r.rank == 1) {
      CHECK_THROWS(run(), std::runtime_error, "the second");
    } else {
      expect_refusal(r, "the second is too large", run);
    }
    CHECK(r.usable());
  });
}

TEST(engines_go_on_after_what_all_ranks_find) {
  with_engines([](Rank& r, Store&) {
    for (const ErrorKind kind : {ErrorKind::kInvalid, ErrorKind::kMismatch}) {
      expect_error(kind, {"alike"}, [&] {
        r.run([&](Way& way) {
          perform(way, {OpCode::kBarrier});
          throw Error(kind, "fused: alike on all ranks");
        });
      });
      CHECK(r.usable());
    }
  });
}

// The part of the ranks that wait while rank 1 throws after a barrier.
void is_left_in_the_middle(Rank& r, Store& store) {
  r.barrier();
  store.get("thrown", Deadline(kLong));
  CHECK_THROWS(
      [&] {
        r.barrier();
        r.barrier();
      }(),
      Error,
      "rank 1"); // why, where the store takes the word in time
}

// A rank that leaves an operation in the middle leaves its peers there.
TEST(engines_end_by_what_one_rank_throws_in_the_middle) {
  with_engines([](Rank& r, Store& store) {
    if (r.rank != 1) {
      is_left_in_the_middle(r, store);
      return;
    }
    try {
      r.run([](Way& way) {
        perform(way, {OpCode::kBarrier});
        throw std::runtime_error("no thread for it");
      });
      report_failure(__FILE__, __LINE__, "nothing was thrown");
    } catch (const std::exception& error) {
      CHECK(
          std::string(error.what()).find("no thread for it") !=
          std::string::npos);
    }
    CHECK(r.engine->failure() == ErrorKind::kSystem);
    store.set("thrown", "");
    expect_error(
        ErrorKind::kSystem, {"must be destroyed", "no thread for it"}, [&] {
          r.barrier();
        });
  });
}

// The kind is that of missing memory, though no Error says so.
TEST(engines_end_by_missing_memory_in_the_middle) {
  with_engines([](Rank& r, Store& store) {
    if (r.rank != 1) {
      is_left_in_the_middle(r, store);
      return;
    }
    const auto run = [&] {
      r.run([](Way& way) {
        perform(way, {OpCode::kBarrier});
        throw std::bad_alloc();
      });
    };
    if (r.engine->spans_hosts()) {
      expect_error(ErrorKind::kOutOfMemory, {"std::bad_alloc"}, run);
    } else {
      CHECK_THROWS(run(), std::bad_alloc, "std::bad_alloc");
    }
    CHECK(r.engine->failure() == ErrorKind::kOutOfMemory);
    store.set("thrown", "");
  });
}

// Between hosts, where it has no memory for what it would send.
TEST(engines_refuse_a_move_that_cannot_begin) {
  struct Full : Transport {
    explicit Full(Transport& whole) : whole(whole) {}
    int rank() const override {
      return whole.rank();
    }
    int size() const override {
      return whole.size();
    }
    RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override {
      return whole.send(to, tag, message);
    }
    RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override {
      (void)whole.receive(from, tag, into);
      throw std::bad_alloc();
    }
    void abort() override {
      whole.abort();
    }
    void end() noexcept override {
      whole.end();
    }
    Transport& whole;
  };
  with_engines([](Rank& r, Store&) {
    if (!r.engine->spans_hosts()) {
      return;
    }
    std::vector<uint64_t> from(kSize, r.rank), to(kSize);
    const auto run = [&](bool full) {
      r.run([&](Way& way) {
        Move move;
        for (int p = 0; p < kSize; ++p) {
          move.sends.push_back({&from[p], sizeof from[p]});
          move.recvs.push_back({&to[p], sizeof to[p]});
        }
        OpDescriptor d;
        d.op = OpCode::kAllToAll;
        if (!full) {
          way.move(move, d);
          return;
        }
        const NetContext& ctx = *way.net();
        Full transport(ctx.transport);
        NetContext without{ctx, transport, ctx.hosts, ctx.domain};
        HostsWay(without).move(move, d);
      });
    };
    run(false);
    if (r.rank == 1) {
      CHECK_THROWS(run(true), std::bad_alloc, "std::bad_alloc");
    } else {
      expect_refusal(r, "std::bad_alloc", [&] { run(false); });
    }
    to.assign(kSize, 0);
    run(false);
    for (int p = 0; p < kSize; ++p) {
      CHECK_EQ(to[p], static_cast<uint64_t>(p));
    }
    CHECK(r.usable());
  });
}

// This rank's connections have ended then.
TEST(engines_end_by_a_message_of_another_length) {
  with_engines([](Rank& r, Store& store) {
    const auto run = [&](size_t bytes) {
      r.run([&](Way& way) {
        NetContext& ctx = *way.net();
        if (r.rank == 0) {
          net_send(ctx, 1, NetKind::kMove, NetBuffer(bytes))
              .request->wait(ctx.deadline);
        } else if (r.rank == 1) {
          net_receive(ctx, 0, NetKind::kMove, NetBuffer(16))
              .request->wait(ctx.deadline);
        }
      });
    };
    if (!r.engine->spans_hosts()) {
      return;
    }
    run(16);
    CHECK(r.usable());
    if (r.rank == 1) {
      expect_error(
          ErrorKind::kSystem, {"rank 1: rank 1 (here) expected 16"}, [&] {
            run(8);
          });
      CHECK(r.engine->failure() == ErrorKind::kSystem);
    } else {
      run(8);
    }
    store.meet("compared", kSize);
  });
}

// Though it has told nobody of the operation.
TEST(engines_end_by_an_abort) {
  with_engines([](Rank& r, Store& store) {
    CHECK(r.usable());
    if (r.rank == 1) {
      r.engine->interrupt("interrupted by a test");
      expect_error(
          ErrorKind::kAborted, {"interrupted by a test"}, [&] { r.barrier(); });
      CHECK(r.engine->failure() == ErrorKind::kAborted);
      store.set("aborted", "");
    } else {
      store.get("aborted", Deadline(kLong));
      CHECK_THROWS(r.barrier(), Error, "rank 1");
      CHECK(r.engine->failure().has_value());
    }
  });
}

TEST(engines_end_where_peers_cannot_be_told) {
  for (const ErrorKind kind : {ErrorKind::kInvalid, ErrorKind::kOutOfMemory}) {
    with_engines([kind](Rank& r, Store& store) {
      if (r.rank == 1) {
        // What is wrong with one call is no reason for a group to end.
        const ErrorKind reason =
            kind == ErrorKind::kInvalid ? ErrorKind::kPeerFailed : kind;
        store.get("gone", Deadline(kLong));
        expect_error(
            reason,
            {"too large; the other ranks cannot be told: ", "rank 0"},
            [&] { refuse(r, [&] { throw Error(kind, "fused: too large"); }); });
        CHECK(r.engine->failure() == reason);
      } else {
        r.engine->interrupt("aborted");
        CHECK_THROWS(r.barrier(), Error, "abort");
        store.meet("both", kSize - 1);
        store.set("gone", "");
      }
    });
  }
}
