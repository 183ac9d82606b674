// All-reduces of the CUDA engine that skip blocks of zeros, on the fake.

#include <algorithm>
#include <bit>
#include <random>

#include "base/ownership.hpp"
#include "collective_cases.hpp"
#include "cuda/kernels/blocks.hpp"
#include "cuda_cases.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

namespace {

struct SparseCase {
  DType dtype;
  size_t count;
  size_t block;
  size_t percent; // of blocks
  bool mean = false;
};

std::vector<DType> dtypes() {
  if (kOnlyThreads) {
    return {DType::kBFloat16};
  }
  return {
      DType::kFloat32,
      DType::kFloat64,
      DType::kBFloat16,
      DType::kFloat16,
      DType::kInt32,
      DType::kInt64};
}

Bytes contribution(const SparseCase& c, int rank) {
  return values_in_blocks(
      c.dtype, c.count, c.count + c.block + rank, c.block, c.percent);
}

CudaEngine::SkipCall call_of(const SparseCase& c, const GpuBuffer& data) {
  CudaEngine::SkipCall call;
  call.data = data.data();
  call.count = c.count;
  call.dtype = c.dtype;
  call.mean = c.mean;
  call.block = c.block;
  return call;
}

// That some of these have.
uint64_t count_blocks(const SparseCase& c, const std::vector<Bytes>& all) {
  const size_t bytes = c.block * dtype_size(c.dtype);
  uint64_t found = 0;
  for (size_t begin = 0; begin < all[0].size(); begin += bytes) {
    const size_t end = std::min(all[0].size(), begin + bytes);
    found += std::any_of(all.begin(), all.end(), [&](const Bytes& x) {
      return std::any_of(
          x.begin() + begin, x.begin() + end, [](uint8_t v) { return v != 0; });
    });
  }
  return found;
}

uint64_t union_blocks(const SparseCase& c, int size) {
  std::vector<Bytes> all;
  for (int p = 0; p < size; ++p) {
    all.push_back(contribution(c, p));
  }
  return count_blocks(c, all);
}

// As NCCL (and the fake) does it: rounded to the type at each step.
Bytes summed(const SparseCase& c, int size) {
  Bytes sum = contribution(c, 0);
  for (int p = 1; p < size; ++p) {
    const Bytes more = contribution(c, p);
    ReduceArgs args = sum_of(c.dtype);
    sum = reference(args, {sum.data(), more.data()}, c.count);
  }
  return sum;
}

void check_sparse(GpuRank& r, const SparseCase& c) {
  GpuBuffer data(c.count * dtype_size(c.dtype));
  data.assign(contribution(c, r.rank));
  const CudaEngine::SkipCall call = call_of(c, data);
  const CudaEngine::SkipFind find = r.engine.find_blocks(call, r.from());
  const auto [found, present] = r.engine.found_blocks(find);
  CHECK_EQ(found, union_blocks(c, r.size));
  CHECK_EQ(present, count_blocks(c, {contribution(c, r.rank)}));
  finish(r.engine.reduce_blocks(call, r.from(), find, found));
  CHECK(data.holds(summed(c, r.size)));
  // The dense way, from the same engine.
  data.assign(contribution(c, r.rank));
  finish(r.engine.reduce_all(call, r.from()));
  CHECK(data.holds(summed(c, r.size)));
}

// The contract of the CPU engine: a left fold, rounded once.
Bytes folded(const SparseCase& c, int size) {
  std::vector<Bytes> all;
  std::vector<const void*> pointers;
  for (int p = 0; p < size; ++p) {
    all.push_back(contribution(c, p));
    pointers.push_back(all.back().data());
  }
  ReduceArgs args = sum_of(c.dtype);
  args.op = c.mean ? RedOp::kAvg : RedOp::kSum;
  args.divisor = size;
  return reference(args, pointers, c.count);
}

// Somewhere else on each rank.
GpuBuffer in_arena(GpuRank& r, const SparseCase& c, size_t shift = 0) {
  char* place = static_cast<char*>(r.engine.arena()) + 4096 * (r.rank + 1);
  return GpuBuffer(
      c.count * dtype_size(c.dtype), place + shift * dtype_size(c.dtype));
}

void check_direct(GpuRank& r, const SparseCase& c, size_t shift = 0) {
  const GpuBuffer data = in_arena(r, c, shift);
  data.assign(contribution(c, r.rank));
  const CudaEngine::SkipCall call = call_of(c, data);
  if (!CHECK(r.engine.can_sum_directly(call))) {
    return;
  }
  const CudaEngine::DirectSum sum = r.engine.direct_sum(call, r.from());
  const DirectCounts counts = r.engine.counts_of(sum);
  finish(sum.operation);
  CHECK(data.holds(folded(c, r.size)));
  CHECK_EQ(counts.blocks_union, union_blocks(c, r.size));
  CHECK_EQ(counts.blocks_present, count_blocks(c, {contribution(c, r.rank)}));
  const auto count = static_cast<int64_t>(c.count);
  if (c.percent == 100 && shard_size(count, r.size) * r.size == count) {
    const auto moved = c.count * 2 * (r.size - 1) / r.size;
    CHECK_EQ(counts.sent, moved);
    CHECK_EQ(counts.received, moved);
  }
}

} // namespace

