// Reductions between hosts of one and several ranks, over a transport that is a
// table in memory: bits are those of the documented order.

#include "net_wire.hpp"

#include "base/ownership.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/reduction.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

struct Inputs {
  std::vector<Bytes> all;
  std::vector<const void*> srcs;

  Inputs(DType type, size_t count, uint64_t seed, int size) {
    for (int p = 0; p < size; ++p) {
      all.push_back(values(type, count, seed + static_cast<uint64_t>(p)));
    }
    srcs = pointers_to(all);
  }
};

ReduceArgs args_of(DType type, RedOp op, int size) {
  ReduceArgs args = sum_of(type);
  args.op = op;
  args.divisor = size;
  args.factor = 0.3;
  return args;
}

constexpr DType kTypes[] = {
    DType::kFloat32,
    DType::kFloat64,
    DType::kFloat16,
    DType::kBFloat16,
    DType::kUInt8,
    DType::kInt32,
    DType::kInt64,
    DType::kBool};
constexpr RedOp kOps[] = {
    RedOp::kSum,
    RedOp::kAvg,
    RedOp::kProduct,
    RedOp::kMin,
    RedOp::kMax,
    RedOp::kBxor,
    RedOp::kPremulSum};

void check_all(const Layout& layout, DType type, RedOp op, size_t count) {
  const int size = size_of(layout);
  const ReduceArgs args = args_of(type, op, size);
  const Inputs in(type, count, 10 * count + 1, size);
  const Bytes wanted = hosts_reference(args, layout, in.srcs, count);
  on_hosts(layout, [&](int rank, NetContext& ctx) {
    // Twice, as halves of staging buffers alternate.
    for (int turn = 0; turn < 2; ++turn) {
      Bytes mine = in.all[rank];
      HostsWay way(ctx);
      all_reduce(way, {{mine.data(), count}}, args);
      CHECK(mine == wanted);
    }
    const int root = size - 1;
    Bytes mine = in.all[rank];
    HostsWay way(ctx);
    reduce(way, mine.data(), count, args, root);
    CHECK(mine == (rank == root ? wanted : in.all[rank]));
  });
}

TEST(net_pipeline_all_types_and_operations) {
  for (const Layout& layout : layouts()) {
    for (const DType type : kTypes) {
      for (const RedOp op : kOps) {
        if (reduction_supported(type, op)) {
          check_all(layout, type, op, 1003);
        }
      }
    }
  }
}

// Several segments, and more than are under way.
TEST(net_pipeline_sizes) {
  for (const Layout& layout : layouts()) {
    for (const size_t count :
         {size_t(0), size_t(1), size_t(70001), size_t(1300007)}) {
      if (kSanitized && count > 100000) {
        continue;
      }
      check_all(layout, DType::kFloat32, RedOp::kAvg, count);
      check_all(layout, DType::kBFloat16, RedOp::kSum, count);
    }
  }
  check_all(
      {{0, 2}, {1, 3}},
      DType::kFloat32,
      RedOp::kSum,
      kSanitized ? size_t(2000003) : size_t(6000011));
}

TEST(net_pipeline_scatters) {
  for (const Layout& layout : layouts()) {
    const int size = size_of(layout);
    for (const size_t count : {size_t(5), size_t(20001)}) {
      for (const RedOp op : {RedOp::kSum, RedOp::kPremulSum, RedOp::kMax}) {
        const DType type = count == 5 ? DType::kFloat32 : DType::kFloat16;
        const ReduceArgs args = args_of(type, op, size);
        // The part for rank p has (p + 1) * count elements.
        size_t total = 0;
        std::vector<size_t> begins;
        for (int p = 0; p < size; ++p) {
          begins.push_back(total);
          total += static_cast<size_t>(p + 1) * count;
        }
        const Inputs in(type, total, 77 + count, size);
        const Bytes whole = hosts_reference(args, layout, in.srcs, total);
        const size_t element = dtype_size(type);
        for (const bool adjacent : {true, false}) {
          on_hosts(layout, [&](int rank, NetContext& ctx) {
            Bytes mine = in.all[rank];
            std::vector<Bytes> parts;
            std::vector<Buffer> inputs;
            for (int p = 0; p < size; ++p) {
              const auto* at = mine.data() + begins[p] * element;
              const size_t n = static_cast<size_t>(p + 1) * count;
              parts.emplace_back(at, at + n * element);
            }
            for (int p = 0; p < size; ++p) {
              inputs.push_back(
                  {adjacent ? mine.data() + begins[p] * element
                            : parts[p].data(),
                   static_cast<size_t>(p + 1) * count});
            }
            const size_t n = inputs[rank].count;
            Bytes out(n * element);
            HostsWay way(ctx);
            reduce_scatter(way, {out.data(), n}, inputs, args);
            CHECK(
                std::memcmp(
                    out.data(),
                    whole.data() + begins[rank] * element,
                    out.size()) == 0);
          });
        }
      }
    }
  }
}

