// Operations that only move data, on pretended hosts: messages go through a
// table in memory, what ranks of one host share through shared memory.

#include "collectives/hosts_way.hpp"
#include "collectives/selector.hpp"
#include "net_wire.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr DType kU8 = DType::kUInt8;

using Hosts = std::vector<std::vector<int>>;

std::vector<Hosts> arrangements() {
  std::vector<Hosts> all{{{0, 1}, {2}}, {{0, 2}, {1, 3}}};
  if (!kSanitized) {
    all.insert(
        all.end(),
        {{{0}, {1}},
         {{0}, {1}, {2}},
         {{0}, {1, 2}},
         {{0, 1}, {2, 3}},
         {{0, 3, 4}, {1}, {2, 5}}});
  }
  return all;
}

int ranks_of(const Hosts& hosts) {
  size_t sum = 0;
  for (const auto& ranks : hosts) {
    sum += ranks.size();
  }
  return static_cast<int>(sum);
}

// One rank's operations.
struct Rank {
  const HostMap& map;
  NetContext& ctx;
  Transport& transport;
  const int rank;
  const int size;

  HostsWay next() {
    ++ctx.sequence;
    ctx.moved = {};
    return HostsWay(ctx);
  }
};

void on_hosts_of(
    const Hosts& hosts,
    const std::function<void(Rank&)>& body,
    bool drained = true) {
  Wire wire;
  const int size = ranks_of(hosts);
  on_threads(size, [&](int rank, Store& store) {
    const HostMap map(hosts);
    Settings settings = test_settings();
    settings.host_id = formatted("host {}", map.host(rank));
    Bootstrap bootstrap(rank, size, settings);
    bootstrap.meet(store, Deadline(kLong));
    std::unique_ptr<Domain> domain;
    if (map.ranks(map.host(rank)).size() > 1) {
      domain = std::make_unique<Domain>(
          rank, bootstrap, settings, Deadline(kLong), net_stage_bytes(size));
    }
    WireTransport transport(wire, rank, size);
    Pool pool(1);
    SkipState skip;
    Stats stats;
    NetContext ctx = net_context(transport, pool, skip, stats, map);
    ctx.domain = domain.get();
    Rank me{map, ctx, transport, rank, size};
    body(me);
    store.meet("end", size);
  });
  if (drained) {
    CHECK_EQ(wire.left(), size_t{0});
  }
}

Span span(const Bytes& b) {
  return {const_cast<uint8_t*>(b.data()), b.size()};
}

std::vector<size_t> sizes() {
  const size_t large = (size_t(2) << 20) + 513;
  return kSanitized ? std::vector<size_t>{0, 33, 700001}
                    : std::vector<size_t>{0, 1, 1000, 32768, 32769, large};
}

TEST(moves_between_hosts_gather_from_all) {
  for (const Hosts& hosts : arrangements()) {
    on_hosts_of(hosts, [&](Rank& r) {
      for (const size_t most : sizes()) {
        for (const bool even : {true, false}) {
          std::vector<Bytes> want, got;
          std::vector<Span> outputs;
          for (int p = 0; p < r.size; ++p) {
            const size_t n = even ? most : most * p / r.size;
            want.push_back(values(kU8, n, most + p));
            got.emplace_back(n, uint8_t{0x5a});
          }
          for (Bytes& b : got) {
            outputs.push_back(span(b));
          }
          HostsWay way = r.next();
          all_gather(way, outputs, span(want[r.rank]), kU8);
          CHECK(got == want);
        }
      }
    });
  }
}

TEST(moves_between_hosts_broadcast) {
  for (const Hosts& hosts : arrangements()) {
    on_hosts_of(hosts, [&](Rank& r) {
      for (const size_t n : sizes()) {
        for (int root = 0; root < r.size; ++root) {
          const Bytes want = values(kU8, n, n + root);
          Bytes mine = r.rank == root ? want : Bytes(n, uint8_t{0x5a});
          HostsWay way = r.next();
          broadcast(way, span(mine), kU8, root);
          CHECK(mine == want);
        }
      }
    });
  }
}

TEST(moves_between_hosts_to_and_from_a_root) {
  for (const Hosts& hosts : arrangements()) {
    on_hosts_of(hosts, [&](Rank& r) {
      for (const size_t n : sizes()) {
        for (int root = 0; root < r.size; ++root) {
          std::vector<Bytes> all, got;
          std::vector<Span> given, outputs;
          for (int p = 0; p < r.size; ++p) {
            all.push_back(values(kU8, n, n + 100 * root + p));
            got.emplace_back(n, uint8_t{0x5a});
          }
          for (int p = 0; p < r.size && r.rank == root; ++p) {
            given.push_back(span(all[p]));
            outputs.push_back(span(got[p]));
          }
          HostsWay in = r.next();
          gather(in, outputs, span(all[r.rank]), kU8, root);
          CHECK(r.rank != root || got == all);
          Bytes mine(n, uint8_t{0x5a});
          HostsWay out = r.next();
          scatter(out, span(mine), given, kU8, root);
          CHECK(mine == all[r.rank]);
        }
      }
    });
  }
}

