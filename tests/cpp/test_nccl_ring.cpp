// The ring that patches/nccl adds to NCCL, on CPU threads: its order of steps and
// its updates.

#include <functional>

#include "cuda/kernels/ranges.hpp"
#include "cuda_world.hpp"
#include "fusedpg_ring.h"
#include "ring_model.hpp"

namespace fusedpg::test {

namespace {

using fusedpg_ring::Channel;

constexpr Protocol kProtocols[] = {
    Protocol::kSimple,
    Protocol::kLL,
    Protocol::kLL128};
constexpr DType kWires[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// How NCCL would cut `count` elements of every block: one part a channel, the
// first and the last of other lengths.
std::vector<Channel> channels_of(
    size_t count,
    size_t channels,
    size_t grain,
    size_t chunk) {
  std::vector<Channel> all;
  const size_t each = (count / channels + grain - 1) / grain * grain;
  for (size_t begin = 0; begin < count;) {
    const size_t length = all.size() + 1 == channels
        ? count - begin
        : std::min(each, count - begin);
    all.push_back({begin, length, chunk});
    begin += length;
  }
  return all;
}

struct Ring {
  int size;
  DType wire;
  RingShape shape;
  size_t channels;
  std::vector<int> order; // rank -> who is next

  // `order[k]` is the rank at place k of the ring.
  std::vector<int> behind(int rank) const {
    const auto at = static_cast<size_t>(
        std::find(order.begin(), order.end(), rank) - order.begin());
    std::vector<int> all;
    for (size_t k = 0; k < order.size(); ++k) {
      all.push_back(order[(at + k) % order.size()]);
    }
    return all;
  }
  size_t chunk() const {
    return shape.chunk_bytes / dtype_size(wire);
  }
};

// A ring with its ranks in some order, buffers with room for several chunks.
Ring ring_of(int size, DType wire, Protocol protocol, uint32_t seed) {
  std::mt19937 random(seed);
  const bool simple = protocol == Protocol::kSimple;
  const size_t chunk = protocol == Protocol::kLL128 ? 1920 : 2048;
  Ring ring{
      size,
      wire,
      {protocol, chunk, simple ? 2 : 1, simple ? 2 : 1},
      1 + seed % 3,
      {}};
  for (int r = 0; r < size; ++r) {
    ring.order.push_back(r);
  }
  std::shuffle(ring.order.begin(), ring.order.end(), random);
  return ring;
}

// Runs all ranks; body(rank, channel, prims) is one channel of a rank.
struct Sent {
  size_t bytes = 0;
  std::vector<uint64_t> steps; // of each channel; all ranks take as many
};
using Body = std::function<void(int rank, size_t channel, RingPrims& prims)>;
Sent run_ring(
    const Ring& ring,
    size_t channels,
    const std::vector<Array>& inputs,
    const std::vector<Array>& outputs,
    const Body& body) {
  const auto size = static_cast<size_t>(ring.size);
  std::vector<std::unique_ptr<RingFifo>> fifos; // rank * channels + channel
  for (size_t i = 0; i < size * channels; ++i) {
    fifos.push_back(std::make_unique<RingFifo>(ring.shape));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ring.size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto previous = static_cast<size_t>(ring.behind(rank).back());
      for (size_t c = 0; c < channels; ++c) {
        const auto self = static_cast<size_t>(rank);
        RingPrims prims(
            ring.shape,
            ring.wire,
            *fifos[previous * channels + c],
            *fifos[self * channels + c],
            inputs[self].pointer(),
            outputs[self].pointer());
        body(rank, c, prims);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  Sent sent;
  for (size_t c = 0; c < channels; ++c) {
    sent.steps.push_back(fifos[c]->steps());
    for (size_t r = 0; r < size; ++r) {
      const RingFifo& fifo = *fifos[r * channels + c];
      CHECK(fifo.drained());
      CHECK_EQ(fifo.steps(), sent.steps.back());
      sent.bytes += fifo.sent;
    }
  }
  return sent;
}

// What the ring's order of additions gives for the block of `rank`: from the
// next rank round to itself.
Bytes summed(
    const Ring& ring,
    const std::vector<Array>& inputs,
    int rank,
    size_t block) {
  const std::vector<int> order = ring.behind(rank);
  const size_t size = dtype_size(ring.wire);
  const size_t first = static_cast<size_t>(rank) * block;
  const auto of = [&](int r) {
    return inputs[static_cast<size_t>(r)].pointer(first);
  };
  Bytes sum(block * size);
  std::memcpy(sum.data(), of(order[1 % order.size()]), sum.size());
  kernels::ReduceArgs args;
  args.dtype = ring.wire;
  for (size_t k = 2; k <= order.size(); ++k) {
    sum = reference(args, {of(order[k % order.size()]), sum.data()}, block);
  }
  return sum;
}

// The host's count of a proxy's steps for a channel.
uint64_t steps_of(const Ring& ring, size_t count, bool gather) {
  const size_t loops = (count + ring.chunk() - 1) / ring.chunk();
  return (gather ? 2 : 1) * static_cast<uint64_t>(ring.size - 1) * loops *
      static_cast<uint64_t>(ring.shape.steps_of_chunk());
}

struct Training {
  Types types;
  const Variant& variant;
  std::vector<Cut> cuts; // by rank
  std::vector<World> worlds;
  std::vector<Array> inputs, outputs;
  std::vector<TensorScalars> scalars;
  std::vector<std::vector<TensorInfo>> infos;

  Training(
      const Ring& ring,
      const Types& t,
      const Variant& v,
      std::vector<uint64_t> counts)
      : types(t),
        variant(v),
        scalars(scalars_of(v, counts.size())) {
    for (int r = 0; r < ring.size; ++r) {
      cuts.emplace_back(counts, r, ring.size, 2048);
    }
    const size_t all = cuts[0].block * static_cast<size_t>(ring.size);
    for (int r = 0; r < ring.size; ++r) {
      worlds.emplace_back(cuts[0 + static_cast<size_t>(r)], types, 0);
      inputs.emplace_back(ring.wire, all, 0, 100 + static_cast<uint32_t>(r));
      outputs.emplace_back(ring.wire, all, 0, 200 + static_cast<uint32_t>(r));
    }
    for (size_t r = 0; r < worlds.size(); ++r) {
      infos.push_back(worlds[r].infos(cuts[r]));
    }
  }
  size_t block() const {
    return cuts[0].block;
  }
  RingUpdate update(int rank, RingMode mode) const {
    const auto r = static_cast<size_t>(rank);
    RingUpdate ring{};
    ring.update = update_args(variant, types, cuts[r].chunk(infos[r]), scalars);
    ring.update.grads = outputs[r].pointer(r * block());
    ring.update.params_out = outputs[r].pointer(r * block());
    ring.num_pieces = static_cast<uint32_t>(cuts[r].pieces.size());
    ring.mode = mode;
    return ring;
  }
};

// Parameters and gradients of one type, as the ring has them.
std::vector<Types> types_of(DType wire) {
  std::vector<Types> all;
  for (const Types& types : all_types()) {
    if (types.param == wire && types.grad == wire) {
      all.push_back(types);
    }
  }
  return all;
}

void check_training(
    const Ring& ring,
    const Types& types,
    const Variant& variant) {
  Training training(ring, types, variant, {1, 40, 1500, 13001});
  std::vector<World> wanted = training.worlds;
  const std::vector<Channel> channels =
      channels_of(training.block(), ring.channels, 16, ring.chunk());
  const Sent sent = run_ring(
      ring,
      channels.size(),
      training.inputs,
      training.outputs,
      [&](int rank, size_t c, RingPrims& prims) {
        const RingUpdate update = training.update(rank, RingMode::kUpdate);
        const std::vector<int> ranks = ring.behind(rank);
        fusedpg_ring::run<true>(
            prims,
            ranks.data(),
            ring.size,
            training.block(),
            channels[c],
            [&](size_t offset, int count) {
              // Several threads take their parts of a range.
              for (int thread = 0; thread < 3; ++thread) {
                update_range(
                    update,
                    offset,
                    offset + static_cast<size_t>(count),
                    thread,
                    3);
              }
            });
      });
  for (size_t c = 0; c < channels.size(); ++c) {
    CHECK_EQ(sent.steps[c], steps_of(ring, channels[c].count, true));
  }
  const size_t size = dtype_size(ring.wire);
  const auto ranks = static_cast<size_t>(ring.size);
  CHECK_EQ(sent.bytes, 2 * (ranks - 1) * ranks * training.block() * size);
  for (size_t r = 0; r < ranks; ++r) {
    const Cut& cut = training.cuts[r];
    World& world = wanted[r];
    Bytes part =
        summed(ring, training.inputs, static_cast<int>(r), training.block());
    std::memcpy(world.grads.pointer(), part.data(), part.size());
    update_on_cpu(
        cut, types, variant, training.scalars, false, true, true, world);
    for (const ShardPiece& piece : cut.pieces) {
      std::memcpy(
          part.data() + piece.wire * size,
          world.params_out.pointer(piece.wire),
          cut.valid(piece) * size);
    }
    for (const Array& output : training.outputs) {
      CHECK(
          std::memcmp(
              output.pointer(r * training.block()), part.data(), part.size()) ==
          0);
    }
    for (size_t t = 0; t < cut.counts.size(); ++t) {
      const World::Tensor& mine = training.worlds[r].tensors[t];
      const World::Tensor& other = world.tensors[t];
      CHECK(mine.param.bytes() == other.param.bytes());
      CHECK(mine.master.bytes() == other.master.bytes());
      for (int k = 0; k < 3; ++k) {
        CHECK(mine.state[k].bytes() == other.state[k].bytes());
      }
    }
  }
}

} // namespace

TEST(nccl_ring_updates) {
  uint32_t seed = 0;
  for (int size = 2; size <= (kSanitized ? 4 : 8); ++size) {
    for (const Protocol protocol : kProtocols) {
      for (const DType wire : kWires) {
        if (kOnlyThreads && (size != 3 || wire != DType::kBFloat16)) {
          continue;
        }
        const Ring ring = ring_of(size, wire, protocol, ++seed);
        const std::vector<Types> types = types_of(wire);
        const std::vector<Variant> variants = all_variants();
        // In turn: all of them with all sizes would take minutes.
        for (size_t k = 0; k < 2; ++k) {
          const Variant& variant = variants[(2 * seed + k) % variants.size()];
          if (variant.formula != Formula::kLamb) {
            check_training(ring, types[(seed + k) % types.size()], variant);
          }
        }
      }
    }
  }
}

// LAMB's first half: moments, and sums by channel and piece. Nothing is
// gathered.
TEST(nccl_ring_lamb_moments) {
  const Variant lamb = [] {
    for (const Variant& v : all_variants()) {
      if (v.formula == Formula::kLamb) {
        return v;
      }
    }
    return Variant{};
  }();
  uint32_t seed = 50;
  for (const Protocol protocol : kProtocols) {
    for (const DType wire : kWires) {
      const Ring ring = ring_of(3, wire, protocol, ++seed);
      const Types types = types_of(wire)[0];
      Training training(ring, types, lamb, {1, 40, 1500, 13001});
      std::vector<World> wanted = training.worlds;
      const std::vector<Channel> channels =
          channels_of(training.block(), ring.channels, 16, ring.chunk());
      const size_t pieces = training.cuts[0].pieces.size();
      std::vector<std::vector<double>> sums(
          3, std::vector<double>(pieces * kRingChannels * 2));
      const Sent sent = run_ring(
          ring,
          channels.size(),
          training.inputs,
          training.outputs,
          [&](int rank, size_t c, RingPrims& prims) {
            RingUpdate update = training.update(rank, RingMode::kMoments);
            update.sums = sums[static_cast<size_t>(rank)].data();
            const std::vector<int> ranks = ring.behind(rank);
            fusedpg_ring::run<false>(
                prims,
                ranks.data(),
                ring.size,
                training.block(),
                channels[c],
                [&](size_t offset, int count) {
                  moments_range(
                      update,
                      static_cast<int>(c),
                      offset,
                      offset + static_cast<size_t>(count),
                      0,
                      1,
                      [](const Sums& all) { return all; });
                });
          });
      for (size_t c = 0; c < channels.size(); ++c) {
        CHECK_EQ(sent.steps[c], steps_of(ring, channels[c].count, false));
      }
      for (size_t r = 0; r < 3; ++r) {
        const Cut& cut = training.cuts[r];
        const Bytes part = summed(
            ring, training.inputs, static_cast<int>(r), training.block());
        std::memcpy(wanted[r].grads.pointer(), part.data(), part.size());
        const std::vector<double> exact = update_on_cpu(
            cut, types, lamb, training.scalars, true, true, false, wanted[r]);
        std::vector<double> found(exact.size());
        for (size_t i = 0; i < sums[r].size(); ++i) {
          const size_t piece = i / 2 / kRingChannels;
          found[2 * cut.pieces[piece].tensor + i % 2] += sums[r][i];
        }
        for (size_t i = 0; i < exact.size(); ++i) {
          CHECK(std::fabs(found[i] - exact[i]) <= 1e-12 * exact[i]);
        }
        for (size_t t = 0; t < cut.counts.size(); ++t) {
          for (int k = 0; k < 2; ++k) {
            CHECK(
                training.worlds[r].tensors[t].state[k].bytes() ==
                wanted[r].tensors[t].state[k].bytes());
          }
        }
      }
    }
  }
}

} // namespace fusedpg::test
