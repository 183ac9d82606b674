#include <limits>

#include "fused_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

std::vector<Recipe> recipes() {
  const auto change = [](auto member, auto value) {
    return [=](StepHyper& h) { h.*member = value; };
  };
  std::vector<Recipe> list = one_of_each();
  list.pop_back(); // LAMB has its own tests
  list.push_back(recipe(OpCode::kFusedSgd, [](StepHyper& h) {
    h.nesterov = true;
    h.dampening = 0;
  }));
  list.push_back(recipe(OpCode::kFusedSgd, change(&StepHyper::momentum, 0.0)));
  list.push_back(recipe(OpCode::kFusedAdam, change(&StepHyper::amsgrad, true)));
  list.push_back(recipe(OpCode::kFusedAdamW));
  return list;
}

void train(Group& g) {
  train_recipes(g, recipes(), {33, 0, 5000, 1, 129});
}

// Groups of one to four ranks, for every kind of step.
void with_each(
    const std::vector<int>& sizes,
    const std::function<void(Group&, const Recipe&)>& body) {
  for (const int size : sizes) {
    with_group(size, 1, [&](Group& g) {
      for (const Recipe& r : one_of_each()) {
        body(g, r);
      }
    });
  }
}

} // namespace

TEST(fused_step_equals_one_process) {
  with_groups(train);
}

// Every combination of places; the bits must not depend on it.
TEST(fused_step_places) {
  with_each(
      kSanitized ? std::vector{3} : std::vector{2, 3},
      [](Group& g, const Recipe& r) {
        if (kOnlyThreads && r.op != OpCode::kFusedAdamW) {
          return;
        }
        const std::vector<size_t> counts{40000, 1, 777, 0, 12345};
        for (const StepTypes& types : step_types({kSingles, kStepTypes[3]})) {
          for (const Place params : kPlaces) {
            for (const Place grads : kPlaces) {
              Training training(g, r, types, counts, params, grads);
              training.step();
              training.check();
            }
          }
        }
      });
}

// Half parameters with masters, of which some ranks own nothing: a slice
// without elements has no address, which is no disagreement.
TEST(fused_step_empty_master_slices) {
  with_each({2, 3}, [](Group& g, const Recipe& r) {
    Training training(
        g, r, kStepTypes[2], {5, 100, 0}, Place::kArena, Place::kArena);
    for (StepTensor& t : training.call.tensors) {
      const auto n = static_cast<int64_t>(t.count);
      if (shard_range(n, g.size, g.rank).length == 0) {
        t.master = nullptr;
      }
    }
    training.step();
    training.check();
  });
}

// More than 4 MiB, whose results go around the cache.
TEST(fused_step_streamed) {
  if (kSanitized) {
    return;
  }
  with_group(2, 2, [](Group& g) {
    for (const Place place : kPlaces) {
      for (const StepTypes& types : {kSingles, kStepTypes[2]}) {
        Training training(
            g, recipe(OpCode::kFusedAdamW), types, {1300001}, place, place);
        training.step();
        training.check();
      }
    }
  });
}

TEST(fused_step_many_tensors) {
  with_each({3}, [](Group& g, const Recipe& r) {
    std::vector<size_t> counts;
    for (size_t t = 0; t < (kSanitized ? 500 : 1500); ++t) {
      counts.push_back(std::vector<size_t>{0, 1, 31, 70, 33, 130}[t % 6]);
    }
    for (const Place place : kPlaces) {
      Training training(g, r, kSingles, counts, place, place);
      training.uses = [](int rank, size_t t) { return t % 7 == size_t(rank); };
      training.step();
      training.check();
    }
  });
}

// As many tensors as there is room for in the operation's table, and one more.
TEST(fused_step_too_many_tensors) {
  with_each({2}, [](Group& g, const Recipe& r) {
    if (kSanitized && r.op != OpCode::kFusedAdamW) {
      return;
    }
    const auto with = [&](size_t tensors, bool good) {
      const std::vector<size_t> counts(tensors, 1);
      Training training(
          g, r, kSingles, counts, Place::kOrdinary, Place::kOrdinary);
      training.uses = [](int rank, size_t t) { return t % 5 == size_t(rank); };
      if (good) {
        training.step();
      } else {
        expect_error(
            ErrorKind::kInvalid, {op_name(r.op), "split the list"}, [&] {
              training.step();
            });
      }
      training.check(good);
    };
    if (!kOnlyThreads) { // under TSan that would take ten times as long
      with(kMaxStepTensors, true);
    }
    with(kMaxStepTensors + 1, false);
    check_usable(g);
  });
}

TEST(fused_step_found_inf_on_one_rank) {
  with_each({1, 2, 4}, [](Group& g, const Recipe& r) {
    for (const Place place : {Place::kOrdinary, Place::kArena}) {
      Training training(g, r, kSingles, {100, 20000}, place, place);
      float found = 0;
      training.call.found_inf = &found;
      training.step();
      training.check();
      CHECK_EQ(found, 0.0f);
      for (int who = 0; who < g.size; ++who) {
        found = g.rank == who ? 1.0f : 0.0f;
        training.step();
        training.check(false);
        CHECK_EQ(found, 1.0f); // everywhere
      }
      found = 0;
      training.step();
      training.check();
      // The flag itself may be on one rank only.
      found = 1;
      training.call.found_inf = g.rank == 0 ? &found : nullptr;
      training.step();
      training.check(false);
    }
  });
}

