// The layers of a small all_reduce below torch: kernels, barrier, operation,
// executor. Two forked ranks, batches of calls in turn, medians on rank 0.
// benchmarks/latency.py has the layers above. Build and run: make bench-engine

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../tests/cpp/ranks.hpp"
#include "collectives/context.hpp"
#include "collectives/perform.hpp"
#include "collectives/way.hpp"
#include "host/executor.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::test {

// Stand in for the tests' main.cpp.
void report_failure(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s %d: %s\n", file, line, what.c_str());
  std::exit(1);
}
size_t failure_count() {
  return 0;
}

namespace {

constexpr int kRanks = 2;
constexpr size_t kCount = 1024; // 4 KB of fp32
constexpr int kBatch = 200;
constexpr int kRounds = 101;

struct Layer {
  const char* name;
  std::function<void()> call;
  std::vector<double> micros;
};

void measure(int rank, Store& store) {
  Group group(rank, kRanks, store);
  Executor executor;
  kernels::ReduceArgs args;
  args.dtype = DType::kFloat32;
  args.op = RedOp::kSum;
  const kernels::Table& kernels = select_kernels(test_settings());
  std::vector<float> data(kCount), other(kCount), stage(kCount);
  const Buffer tensor{data.data(), kCount};
  const Group::Operation reduce = [&](Context& ctx) {
    ShmWay way(ctx);
    perform(
        way,
        {.op = OpCode::kAllReduce,
         .dtype = args.dtype,
         .inputs = single(tensor)});
  };
  uint64_t sequence = 0;
  const Group::Operation meet = [](Context& ctx) {
    ShmWay way(ctx);
    perform(way, {.op = OpCode::kBarrier});
  };
  std::vector<Layer> layers{
      {"copy to the stage and kernel, in own caches",
       [&] {
         void* result = data.data();
         const void* sources[] = {stage.data(), other.data()};
         kernels.copy(stage.data(), data.data(), kCount * sizeof(float), false);
         kernels.reduce(args, &result, 1, sources, kRanks, kCount, false);
       },
       {}},
      {"barrier of the domain alone",
       [&] {
         const OpDescriptor d;
         group.engine.domain().next_half();
         group.engine.domain().barrier(d, Deadline(kLong));
       },
       {}},
      {"operation barrier: descriptors compared, context, deadline",
       [&] { group.execute(meet, ++sequence, kLong); },
       {}},
      {"operation all_reduce",
       [&] { group.execute(reduce, ++sequence, kLong); },
       {}},
      {"operation all_reduce in a turn of the executor",
       [&] {
         const Executor::Turn turn(executor);
         group.execute(reduce, ++sequence, kLong);
       },
       {}},
  };
  for (int round = 0; round < kRounds; ++round) {
    for (Layer& layer : layers) {
      group.execute(meet, ++sequence, kLong);
      const auto start = Clock::now();
      for (int i = 0; i < kBatch; ++i) {
        layer.call();
      }
      layer.micros.push_back(1e6 * seconds_since(start) / kBatch);
    }
  }
  if (rank == 0) {
    for (Layer& layer : layers) {
      std::sort(layer.micros.begin(), layer.micros.end());
      std::printf(
          "%-60s %7.2f us\n",
          layer.name,
          layer.micros[layer.micros.size() / 2]);
    }
    std::fflush(stdout);
  }
  group.engine.execute(meet, ++sequence, kLong);
}

} // namespace
} // namespace fusedpg::test

int main() {
  fusedpg::test::on_processes(fusedpg::test::kRanks, fusedpg::test::measure);
}
