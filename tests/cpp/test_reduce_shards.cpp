#include "fused_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

const std::vector<double> kWeights{3, 1, 0, 2.5};

std::vector<double> some_weights(const Group& g) {
  return {kWeights.begin(), kWeights.begin() + g.size};
}

void reduce_lists(Group& g) {
  const std::vector<std::vector<size_t>> lists{
      {1}, {33, 0, 5000, 1, 129}, {60000, 31, 9001}};
  size_t kind = 0;
  for (const StepTypes& types : step_types()) {
    for (const auto& counts : lists) {
      for (const Place place : kPlaces) {
        Training training(
            g, recipe(OpCode::kFusedSgd), types, counts, place, place);
        training.call.reduction.mean = kind % 2 == 0;
        if (kind % 4 >= 2) {
          training.separate_outputs(kPlaces[kind / 4 % 3]);
        }
        ++kind;
        training.load();
        g.run([&](Context& ctx) { reduce_shards(ctx, training.shards()); });
        training.check_reduced();
      }
    }
  }
}

// Steps on reduced gradients.
void train(Group& g) {
  size_t turn = 0;
  for (const Recipe& r : one_of_each()) {
    for (const StepTypes& types : step_types()) {
      if (!takes(r, types)) {
        continue;
      }
      const size_t kind = turn++;
      Training training(
          g,
          r,
          types,
          {kSanitized ? 9000u : 30000u, 0, 1, 777, 31},
          kPlaces[kind % 3],
          kPlaces[kind / 3 % 3]);
      training.call.reduction.mean = kind % 4 != 2;
      if (kind % 5 >= 3) {
        training.separate_outputs(kPlaces[kind % 3]);
      }
      for (int step = 0; step < 3; ++step) {
        training.reduce_and_step();
        training.check();
      }
    }
  }
}

} // namespace

TEST(reduce_shards_leaves_slices) {
  for (const int size : world_sizes()) {
    with_group(size, size < 3 ? 2 : 1, reduce_lists);
  }
}

TEST(reduce_shards_weighted) {
  for (const int size : world_sizes()) {
    with_group(size, 1, [](Group& g) {
      for (const StepTypes& types : step_types()) {
        for (const Place place : kPlaces) {
          Training training(
              g,
              recipe(OpCode::kFusedSgd),
              types,
              {5000, 1, 0, 65},
              place,
              place);
          // No rank that counts: zeros, and no NaN.
          for (const bool none : {false, true}) {
            training.weights =
                none ? std::vector<double>(g.size) : some_weights(g);
            training.load();
            g.run([&](Context& ctx) { reduce_shards(ctx, training.shards()); });
            training.check_reduced();
          }
        }
      }
    });
  }
}

TEST(reduce_shards_used_on_some_ranks) {
  with_group(3, 1, [](Group& g) {
    for (const Place place : kPlaces) {
      Training training(
          g,
          recipe(OpCode::kFusedSgd),
          kSingles,
          std::vector<size_t>(130, 100),
          place,
          place);
      training.uses = [](int rank, size_t t) {
        return t % 5 == size_t(rank) || t == 129;
      };
      if (place == Place::kMixed) {
        training.separate_outputs(place);
      }
      training.load();
      g.run([&](Context& ctx) { reduce_shards(ctx, training.shards()); });
      training.check_reduced();
    }
  });
}

TEST(fused_step_on_reduced_gradients) {
  for (const int size : world_sizes()) {
    with_group(size, size < 3 ? 2 : 1, train);
  }
}

TEST(fused_step_on_reduced_gradients_of_some_tensors) {
  with_group(3, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      Training training(
          g,
          without_first_step(r),
          kSingles,
          {5000, 1, 70, 20000, 33},
          Place::kMixed,
          Place::kMixed);
      for (size_t step = 0; step < 3; ++step) {
        training.uses = [step](int rank, size_t t) {
          return (t + size_t(rank)) % 4 == step;
        };
        training.reduce_and_step();
        training.check();
      }
    }
  });
}

