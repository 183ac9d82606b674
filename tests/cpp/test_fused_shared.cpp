#include "fused_cases.hpp"

// Parameters of which the ranks of a machine have one copy, and disagreements
// about a step.
namespace {

using namespace fusedpg;
using namespace fusedpg::test;

void with_sharing_group(int size, int threads, const GroupBody& body) {
  with_group(size, threads, body, true);
}

void* shared(Group& g, size_t bytes) {
  void* memory = nullptr;
  g.run([&](Context& ctx) { memory = share_memory(ctx, bytes); });
  return memory;
}

void meet(Group& g) {
  g.run([](Context& ctx) { barrier(ctx); });
}

void share(Group& g) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{1} << 20}) {
    auto* first = static_cast<char*>(shared(g, bytes));
    auto* second = static_cast<char*>(shared(g, bytes));
    CHECK_EQ(reinterpret_cast<uintptr_t>(first) % 64, uintptr_t{0});
    CHECK(first + bytes <= second || second + bytes <= first);
    for (int who = 0; who < g.size; ++who) {
      if (g.rank == who) {
        std::memset(first, who + 1, bytes);
        std::memset(second, who + 101, bytes);
      }
      meet(g);
      CHECK(first[0] == who + 1 && first[bytes - 1] == who + 1);
      CHECK(second[0] == who + 101 && second[bytes - 1] == who + 101);
      meet(g);
    }
    // The same place, as every rank sees it.
    const auto place = g.engine.domain().locate_any(first, bytes);
    if (CHECK(place.has_value())) {
      CHECK_EQ(place->rank, 0);
      CHECK(g.engine.domain().address(0, place->offset) == first);
    }
  }
}

void train(Group& g) {
  size_t turn = 0;
  for (const Recipe& r : one_of_each()) {
    for (const StepTypes& types : step_types()) {
      if (!takes(r, types)) {
        continue;
      }
      const size_t kind = turn++;
      const Place grads = kPlaces[kind % 3];
      Training training(
          g, r, types, {30000, 0, 1, 777, 31}, Place::kOrdinary, grads);
      training.share();
      for (int step = 0; step < 3; ++step) {
        if (kind % 4 == 3) {
          training.reduce_and_step();
        } else {
          training.step();
        }
        training.check();
      }
      training.uses = [](int rank, size_t t) { return t == size_t(rank); };
      training.step();
      training.check();
    }
  }
}

} // namespace

TEST(share_memory_is_one_memory) {
  for (const int size : {1, 2, 3}) {
    with_sharing_group(size, 1, share);
  }
}

// The mapping outlives the group for whoever keeps it.
TEST(share_memory_outlives_the_group) {
  on_processes(2, [](int rank, Store& store) {
    std::shared_ptr<const void> keep;
    char* memory = nullptr;
    {
      Group g(rank, 2, store);
      memory = static_cast<char*>(shared(g, 100000));
      keep = g.engine.domain().mapping(0);
      if (rank == 0) {
        std::memset(memory, 77, 100000);
      }
      meet(g);
    }
    CHECK_EQ(keep.use_count(), long{1});
    CHECK(memory[0] == 77 && memory[99999] == 77);
    store.meet("read", 2);
    memory[rank] = 78;
    store.meet("written", 2);
    CHECK(memory[0] == 78 && memory[1] == 78);
  });
}

TEST(share_memory_disagreement) {
  with_sharing_group(3, 1, [](Group& g) {
    expect_error(ErrorKind::kMismatch, {"share_memory"}, [&] {
      shared(g, g.rank == 1 ? 200 : 100);
    });
    check_usable(g);
    share(g);
  });
}

TEST(domain_locates_in_any_arena) {
  with_group(3, 1, [](Group& g) {
    Domain& domain = g.engine.domain();
    PlacedMemory mine(domain, 5000, true);
    PlacedMemory ordinary(domain, 5000, false);
    const auto own = domain.locate_any(mine.data() + 8, 4000);
    if (CHECK(own.has_value())) {
      CHECK_EQ(own->rank, g.rank);
      CHECK(domain.address(g.rank, own->offset) == mine.data() + 8);
    }
    CHECK(!domain.locate_any(ordinary.data(), 1));
    int local = 0;
    CHECK(!domain.locate_any(&local, sizeof local));
    for (int p = 0; p < g.size; ++p) {
      if (p == g.rank) {
        continue;
      }
      // As far as the block of this rank, where peers have one too.
      char* there = domain.address(p, own->offset);
      const auto found = domain.locate_any(there, 100);
      if (CHECK(found.has_value())) {
        CHECK_EQ(found->rank, p);
        CHECK_EQ(found->offset, own->offset);
      }
      // Beyond the end of the arena.
      CHECK(!domain.locate_any(there, size_t{1} << 40));
    }
    meet(g);
  });
}

TEST(fused_step_on_shared_parameters) {
  for (const int size : world_sizes()) {
    with_sharing_group(size, size < 3 ? 2 : 1, train);
  }
}

// The bits are those of a step on copies.
TEST(fused_step_on_shared_parameters_as_on_copies) {
  with_sharing_group(3, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      const std::vector<size_t> counts{40000, 5};
      Training copies(g, r, kSingles, counts, Place::kArena, Place::kArena);
      Training one(g, r, kSingles, counts, Place::kArena, Place::kArena);
      one.share();
      for (int step = 0; step < 2; ++step) {
        copies.step();
        copies.check();
        one.step();
        one.check();
      }
      for (size_t t = 0; t < counts.size(); ++t) {
        CHECK(one.param(t) == copies.param(t));
      }
    }
  });
}