TEST(cuda_skip_all_reduce) {
  const Clean clean;
  for (const int size : {1, 2, 3}) {
    with_gpus(size, [](GpuRank& r) {
      hooks().set_delay(0);
      for (const DType dtype : dtypes()) {
        for (const size_t count : {1, 31, 5000}) {
          for (const size_t percent : {0, 10, 100}) {
            check_sparse(r, {dtype, count, 32, percent});
            check_sparse(r, {dtype, count, 100, percent});
          }
        }
      }
    });
  }
  CHECK_EQ(hooks().now().mismatches, 0u);
  CHECK_EQ(hooks().now().bad_handles, 0u);
  CHECK_EQ(hooks().now().freed_written, 0u);
}

TEST(cuda_skip_directly) {
  const Clean clean;
  for (int size = 2; size <= (kOnlyThreads ? 3 : 4); ++size) {
    with_gpus(
        size,
        [](GpuRank& r) {
          hooks().set_delay(0);
          for (const DType dtype : dtypes()) {
            // Elsewhere every type with every size; here each of both.
            if (kSanitized && r.size != 2 && dtype != DType::kBFloat16) {
              continue;
            }
            for (const size_t count : {1, 31, 5000, 12288}) {
              for (const size_t percent : {0, 10, 100}) {
                check_direct(r, {dtype, count, 32, percent});
                check_direct(r, {dtype, count, 100, percent, true}, 1);
              }
            }
          }
        },
        with_arena());
  }
  CHECK_EQ(hooks().now().mismatches, 0u);
  CHECK_EQ(hooks().now().bad_handles, 0u);
}

// A graph looks for the blocks whenever it is launched.
TEST(cuda_skip_directly_in_graphs) {
  const Clean clean;
  with_gpus(
      2,
      [](GpuRank& r) {
        SparseCase c{DType::kFloat32, 5000, 64, 20};
        const GpuBuffer data = in_arena(r, c);
        CHECK_EQ(hooks().begin_capture(r.stream), 0);
        const OperationPtr operation =
            r.engine.direct_sum(call_of(c, data), r.from()).operation;
        r.engine.wait(*operation, r.stream);
        void* graph = nullptr;
        CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
        for (const size_t percent : {50, 0, 3}) {
          c.percent = percent;
          data.assign(contribution(c, r.rank));
          r.meet(formatted("filled{}", percent));
          CHECK_EQ(hooks().launch(graph, r.stream), 0);
          CHECK_EQ(gpu().stream_synchronize(r.stream), 0);
          CHECK(data.holds(folded(c, r.size)));
          r.meet(formatted("checked{}", percent));
        }
        CHECK_EQ(hooks().destroy_graph(graph), 0);
      },
      with_arena());
}

