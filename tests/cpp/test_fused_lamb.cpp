#include "fused_cases.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

std::vector<Recipe> recipes() {
  const OpCode op = OpCode::kFusedLamb;
  return {
      recipe(op),
      recipe(op, [](StepHyper& h) { h.trust_clip = true; }),
      recipe(op, [](StepHyper& h) { h.weight_decay = 0; }),
      recipe(op, [](StepHyper& h) {
        h.weight_decay = 0;
        h.always_adapt = true;
      })};
}

void train(Group& g) {
  train_recipes(g, recipes(), {257, 0, 5000, 1, 129, 256, 4096});
}

// Pieces of many lengths, so that chunks end anywhere in them.
std::vector<size_t> odd_counts() {
  std::vector<size_t> counts;
  for (size_t k = 0; k < 40; ++k) {
    counts.push_back((k * 397 + 1) % 1901);
  }
  counts.push_back(40000);
  return counts;
}

void many_chunks(Group& g) {
  for (const StepTypes& types :
       step_types({kSingles, kStepTypes[1], kStepTypes[2]})) {
    for (const Place params : kPlaces) {
      for (const Place grads : kPlaces) {
        Training training(
            g, recipe(OpCode::kFusedLamb), types, odd_counts(), params, grads);
        training.step();
        training.check();
      }
    }
  }
}

} // namespace

TEST(fused_lamb_equals_one_process) {
  with_groups(train);
}

// The more ranks, the shorter the chunks of a lane.
TEST(fused_lamb_norms_do_not_depend_on_chunks) {
  with_group(4, 1, many_chunks);
  if (!kSanitized) {
    with_group(2, 1, many_chunks);
    with_group(8, 1, many_chunks);
    with_group(16, 1, many_chunks);
  }
}

// Slices that are long enough to be split between threads, in one chunk (in
// place) or in several.
TEST(fused_lamb_norms_do_not_depend_on_threads) {
  for (const int size : {1, 2}) {
    for (const int threads : {2, 3}) {
      if (kSanitized && threads == 3) {
        continue;
      }
      with_group(size, threads, [](Group& g) {
        for (const StepTypes& types : step_types({kSingles, kStepTypes[2]})) {
          for (const Place place : {Place::kArena, Place::kOrdinary}) {
            if (kSanitized && types.master) {
              continue;
            }
            Training training(
                g,
                recipe(OpCode::kFusedLamb),
                types,
                {140001 * static_cast<size_t>(g.size), 300},
                place,
                place);
            for (int step = 0; step < 2; ++step) {
              training.step();
              training.check();
            }
          }
        }
      });
    }
  }
}

// Norms of zero leave the learning rate alone.
TEST(fused_lamb_zero_norms) {
  with_group(2, 1, [](Group& g) {
    const Recipe r = recipe(OpCode::kFusedLamb);
    PlacedMemory param(g.engine.domain(), 400, true);
    PlacedMemory grad(g.engine.domain(), 400, false);
    const auto slice =
        static_cast<size_t>(shard_range(100, g.size, g.rank).length);
    std::vector<float> m(slice), v(slice);
    float counter = 0;
    StepCall call;
    call.op = r.op;
    call.hypers = {r.hyper};
    call.tensors = {
        {param.data(),
         grad.data(),
         nullptr,
         {m.data(), v.data(), nullptr},
         &counter,
         100,
         0,
         0}};
    const auto filled = [](const PlacedMemory& b, float value) {
      for (size_t i = 0; i < 100; ++i) {
        b.as<float>()[i] = value;
      }
    };
    const auto all = [&](float value) {
      for (size_t i = 0; i < 100; ++i) {
        CHECK(std::fabs(param.as<float>()[i] - value) <= 1e-6F);
      }
    };
    filled(param, 0);
    filled(grad, 2);
    g.run([&](Context& ctx) { fused_step(ctx, call); });
    all(static_cast<float>(-r.hyper.lr)); // |x| = 0; the direction is 1
    filled(param, 3);
    filled(grad, 0);
    std::fill(m.begin(), m.end(), 0.0F);
    call.hypers[0].weight_decay = 0;
    call.hypers[0].always_adapt = true;
    g.run([&](Context& ctx) { fused_step(ctx, call); });
    all(3); // |u| = 0
    CHECK_EQ(counter, 2.0F);
  });
}

TEST(fused_lamb_trust_ratio) {
  StepHyper h;
  h.weight_decay = 0.1;
  CHECK_EQ(trust_ratio(h, 16, 4), 2.0);
  CHECK_EQ(trust_ratio(h, 4, 16), 0.5);
  CHECK_EQ(trust_ratio(h, 0, 4), 1.0);
  CHECK_EQ(trust_ratio(h, 4, 0), 1.0);
  h.trust_clip = true;
  CHECK_EQ(trust_ratio(h, 16, 4), 1.0);
  CHECK_EQ(trust_ratio(h, 4, 16), 0.5);
  h = StepHyper();
  CHECK_EQ(trust_ratio(h, 16, 4), 1.0);
  h.always_adapt = true;
  CHECK_EQ(trust_ratio(h, 16, 4), 2.0);
}
