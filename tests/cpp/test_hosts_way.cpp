// Steps in messages have the bits of those in shared memory, and ranks that
// disagree are told in what.

#include "collectives/hosts_way.hpp"

#include <cmath>

#include "fused_cases.hpp"
#include "net_wire.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// Calls body(group, way, context) with ranks that talk over a wire.
template <typename Body>
void with_hosts(const Layout& layout, const Body& body) {
  Wire wire;
  Store store;
  with_group(size_of(layout), 1, [&](Group& g) {
    Neighbours neighbours(g.rank, layout, store);
    WireTransport transport(wire, g.rank, g.size);
    Pool pool(1);
    SkipState skip;
    NetContext ctx =
        net_context(transport, pool, skip, g.stats, neighbours.map());
    ctx.domain = neighbours.domain();
    HostsWay way(ctx);
    body(g, way, ctx);
    store.meet("end", g.size);
  });
  CHECK_EQ(wire.left(), size_t{0});
}

// Gradients that are added host by host.
void add_by_hosts(Training& training, const Layout& layout, DType type) {
  if (!HostMap(layout).shared()) {
    return;
  }
  using Grads = std::vector<Bytes>;
  training.sums = [layout, type](
                      const Grads& grads, const std::vector<double>& share) {
    Grads sums;
    for (const std::vector<int>& ranks : layout) {
      ReduceArgs args = sum_of(type);
      args.wide = true;
      std::vector<double> weights;
      std::vector<const void*> srcs;
      for (const int p : ranks) {
        srcs.push_back(grads[p].data());
        weights.push_back(share.empty() ? 1 : share[p]);
      }
      if (!share.empty()) {
        args.op = RedOp::kPremulSum;
        args.weights = weights.data();
      }
      const size_t count = grads[0].size() / dtype_size(type);
      sums.emplace_back(count * dtype_size(wide_type(type)));
      void* to = sums.back().data();
      kernels::table()->reduce(
          args, &to, 1, srcs.data(), srcs.size(), count, false);
    }
    return sums;
  };
  training.sum = [layout, type](
                     const Grads& grads,
                     bool mean,
                     const std::vector<double>& share) {
    ReduceArgs args = sum_of(type);
    args.divisor = static_cast<int64_t>(grads.size());
    args.reciprocal = true;
    args.weights = share.empty() ? nullptr : share.data();
    args.op = !share.empty() ? RedOp::kPremulSum
        : mean               ? RedOp::kAvg
                             : RedOp::kSum;
    return hosts_reference(
        args, layout, pointers_to(grads), grads[0].size() / dtype_size(type));
  };
}

void train(Group& g, HostsWay& way, NetContext& ctx, const Layout& layout) {
  // Long enough to look for zeros, of some layouts.
  const bool looks = !kSanitized && layout.size() == 2 && g.size != 4;
  const size_t long_one = looks ? 70000 : 9000;
  size_t turn = 0;
  for (const Recipe& r : one_of_each()) {
    for (const StepTypes& types : step_types()) {
      if (!takes(r, types)) {
        continue;
      }
      const size_t kind = turn++;
      ctx.deadline = Deadline(kLong);
      Training training(
          g,
          r,
          types,
          {long_one, 0, 1, 777, 31},
          Place::kOrdinary,
          Place::kOrdinary);
      training.way = &way;
      add_by_hosts(training, layout, types.grad);
      training.call.reduction.mean = kind % 3 != 1;
      if (kind % 3 == 2) {
        training.weights = {3, 1, 0, 2.5, 1};
        training.weights.resize(g.size);
      }
      if (kind % 4 == 1) {
        training.uses = [](int rank, size_t t) { return (rank + t) % 5 != 0; };
      }
      if (kind % 2 == 1) {
        training.call.skip_block = 256; // looks for zeros in the first tensor
      }
      for (int step = 0; step < 2; ++step) {
        if ((kind + step) % 2 == 0) {
          training.step();
        } else {
          training.reduce_and_step();
        }
        training.check();
      }
    }
  }
}