TEST(cuda_skip_not_directly) {
  const Clean clean;
  with_gpus(
      2,
      [](GpuRank& r) {
        const GpuBuffer outside(4000);
        CHECK(!r.engine.can_sum_directly(
            call_of({DType::kFloat32, 1000, 32, 0}, outside)));
        CudaEngine::SkipCall call;
        call.data = r.engine.arena();
        CHECK(!r.engine.can_sum_directly(call)); // nothing to sum
        call.count = kArena / 4;
        call.block = 32;
        CHECK(r.engine.can_sum_directly(call));
        call.count += r.engine.arena_bytes() / 4 - call.count + 1;
        CHECK(!r.engine.can_sum_directly(call)); // reaches beyond it
      },
      with_arena());
  // One rank's tensor lies elsewhere.
  on_threads(2, [](int rank, Store& store) {
    GpuRank r(rank, 2, store, with_arena());
    const SparseCase c{DType::kFloat32, 1000, 32, 20};
    const GpuBuffer data = rank == 0 ? in_arena(r, c) : GpuBuffer(4000);
    data.assign(contribution(c, rank));
    const char* way = "blocks of 32) over the arenas";
    const char* what = rank == 0 ? "stock there" : "stock here";
    expect_error(ErrorKind::kMismatch, {"ranks disagree", way, what}, [&] {
      const CudaEngine::SkipCall one = call_of(c, data);
      if (r.engine.can_sum_directly(one)) {
        r.engine.counts_of(r.engine.direct_sum(one, r.from()));
      } else {
        r.engine.found_blocks(r.engine.find_blocks(one, r.from()));
      }
    });
    CHECK(data.holds(contribution(c, rank)));
    r.meet("end");
  });
}

// Slots and wires are reused while operations are under way.
TEST(cuda_skip_many_under_way) {
  const Clean clean;
  with_gpus(2, [](GpuRank& r) {
    std::vector<GpuBuffer> data;
    std::vector<SparseCase> cases;
    std::vector<OperationPtr> operations;
    for (size_t i = 0; i < 8; ++i) {
      cases.push_back({DType::kFloat32, 3000 + 100 * i, 64, 20});
      data.emplace_back(cases[i].count * 4);
      data[i].assign(contribution(cases[i], r.rank));
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      const CudaEngine::SkipCall call = call_of(cases[i], data[i]);
      const CudaEngine::SkipFind find = r.engine.find_blocks(call, r.from());
      operations.push_back(r.engine.reduce_blocks(
          call, r.from(), find, r.engine.found_blocks(find).blocks_union));
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      finish(operations[i]);
      CHECK(data[i].holds(summed(cases[i], r.size)));
    }
  });
}

TEST(cuda_skip_disagreements) {
  const Clean clean;
  on_threads(2, [](int rank, Store& store) {
    int turn = 0;
    for (const SparseCase& other :
         {SparseCase{DType::kFloat32, 5000, 64, 20},
          SparseCase{DType::kFloat64, 5000, 32, 20},
          SparseCase{DType::kFloat32, 6000, 32, 20},
          SparseCase{DType::kFloat32, 5000, 32, 20, true}}) {
      EngineWith with;
      with.name = formatted("sparse{}/", turn++);
      GpuRank r(rank, 2, store, with);
      const SparseCase c =
          rank == 1 ? other : SparseCase{DType::kFloat32, 5000, 32, 20};
      GpuBuffer data(c.count * dtype_size(c.dtype));
      const Bytes before = contribution(c, rank);
      data.assign(before);
      expect_error(
          ErrorKind::kMismatch,
          {"ranks disagree", "sparse_all_reduce(SUM, float32, 5000 elements"},
          [&] {
            r.engine.found_blocks(
                r.engine.find_blocks(call_of(c, data), r.from()));
          });
      CHECK(data.holds(before));
      r.meet(formatted("end{}", turn));
    }
  });
}

TEST(cuda_skip_not_in_graphs) {
  const Clean clean;
  with_gpus(1, [](GpuRank& r) {
    const SparseCase c{DType::kFloat32, 5000, 64, 20};
    GpuBuffer data(c.count * 4);
    data.assign(contribution(c, 0));
    CHECK_EQ(hooks().begin_capture(r.stream), 0);
    expect_error(ErrorKind::kInvalid, {"CUDA graph"}, [&] {
      r.engine.find_blocks(call_of(c, data), r.from());
    });
    void* graph = nullptr;
    CHECK_EQ(hooks().end_capture(r.stream, &graph), 0);
    CHECK_EQ(hooks().destroy_graph(graph), 0);
    CHECK(!r.engine.failed());
    check_sparse(r, c);
  });
}