// Memory of a rank's arena, or of its own, at an address that is a multiple of
// an element and of no more.
class Placed {
 public:
  Placed(NetContext& ctx, bool in_arena, const Bytes& contents, size_t element)
      : bytes_(contents.size()),
        element_(element) {
    if (in_arena && ctx.domain != nullptr) {
      arena_ = ctx.domain->arena();
      block_ = static_cast<uint8_t*>(arena_->allocate(bytes_ + 2 * element));
    } else {
      own_.resize(bytes_ + 2 * element);
      block_ = own_.data();
    }
    std::memset(block_, kGuard, bytes_ + 2 * element);
    std::copy(contents.begin(), contents.end(), data());
  }
  Placed(const Placed&) = delete;
  ~Placed() {
    for (size_t i = 0; i < element_; ++i) {
      CHECK(block_[i] == kGuard && block_[element_ + bytes_ + i] == kGuard);
    }
    if (arena_) {
      arena_->deallocate(block_);
    }
  }
  uint8_t* data() {
    return block_ + element_;
  }
  bool holds(const Bytes& wanted) {
    return wanted.size() == bytes_ &&
        std::memcmp(data(), wanted.data(), bytes_) == 0;
  }

 private:
  static constexpr uint8_t kGuard = 0x5a;
  const size_t bytes_;
  const size_t element_;
  std::shared_ptr<Arena> arena_;
  Bytes own_;
  uint8_t* block_ = nullptr;
};

// Writes to a rank's staging buffers what no operation of the test writes.
class Untouched {
 public:
  explicit Untouched(Domain* domain) : domain_(domain) {
    each([&](char* stage) { std::memset(stage, kMark, kLook); });
  }
  bool hold() {
    bool same = true;
    each([&](const char* stage) {
      same = same &&
          std::all_of(stage, stage + kLook, [](char c) { return c == kMark; });
    });
    return same;
  }

 private:
  static constexpr char kMark = 0x77;
  static constexpr size_t kLook = 4096;
  template <typename Call>
  void each(const Call& call) {
    for (int half = 0; domain_ != nullptr && half < 2; ++half) {
      // Every lane's segments begin at a multiple of the segment's size.
      const size_t lane = select_net_segment(1, true);
      for (size_t at = 0; at + kLook <= domain_->stage_bytes(); at += lane) {
        call(domain_->stage_in(domain_->rank(), half) + at);
        call(domain_->stage_out(domain_->rank(), half) + at);
      }
    }
  }
  Domain* const domain_;
};

// Whatever ranks have in their arenas: the bits are the same, and what lies
// there is not staged.
TEST(net_pipeline_arenas) {
  for (const Layout& layout : layouts()) {
    const int size = size_of(layout);
    const HostMap map(layout);
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      const size_t count = kSanitized ? 70001 : 300007;
      const size_t element = dtype_size(type);
      const ReduceArgs args = args_of(type, RedOp::kAvg, size);
      const Inputs in(type, count, 31, size);
      const Bytes wanted = hosts_reference(args, layout, in.srcs, count);
      const size_t part = count / static_cast<size_t>(size);
      on_hosts(layout, [&](int rank, NetContext& ctx) {
        if (ctx.domain != nullptr) {
          ctx.domain->prepare();
        }
        for (int arenas = 0; arenas < 1 << size; ++arenas) {
          const auto in_arena = [&](int p) { return (arenas >> p & 1) != 0; };
          const auto& here = map.ranks(map.host(rank));
          const bool all = std::all_of(here.begin(), here.end(), in_arena);
          if (ctx.domain != nullptr) {
            ctx.domain->barrier({}, Deadline(kLong)); // all have read theirs
          }
          Untouched stage(ctx.domain);
          {
            Placed mine(ctx, in_arena(rank), in.all[rank], element);
            HostsWay way(ctx);
            all_reduce(way, {{mine.data(), count}}, args);
            CHECK(mine.holds(wanted));
          }
          {
            const int root = arenas % size;
            Placed mine(ctx, in_arena(rank), in.all[rank], element);
            HostsWay way(ctx);
            reduce(way, mine.data(), count, args, root);
            CHECK(mine.holds(rank == root ? wanted : in.all[rank]));
          }
          {
            // Inputs and outputs in different memory.
            Placed mine(ctx, in_arena(rank), in.all[rank], element);
            Placed out(ctx, !in_arena(rank), Bytes(part * element), element);
            std::vector<Buffer> inputs;
            for (int p = 0; p < size; ++p) {
              inputs.push_back(
                  {mine.data() + static_cast<size_t>(p) * part * element,
                   part});
            }
            HostsWay way(ctx);
            reduce_scatter(way, {out.data(), part}, inputs, args);
            const auto* at = wanted.data() + rank * part * element;
            CHECK(out.holds(Bytes(at, at + part * element)));
          }
          CHECK(ctx.domain == nullptr || stage.hold() == all);
        }
      });
    }
  }
}