// A mean is the sum times one reciprocal, and weights are applied in one order,
// either way. The loss scale is a power of two.
TEST(fused_step_in_two_operations_has_the_bits_of_one) {
  for (const int size : world_sizes()) {
    with_group(size, 1, [](Group& g) {
      for (const Recipe& r : one_of_each()) {
        for (const bool weighted : {false, true}) {
          const std::vector<size_t> counts{20000, 1, 777};
          const float scale = 8;
          Training one(g, r, kSingles, counts, Place::kArena, Place::kOrdinary);
          Training two(g, r, kSingles, counts, Place::kOrdinary, Place::kArena);
          for (Training* t : {&one, &two}) {
            t->call.grad_scale = &scale;
            t->weights = weighted ? some_weights(g) : std::vector<double>();
          }
          for (int step = 0; step < 3; ++step) {
            one.step();
            one.check();
            two.reduce_and_step();
            two.check();
            for (size_t t = 0; t < counts.size(); ++t) {
              CHECK(one.param(t) == two.param(t));
            }
          }
          one.check_exact();
          two.check_exact();
        }
      }
    });
  }
}

// Reduced gradients have been weighted: the weight of the call means nothing
// more, as its `mean` does.
TEST(fused_step_on_reduced_gradients_ignores_the_reduction) {
  with_group(2, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      Training training(
          g, r, kSingles, {2000, 1}, Place::kArena, Place::kArena);
      training.weights = {3, 1};
      training.weight_again = true;
      training.reduce_and_step();
      training.check();
    }
  });
}

TEST(fused_step_on_reduced_gradients_found_inf) {
  with_group(2, 1, [](Group& g) {
    for (const Recipe& r : one_of_each()) {
      Training training(
          g, r, kSingles, {2000, 1}, Place::kArena, Place::kArena);
      float found = g.rank == 1 ? 1.0F : 0.0F;
      training.call.found_inf = &found;
      training.reduce_and_step();
      training.check(false);
      CHECK_EQ(found, 1.0F);
      found = 0;
      training.reduce_and_step();
      training.check();
    }
  });
}

TEST(reduce_shards_disagreements_raise_everywhere) {
  for (const int size : {2, 3}) {
    with_group(size, 1, [](Group& g) {
      const bool odd = g.rank == g.size - 1;
      const auto differ = [&](const std::string& says, auto change) {
        Training training(
            g,
            recipe(OpCode::kFusedSgd),
            kSingles,
            {100, 20000},
            Place::kMixed,
            Place::kMixed);
        training.load();
        ShardsCall call = training.shards();
        std::vector<uint8_t> flags(2, 1);
        if (odd) {
          change(call, flags);
        }
        expect_error(ErrorKind::kMismatch, {"reduce_shards", says}, [&] {
          g.run([&](Context& ctx) { reduce_shards(ctx, call); });
        });
        training.check(false); // gradients are as they were
        check_usable(g);
      };
      using Flags = std::vector<uint8_t>;
      differ(
          "reduction", [](ShardsCall& c, Flags&) { c.reduction.mean = false; });
      differ("weighted", [](ShardsCall& c, Flags&) { c.reduction.weight = 1; });
      differ("with used flags", [](ShardsCall& c, Flags& f) {
        c.used = f.data();
      });
      differ("layouts", [](ShardsCall& c, Flags&) { c.layout_hash = 5; });
      differ("number of tensors", [](ShardsCall& c, Flags&) {
        c.grads.pop_back();
        c.outputs.pop_back();
        c.counts.pop_back();
      });
      differ("dtype", [](ShardsCall& c, Flags&) { c.dtype = kBHalf; });
      differ("number of elements", [](ShardsCall& c, Flags&) {
        c.counts = {100, 10000};
      });
    });
  }
}

TEST(reduce_shards_too_many_tensors) {
  with_group(2, 1, [](Group& g) {
    const auto with = [&](size_t tensors) {
      Training training(
          g,
          recipe(OpCode::kFusedSgd),
          kSingles,
          std::vector<size_t>(tensors, 1),
          Place::kOrdinary,
          Place::kOrdinary);
      training.load();
      g.run([&](Context& ctx) { reduce_shards(ctx, training.shards()); });
      training.check_reduced();
    };
    with(kMaxStepTensors);
    expect_error(ErrorKind::kInvalid, {"reduce_shards", "split the list"}, [&] {
      with(kMaxStepTensors + 1);
    });
    check_usable(g);
  });
}