// Which blocks of the owners' tiles a step has to read, by the lanes of a warp.
TEST(cuda_skip_tile_bits) {
  std::mt19937 random(5);
  for (int turn = 0; turn < 100; ++turn) {
    const int size = 1 + static_cast<int>(random() % 4);
    const size_t count = 1 + random() % 40000;
    const size_t offset = random() % 3; // not aligned
    std::vector<float> memory(count + offset);
    float* grad = memory.data() + offset;
    for (size_t k = random() % 30; k > 0; --k) {
      grad[random() % count] = random() % 2 == 0 ? -0.0F : 1.0F;
    }
    const Layout layout = make_layout({count}, size, 8192, ~size_t(0));
    TensorInfo info{};
    info.grad = grad;
    info.count = count;
    info.shard =
        static_cast<uint64_t>(shard_size(static_cast<int64_t>(count), size));
    UpdateArgs args{};
    args.grad_type = DType::kFloat32;
    args.chunk.tensors = &info;
    args.chunk.pieces = layout.pieces.data();
    args.chunk.tiles = layout.tiles.data();
    for (uint32_t tile = 0; tile < layout.tiles.size(); ++tile) {
      for (int owner = 0; owner < size; ++owner) {
        const auto span = span_of(args.chunk, tile);
        uint32_t wanted = 0;
        for (uint32_t i = 0; i < span.count(owner); ++i) {
          if (std::bit_cast<uint32_t>(grad[span.first(owner) + i]) != 0) {
            wanted |= uint32_t{1} << (i / kSkipBlock);
          }
        }
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; ++lane) {
          bits |= tile_bits(args, tile, owner, lane, 32);
        }
        CHECK_EQ(bits, wanted);
        CHECK_EQ(tile_bits(args, tile, owner, 0, 1), wanted);
      }
    }
  }
}

TEST(cuda_skip_kernels) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  std::mt19937 random(3);
  for (int turn = 0; turn < 200; ++turn) {
    const size_t block = 32 + random() % 100;
    const size_t count = 1 + random() % 5000;
    const size_t offset = random() % 3; // not aligned
    const size_t blocks = (count + block - 1) / block;
    std::vector<float> memory(count + offset);
    for (size_t k = random() % 10; k > 0; --k) {
      memory[offset + random() % count] = random() % 2 == 0 ? -0.0F : 1.0F;
    }
    float* data = memory.data() + offset;
    const TensorBlocks tensor{data, count, block, DType::kFloat32};
    std::vector<uint8_t> flags(blocks, 7);
    uint64_t present = 1;
    fake_gpu::run(
        &CudaApi::find_blocks, {tensor, blocks, flags.data(), &present});
    std::vector<uint32_t> wanted;
    for (size_t b = 0; b < blocks; ++b) {
      bool any = false;
      for (size_t i = b * block; i < std::min(count, (b + 1) * block); ++i) {
        any = any || std::bit_cast<uint32_t>(data[i]) != 0;
      }
      CHECK_EQ(int(flags[b]), int(any));
      if (any) {
        wanted.push_back(static_cast<uint32_t>(b));
      }
    }
    std::vector<uint32_t> list(blocks + 1, 99);
    uint64_t counts[2] = {};
    fake_gpu::run(
        &CudaApi::list_blocks,
        {flags.data(), blocks, list.data(), &present, counts});
    const uint64_t found = counts[0];
    CHECK_EQ(found, wanted.size());
    CHECK_EQ(counts[1], found + 1);
    list.resize(found);
    CHECK(list == wanted);
    // There and back; the places of short blocks are filled up.
    std::vector<float> wire(found * block, 5);
    const std::vector<float> before = memory;
    const auto items = static_cast<uint32_t>(found);
    fake_gpu::run(
        &CudaApi::move_blocks, {tensor, list.data(), wire.data(), items, true});
    std::fill(memory.begin(), memory.end(), 0.0F);
    fake_gpu::run(
        &CudaApi::move_blocks,
        {tensor, list.data(), wire.data(), items, false});
    CHECK(std::memcmp(memory.data(), before.data(), 4 * memory.size()) == 0);
    const size_t tail = blocks * block - count;
    if (found != 0 && list.back() == blocks - 1) {
      CHECK(
          std::all_of(
              wire.end() - static_cast<ptrdiff_t>(tail),
              wire.end(),
              [](float x) { return std::bit_cast<uint32_t>(x) == 0; }));
    }
  }
}

} // namespace fusedpg::test