TEST(fused_step_used_on_some_ranks) {
  with_each(
      kOnlyThreads ? std::vector{3} : std::vector{1, 2, 3},
      [](Group& g, const Recipe& r) {
        std::vector<size_t> counts(70, 40);
        counts[1] = 20000;
        counts[2] = 10000;
        counts[69] = 333;
        for (const Place place : kPlaces) {
          Training training(
              g, without_first_step(r), kSingles, counts, place, place);
          const int last = g.size - 1;
          for (int step = 0; step < 4; ++step) {
            // Other tensors in every step, so that counters differ.
            training.uses = [step, last](int rank, size_t t) {
              return t % 4 == size_t(step) || (t % 5 == 0 && rank == last);
            };
            training.step();
            training.check();
          }
          training.uses = [](int, size_t) { return false; };
          training.step();
          training.check();
          training.uses = nullptr;
          training.step();
          training.check();
          training.check_exact();
        }
      });
}

TEST(fused_step_weighted_mean) {
  with_each({1, 2, 3, 4}, [](Group& g, const Recipe& r) {
    const std::vector<std::vector<double>> cases{
        {3, 1, 2.5, 7}, {0, 5, 0, 1}, {1, 0, 0, 0}, {0, 0, 0, 0}};
    size_t kind = 0;
    for (const auto& weights : cases) {
      for (const StepTypes& types : step_types()) {
        if (r.lamb() && !types.precise()) {
          continue;
        }
        const Place place = kPlaces[kind++ % 3];
        Training training(g, r, types, {2000, 1, 65}, place, place);
        training.weights = weights;
        training.weights.resize(static_cast<size_t>(g.size));
        for (int step = 0; step < 2; ++step) {
          training.step();
          training.check();
        }
        training.check_exact();
      }
    }
  });
}

TEST(fused_step_hyperparameters_by_tensor) {
  with_each({2, 3}, [](Group& g, const Recipe& r) {
    Training training(
        g,
        r,
        kSingles,
        {300, 20000, 1, 500, 7000},
        Place::kMixed,
        Place::kArena);
    StepCall& call = training.call;
    call.hypers.resize(3, call.hypers[0]);
    call.hypers[1].lr = 1e-3;
    call.hypers[1].weight_decay = 0;
    call.hypers[2].beta1 = 0.5;
    call.hypers[2].maximize = true;
    for (size_t t = 0; t < call.tensors.size(); ++t) {
      call.tensors[t].hyper = (t + 1) % 3;
    }
    for (int step = 0; step < 3; ++step) {
      training.step();
      training.check();
    }
    training.check_exact();
  });
}

TEST(fused_step_counters_by_tensor) {
  with_each({2}, [](Group& g, const Recipe& r) {
    Training training(
        g,
        without_first_step(r),
        kSingles,
        {300, 2000, 1},
        Place::kArena,
        Place::kArena);
    for (size_t step = 0; step < 6; ++step) {
      training.uses = [step](int, size_t t) { return step % (t + 1) == 0; };
      training.step();
      training.check();
    }
    training.check_exact();
  });
}

TEST(fused_step_finds_nan) {
  on_threads(2, [](int rank, Store& store) {
    Settings settings = test_settings();
    settings.nan_check = true;
    Group g(rank, 2, store, settings);
    for (const Recipe& r : one_of_each()) {
      Training training(
          g, r, kStepTypes[3], {100, 3000}, Place::kMixed, Place::kMixed);
      training.step();
      training.check();
      training.load();
      if (rank == 1) { // a bfloat16
        const uint16_t nan = 0x7fc0;
        auto* grad = const_cast<void*>(training.call.tensors[1].grad);
        std::memcpy(static_cast<char*>(grad) + 2 * 2999, &nan, 2);
      }
      expect_error(ErrorKind::kInvalid, {"rank 1 holds a NaN"}, [&] {
        g.run([&](Context& ctx) { fused_step(ctx, training.call); });
      });
      training.load();
      training.check(false);
      check_usable(g);
    }
    g.run([](Context& ctx) { barrier(ctx); });
  });
}

// Values that are not finite stay in their elements.
TEST(fused_step_keeps_nan) {
  with_each({2}, [](Group& g, const Recipe& r) {
    if (r.lamb()) {
      return; // norms spread them
    }
    Training training(g, r, kSingles, {1000}, Place::kArena, Place::kOrdinary);
    training.load();
    if (g.rank == 0) {
      auto* grad =
          static_cast<float*>(const_cast<void*>(training.call.tensors[0].grad));
      grad[700] = std::numeric_limits<float>::quiet_NaN();
    }
    g.run([&](Context& ctx) { fused_step(ctx, training.call); });
    const auto* param = static_cast<float*>(training.call.tensors[0].param);
    for (size_t i = 0; i < 1000; ++i) {
      CHECK_EQ(std::isnan(param[i]), i == 700);
    }
  });
}