// What skips blocks of zeros has the bits of what does not.
TEST(net_pipeline_skips_with_the_same_bits) {
  for (const Layout& layout : layouts()) {
    const int size = size_of(layout);
    for (const DType type :
         {DType::kFloat32, DType::kBFloat16, DType::kInt64}) {
      for (const size_t percent : {0, 20, 100}) {
        const size_t count = 40001, block = 100;
        std::vector<Bytes> all;
        for (int p = 0; p < size; ++p) {
          all.push_back(values_in_blocks(type, count, 5 + p, block, percent));
        }
        ReduceArgs args = sum_of(type);
        args.op = percent == 20 ? RedOp::kAvg : RedOp::kSum;
        args.divisor = size;
        const Bytes wanted =
            hosts_reference(args, layout, pointers_to(all), count);
        on_hosts(layout, [&](int rank, NetContext& ctx) {
          Bytes mine = all[rank];
          HostsWay way(ctx);
          sparse_all_reduce(way, {{mine.data(), count}}, args, {block});
          CHECK(mine == wanted);
          // Some in their arenas.
          Placed placed(ctx, rank % 3 != 1, all[rank], dtype_size(type));
          HostsWay other(ctx);
          sparse_all_reduce(other, {{placed.data(), count}}, args, {block});
          CHECK(placed.holds(wanted));
          mine = all[rank];
          HostsWay dense(ctx);
          all_reduce(dense, {{mine.data(), count}}, args);
          CHECK(mine == wanted);
        });
      }
    }
  }
}

// Every lane crosses the link of every other host once each way.
TEST(net_pipeline_bytes) {
  const Layout layout{{0, 1}, {2, 3}};
  const size_t count = 400000;
  std::atomic<uint64_t> sent{0};
  on_hosts(layout, [&](int, NetContext& ctx) {
    Bytes mine(count * 4, 1);
    HostsWay way(ctx);
    all_reduce(way, {{mine.data(), count}}, sum_of());
    sent += ctx.moved.bytes_sent;
  });
  const double data = 2.0 * count * 4;
  CHECK(double(sent) >= data);
  CHECK(double(sent) <= data * 1.01);
}

// Of blocks of zeros, what nobody on a host has does not leave it, and what
// several have leaves it once.
TEST(net_pipeline_bytes_of_blocks) {
  const Layout layout{{0, 1}, {2, 3}};
  const size_t count = 400000, block = 100;
  const auto has = [](int rank, size_t b) {
    return b % 10 == static_cast<size_t>(rank / 2) || b % 50 == 7;
  };
  std::atomic<uint64_t> sent{0}, received{0};
  on_hosts(layout, [&](int rank, NetContext& ctx) {
    std::vector<float> mine(count);
    for (size_t i = 0; i < count; ++i) {
      mine[i] = has(rank, i / block) ? 1.0F : 0.0F;
    }
    HostsWay way(ctx);
    sparse_all_reduce(way, {{mine.data(), count}}, sum_of(), {block});
    sent += ctx.moved.bytes_sent;
    received += ctx.moved.bytes_received;
    CHECK_EQ(ctx.moved.blocks_present, 480u);
    CHECK_EQ(ctx.moved.blocks_union, 880u);
  });
  CHECK_EQ(sent.load(), received.load());
  // Half of a host's blocks are the other's owners', and all results travel.
  const size_t data = (480 + 880) * block * 4;
  const size_t heads = 4 * 3 * sizeof(OpDescriptor);
  const size_t bitmaps = 4 * (2 + 2) * (count / block / 64 + 2) * 8;
  CHECK(sent >= data);
  CHECK(sent <= data + heads + bitmaps);
}

// A rank alone on its host, and one that shares it, wait for one that does not
// come; and a neighbour of the latter hears of it.
TEST(net_pipeline_absent_rank) {
  for (const int absent : {1, 2}) {
    on_hosts(
        {{0, 1}, {2}},
        [&](int rank, NetContext& ctx) {
          if (rank == absent) {
            return;
          }
          Bytes mine(4000000);
          Plan plan = in_place(
              ctx.kernels, 3, single({mine.data(), mine.size() / 4}), sum_of());
          HostsWay way(ctx);
          try {
            way.run(plan, {});
            CHECK(false);
          } catch (const Error& error) {
            CHECK(
                error.kind() == ErrorKind::kTimeout ||
                error.kind() == ErrorKind::kPeerFailed);
          }
          check_told(ctx);
        },
        milliseconds(300));
  }
}

} // namespace