TEST(moves_between_hosts_from_all_to_all) {
  for (const Hosts& hosts : arrangements()) {
    on_hosts_of(hosts, [&](Rank& r) {
      for (const size_t most : sizes()) {
        for (const bool even : {true, false}) {
          const auto data = [&](int from, int to) {
            const size_t n = even ? most : most * ((from + 2 * to) % 3) / 2;
            return values(kU8, n, most + 10 * from + to);
          };
          std::vector<Bytes> give, want, got;
          std::vector<Span> inputs, outputs;
          for (int p = 0; p < r.size; ++p) {
            give.push_back(data(r.rank, p));
            want.push_back(data(p, r.rank));
            got.emplace_back(want[p].size(), uint8_t{0x5a});
          }
          for (int p = 0; p < r.size; ++p) {
            inputs.push_back(span(give[p]));
            outputs.push_back(span(got[p]));
          }
          HostsWay way = r.next();
          all_to_all(way, outputs, inputs, kU8);
          CHECK(got == want);
        }
      }
    });
  }
}

// Some ranks have some tensors in their arenas, and change what they have given
// as soon as an operation has returned.
TEST(moves_between_hosts_in_arenas) {
  const std::vector<Hosts> shared{{{0, 2}, {1, 3}}, {{0, 1, 2}, {3, 4}}};
  const size_t most = kSanitized ? 300001 : (size_t(1) << 20) + 513;
  for (const Hosts& hosts : shared) {
    on_hosts_of(hosts, [&](Rank& r) {
      for (uint64_t round = 0; round < (kSanitized ? 3 : 12); ++round) {
        const auto buffer = [&](size_t n, uint64_t which) {
          const uint64_t seed = round * 1000 + r.rank * 20 + which;
          return PlacedMemory(*r.ctx.domain, n, mixed(seed) % 2 == 0);
        };
        const auto data = [&](int from, int to) {
          const size_t n = most * ((from + 2 * to + round) % 3) / 2;
          return values(kU8, n, round + 10 * from + to);
        };
        const auto same = [](const PlacedMemory& got, const Bytes& want) {
          return got.bytes() == want.size() &&
              (want.empty() ||
               std::memcmp(got.data(), want.data(), want.size()) == 0);
        };
        std::vector<Bytes> all, wanted;
        std::vector<PlacedMemory> give, got, gathered;
        std::vector<Span> inputs, outputs, whole;
        for (int p = 0; p < r.size; ++p) {
          const Bytes mine = data(r.rank, p);
          wanted.push_back(data(p, r.rank));
          all.push_back(data(p, 7));
          give.push_back(buffer(mine.size(), p));
          give.back().assign(mine.data());
          inputs.push_back({give.back().data(), mine.size()});
          got.push_back(buffer(wanted.back().size(), 6));
          outputs.push_back({got.back().data(), got.back().bytes()});
          gathered.push_back(buffer(all.back().size(), 7 + p % 2));
          whole.push_back({gathered.back().data(), gathered.back().bytes()});
        }
        HostsWay way = r.next();
        all_to_all(way, outputs, inputs, kU8);
        for (const Span& one : inputs) {
          std::fill_n(static_cast<char*>(one.data), one.bytes, 0x77);
        }
        PlacedMemory own = buffer(all[r.rank].size(), 10);
        own.assign(all[r.rank].data());
        HostsWay gather = r.next();
        all_gather(gather, whole, {own.data(), own.bytes()}, kU8);
        std::fill_n(own.data(), own.bytes(), 0x77);
        for (int root = 0; root < r.size; ++root) {
          const Bytes want = values(kU8, most, round + root);
          PlacedMemory tensor = buffer(most, 11 + root);
          if (r.rank == root) {
            tensor.assign(want.data());
          }
          HostsWay spread = r.next();
          broadcast(spread, {tensor.data(), most}, kU8, root);
          CHECK(same(tensor, want));
          std::fill_n(tensor.data(), most, 0x77);
        }
        for (int p = 0; p < r.size; ++p) {
          CHECK(same(got[p], wanted[p]));
          CHECK(same(gathered[p], all[p]));
        }
      }
    });
  }
}

// In place, one after another without a barrier between, large and small.
TEST(moves_between_hosts_follow_each_other) {
  on_hosts_of({{0, 2}, {1, 3}}, [](Rank& r) {
    uint64_t seed = 1;
    for (int round = 0; round < 20; ++round) {
      const size_t n = mixed(round) % (round % 2 == 0 ? 1000 : 900000) + 1;
      std::vector<Bytes> want;
      Bytes whole(n * r.size);
      std::vector<Span> outputs;
      for (int p = 0; p < r.size; ++p) {
        want.push_back(values(kU8, n, ++seed));
        outputs.push_back({whole.data() + p * n, n});
      }
      std::copy_n(want[r.rank].data(), n, whole.data() + r.rank * n);
      HostsWay way = r.next();
      all_gather(way, outputs, outputs[r.rank], kU8);
      for (int p = 0; p < r.size; ++p) {
        CHECK(std::memcmp(whole.data() + p * n, want[p].data(), n) == 0);
      }
      HostsWay meet = r.next();
      barrier(meet);
      Bytes b = r.rank == round % r.size ? want[0] : Bytes(n);
      HostsWay spread = r.next();
      broadcast(spread, span(b), kU8, round % r.size);
      CHECK(b == want[0]);
    }
  });
}

