#pragma once

#include "cuda_training.hpp"

// Steps of every kind on the CUDA engine.
namespace fusedpg::test {

inline std::vector<Recipe> recipes() {
  std::vector<Recipe> list = one_of_each();
  list.push_back(recipe(OpCode::kFusedSgd, [](StepHyper& h) {
    h.nesterov = true;
    h.dampening = 0;
  }));
  list.push_back(
      recipe(OpCode::kFusedSgd, [](StepHyper& h) { h.momentum = 0; }));
  list.push_back(recipe(OpCode::kFusedAdamW));
  return list;
}

inline std::vector<double> some_weights(int size) {
  std::vector<double> weights;
  for (int p = 0; p < size; ++p) {
    weights.push_back(p == 1 ? 0.3 : 1.7 + p);
  }
  return weights;
}

// Every kind of step in every kind of type, with everything a call may have.
inline void train(GpuRank& r) {
  hooks().set_delay(kShortDelay);
  const std::vector<std::vector<size_t>> lists{
      {1}, {33, 0, 3000, 1, 129}, {9001, 31, 0, 640}, {0, 0}};
  size_t turn = 0;
  for (const Recipe& recipe : recipes()) {
    for (const StepTypes& types : step_types()) {
      const size_t kind = turn++;
      if (recipe.lamb() && dtype_size(types.state) == 2) {
        continue;
      }
      GpuTraining training(r, recipe, types, lists[(kind + kind / 4) % 4]);
      training.call.hypers[0].maximize = kind % 5 == 1;
      training.call.reduction.mean = kind % 4 != 2;
      if (kind % 4 == 3) {
        training.set_grad_scale(8);
        training.set_found_inf(false);
      }
      if (kind % 4 == 0) {
        training.weights = some_weights(r.size);
      }
      if (kind % 3 == 2) {
        training.uses = [size = r.size](int rank, size_t t) {
          return t % static_cast<size_t>(size + 1) == static_cast<size_t>(rank);
        };
      }
      for (int step = 0; step < 2; ++step) {
        if (kind % 5 == 0) {
          training.set_lr(0.01 / (step + 1), kind % 2 ? kDouble : kSingle);
        }
        training.load();
        if (kind % 3 == 1) {
          training.reduce_and_step(kind % 2 == 0);
        } else {
          training.step();
        }
        training.check();
      }
    }
  }
}

} // namespace fusedpg::test