TEST(fused_step_on_shared_parameters_found_inf) {
  with_sharing_group(2, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      Training training(
          g, r, kSingles, {2000, 1}, Place::kArena, Place::kArena);
      training.share();
      float found = g.rank == 1 ? 1.0F : 0.0F;
      training.call.found_inf = &found;
      training.step();
      training.check(false);
      found = 0;
      training.step();
      training.check();
    }
  });
}

TEST(fused_step_on_shared_parameters_that_are_not) {
  with_sharing_group(3, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      const auto raises =
          [&](Training& training, ErrorKind kind, const std::string& says) {
            expect_error(kind, {says}, [&] { training.step(); });
            training.check(false);
            check_usable(g);
          };
      // In everybody's own arena, at first at the same place of each: not one copy.
      Training own(g, r, kSingles, {100, 0}, Place::kArena, Place::kArena);
      own.call.shared_params = true;
      raises(own, ErrorKind::kMismatch, "layouts");
      const std::string outside = "does not lie in an arena of this group";
      Training ordinary(
          g, r, kSingles, {100, 0}, Place::kOrdinary, Place::kArena);
      ordinary.call.shared_params = true;
      raises(ordinary, ErrorKind::kInvalid, outside);
      // On one rank alone.
      Training some(g, r, kSingles, {100, 0}, Place::kOrdinary, Place::kArena);
      void* copy = some.call.tensors[0].param;
      some.share();
      void* place = some.call.tensors[0].param;
      some.call.tensors[0].param = g.rank == 1 ? copy : place;
      raises(
          some,
          g.rank == 1 ? ErrorKind::kInvalid : ErrorKind::kMismatch,
          outside);
      some.call.tensors[0].param = place;
      some.step();
      some.check();
      // On one rank a copy, on the others one.
      Training one(g, r, kSingles, {100, 0}, Place::kArena, Place::kArena);
      one.share();
      one.call.shared_params = g.rank != 2;
      raises(one, ErrorKind::kMismatch, "shared parameters");
    }
  });
}

// Everything that ranks have to agree about, one after the other.
TEST(fused_step_disagreements_raise_everywhere) {
  for (const int size : {2, 3}) {
    with_group(size, 1, [](Group& g) {
      const bool odd = g.rank == g.size - 1;
      for (const Recipe& r : one_of_each()) {
        Training training(
            g, r, kSingles, {100, 20000}, Place::kMixed, Place::kMixed);
        training.step();
        training.check();
        const float scale = 2;
        std::vector<uint8_t> flags(2, 1);
        const auto differ = [&](const std::string& says, auto change) {
          training.load();
          StepCall call = training.call;
          if (odd) {
            change(call);
          }
          expect_error(ErrorKind::kMismatch, {op_name(r.op), says}, [&] {
            g.run([&](Context& ctx) { fused_step(ctx, call); });
          });
          training.check(false);
          CHECK(flags == std::vector<uint8_t>(2, 1));
        };
        for (const auto scalar :
             {&StepHyper::lr,
              &StepHyper::beta1,
              &StepHyper::beta2,
              &StepHyper::eps,
              &StepHyper::weight_decay,
              &StepHyper::momentum,
              &StepHyper::dampening}) {
          differ("scalar arguments", [&](StepCall& c) {
            c.hypers[0].*scalar += 0.0625;
          });
        }
        for (const auto flag :
             {&StepHyper::nesterov,
              &StepHyper::first_step,
              &StepHyper::decoupled,
              &StepHyper::amsgrad,
              &StepHyper::maximize,
              &StepHyper::trust_clip,
              &StepHyper::always_adapt}) {
          differ("scalar arguments", [&](StepCall& c) {
            c.hypers[0].*flag = !(c.hypers[0].*flag);
          });
        }
        differ("reduction", [](StepCall& c) { c.reduction.mean = false; });
        differ("reduced gradients", [](StepCall& c) { c.reduced = true; });
        differ("scalar arguments", [&](StepCall& c) { c.grad_scale = &scale; });
        differ("scalar arguments", [](StepCall& c) { c.call_hash = 1; });
        differ("scalar arguments", [](StepCall& c) {
          c.hypers.push_back(c.hypers[0]);
          c.tensors[1].hyper = 1;
        });
        differ("with used flags", [&](StepCall& c) { c.used = flags.data(); });
        differ("weighted", [](StepCall& c) { c.reduction.weight = 1; });
        differ("layouts", [](StepCall& c) { c.tensors[1].layout_hash ^= 1; });
        differ("gradients", [](StepCall& c) { c.grad_type = kBHalf; });
        differ("states", [](StepCall& c) { c.state_type = kBHalf; });
        differ("dtype", [](StepCall& c) { c.param_type = kBHalf; });
        differ("with masters", [](StepCall& c) { c.has_masters = true; });
        differ("layouts", [](StepCall& c) {
          std::swap(c.tensors[0], c.tensors[1]);
        });
        differ("number of tensors", [](StepCall& c) { c.tensors.pop_back(); });
        differ("number of elements", [](StepCall& c) {
          c.tensors[1].count = 19000;
        });
        differ("operation", [&](StepCall& c) {
          c.op = r.lamb() ? OpCode::kFusedAdam : OpCode::kFusedLamb;
        });
        if (!r.sgd()) {
          training.counter(1) += odd ? 1 : 0;
          expect_error(ErrorKind::kMismatch, {"scalar arguments"}, [&] {
            training.step();
          });
          training.counter(1) -= odd ? 1 : 0;
          training.check(false);
        }
        training.step();
        training.check();
        check_usable(g);
      }
    });
  }
}