// What crosses a host's link: what all ranks get does once a host.
TEST(moves_between_hosts_cross_a_link_once) {
  constexpr size_t kBytes = size_t(1) << 20;
  std::atomic<uint64_t> gathered{0}, spread{0};
  on_hosts_of({{0, 1}, {2, 3}}, [&](Rank& r) {
    const Bytes mine = values(kU8, kBytes, r.rank);
    std::vector<Bytes> got(r.size, Bytes(kBytes));
    std::vector<Span> outputs;
    for (Bytes& b : got) {
      outputs.push_back(span(b));
    }
    HostsWay way = r.next();
    all_gather(way, outputs, span(mine), kU8);
    gathered += r.ctx.moved.bytes_sent;
    HostsWay next = r.next();
    broadcast(next, span(got[1]), kU8, 1);
    spread += r.ctx.moved.bytes_sent;
  });
  constexpr size_t kWords = 10000; // what they say
  CHECK(gathered >= 4 * kBytes && gathered <= 4 * kBytes + kWords);
  CHECK(spread >= kBytes && spread <= kBytes + kWords);
  // From host to host: the root sends it once as well.
  std::atomic<uint64_t> most{0};
  on_hosts_of({{0}, {1}, {2}}, [&](Rank& r) {
    Bytes b(4 * kBytes);
    HostsWay way = r.next();
    broadcast(way, span(b), kU8, 2);
    uint64_t seen = most;
    while (seen < r.ctx.moved.bytes_sent &&
           !most.compare_exchange_weak(seen, r.ctx.moved.bytes_sent)) {
    }
  });
  CHECK(most >= 4 * kBytes && most <= 4 * kBytes + kWords);
}

// Its peers hear of a failure, and nothing comes into tensors any more.
TEST(moves_between_hosts_absent_rank) {
  on_hosts(
      {{0}, {1}},
      [](int rank, NetContext& ctx) {
        Bytes mine(100000);
        if (rank == 0) {
          HostsWay way(ctx);
          CHECK_THROWS(
              broadcast(way, {mine.data(), mine.size()}, DType::kUInt8, 1),
              Error,
              "no message from rank 1");
          check_told(ctx);
        }
      },
      milliseconds(300));
}

TEST(moves_between_hosts_mismatch_on_all_ranks) {
  using Call = std::function<void(Way&, Bytes&)>;
  const auto gathers = [](size_t in, size_t out) -> Call {
    return [=](Way& way, Bytes& memory) {
      std::vector<Span> outputs;
      for (int p = 0; p < way.size(); ++p) {
        outputs.push_back({memory.data() + p * out, out});
      }
      all_gather(way, outputs, {memory.data(), in}, kU8);
    };
  };
  const auto spreads = [](size_t n, int root, DType type = kU8) -> Call {
    return [=](Way& way, Bytes& memory) {
      broadcast(way, {memory.data(), n}, type, root);
    };
  };
  const Call meets = [](Way& way, Bytes&) { barrier(way); };
  const struct {
    Call all, one;
    std::string says;
  } cases[] = {
      {gathers(100, 100), gathers(50, 100), "50 bytes to rank"},
      {gathers(100000, 100000), gathers(5, 100000), "which expects 100000"},
      {gathers(100, 100), gathers(200, 200), "number of elements"},
      {spreads(100, 0), spreads(400, 0), "number of elements"},
      {spreads(400000, 0), spreads(100, 0), "number of elements"},
      {spreads(100, 0), spreads(100, 1), "root"},
      {spreads(100, 0), spreads(100, 0, DType::kInt8), "dtype"},
      {spreads(100, 0), gathers(100, 100), "operation"},
      {meets, spreads(100000, 0), "operation"},
      {gathers(10, 10), meets, "operation"},
  };
  const Hosts hosts{{0, 2}, {1, 3}};
  on_hosts_of(
      hosts,
      [&](Rank& r) {
        Bytes memory(size_t(1) << 20);
        for (const auto& [all, one, says] : cases) {
          for (const int odd : {0, 3}) {
            HostsWay way = r.next();
            expect_error(ErrorKind::kMismatch, {says}, [&] {
              (r.rank == odd ? one : all)(way, memory);
            });
            // As if nothing had been.
            HostsWay next = r.next();
            const Bytes want = values(kU8, 700000, odd);
            Bytes b = r.rank == 1 ? want : Bytes(want.size());
            broadcast(next, span(b), kU8, 1);
            CHECK(b == want);
          }
        }
        HostsWay way = r.next();
        if (r.rank == 2) {
          net_refuse(r.ctx, "no memory for it");
        } else {
          expect_error(
              ErrorKind::kMismatch,
              {"rank 2 refused", "no memory for it"},
              [&] { gathers(10, 10)(way, memory); });
        }
      },
      /*drained=*/false);
}

} // namespace