StepCall small_step(float* param, const float* grad, float* step) {
  StepCall call;
  call.op = OpCode::kFusedSgd;
  call.hypers = {recipe(OpCode::kFusedSgd).hyper};
  call.hypers[0].momentum = 0;
  StepTensor t;
  t.param = param;
  t.grad = grad;
  t.step = step;
  t.count = 8;
  call.tensors = {t};
  return call;
}

} // namespace

TEST(hosts_way_trains) {
  for (const Layout& layout : layouts()) {
    with_hosts(layout, [&](Group& g, HostsWay& way, NetContext& ctx) {
      train(g, way, ctx, layout);
    });
  }
}

TEST(hosts_way_names_what_differs) {
  with_hosts({{0}, {1}}, [](Group& g, HostsWay& way, NetContext& ctx) {
    float param[8] = {}, grad[8] = {}, step = 0;
    const auto message = [&](auto change) {
      StepCall call = small_step(param, grad, &step);
      if (g.rank == 1) {
        change(call);
      }
      try {
        fused_step(way, call);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kMismatch);
        return std::string(error.what());
      }
      return std::string();
    };
    CHECK(message([](StepCall&) {}).empty());
    const auto says = [&](const std::string& text, auto change) {
      if (message(change).find(text) == std::string::npos) {
        report_failure(__FILE__, __LINE__, text);
      }
    };
    says("operation fused_", [](StepCall& c) {
      c.op = OpCode::kFusedAdam;
      c.tensors[0].state[0] = c.tensors[0].param;
      c.tensors[0].state[1] = c.tensors[0].param;
    });
    says("number of elements", [](StepCall& c) { c.tensors[0].count = 4; });
    says("scalar arguments", [](StepCall& c) { c.hypers[0].lr = 7; });
    says("sizes or memory layouts", [](StepCall& c) {
      c.tensors[0].layout_hash = 3;
    });
    ctx.list_length = g.rank == 1 ? 3 : 2;
    says("number of tensors in the list", [](StepCall&) {});
    CHECK_EQ(param[0], 0.0F);
  });
}

TEST(hosts_way_finds_nans) {
  with_hosts({{0, 2}, {1}}, [](Group& g, HostsWay& way, NetContext& ctx) {
    ctx.nan_check = true;
    std::vector<float> data(300000, 1);
    data.back() = g.rank == 1 ? NAN : 1.0F;
    expect_error(ErrorKind::kInvalid, {"the input of rank 1 holds a NaN"}, [&] {
      all_reduce(way, {{data.data(), data.size()}}, sum_of());
    });
    CHECK_EQ(data[0], 1.0F);
  });
}

TEST(hosts_way_refuses_what_it_cannot_do) {
  with_hosts({{0, 1}, {2}}, [](Group&, HostsWay& way, NetContext&) {
    char data[64] = {};
    Plan plan;
    plan.src_size = plan.dst_size = 4;
    plan.src_type = DType::kFloat32;
    plan.tensors = {{data, data}};
    plan.lanes = Plan::shards({4}, 3);
    plan.epilogue = [](auto&&...) { CHECK(false); };
    const auto refused = [&](auto change) {
      Plan other = plan;
      change(other);
      try {
        way.run(other, {});
      } catch (const Error& error) {
        return error.kind() == ErrorKind::kInvalid;
      }
      return false;
    };
    CHECK(refused([](Plan& p) { p.src_type = DType::kOpaque; }));
    CHECK(refused([](Plan& p) { p.shared_results = true; }));
    CHECK(refused([](Plan& p) {
      p.skip = SkipOptions{64};
      p.src_type = DType::kInt32;
    }));
    CHECK(refused([](Plan& p) {
      p.skip = SkipOptions{64};
      p.lanes = {{{0, 0, 3}}, {{0, 3, 1}}, {}};
    }));
  });
}

TEST(hosts_way_stops_at_an_infinity) {
  with_hosts({{0, 2}, {1}}, [](Group& g, HostsWay& way, NetContext&) {
    float param[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    float grad[8] = {1}, step = 0, found = g.rank == 1 ? 1.0F : 0.0F;
    StepCall call = small_step(param, grad, &step);
    call.found_inf = &found;
    fused_step(way, call);
    CHECK_EQ(found, 1.0F);
    CHECK_EQ(param[0], 1.0F);
    CHECK_EQ(step, 0.0F);
  });
}
