// Updates, LAMB's moments and their sums.

#include <cstdlib>
#include <numeric>

#include "check.hpp"
#include "cuda_world.hpp"

namespace fusedpg::test {

TEST(cuda_tiles_update) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  size_t number = 0;
  for (const Cut& cut : all_cuts()) {
    for (const Types& types : all_types()) {
      for (const size_t shift : {0, 1}) {
        const World fresh(cut, types, shift);
        for (const Variant& v : all_variants()) {
          if (kSanitized && number++ % 4 != 0) {
            continue;
          }
          const auto scalars = scalars_of(v, cut.counts.size());
          World wanted = fresh;
          World world = fresh;
          // Gradients from the wire or as slices; to the wire or in place.
          const bool block = shift == 0 || types.masters;
          update_on_cpu(cut, types, v, scalars, false, block, block, wanted);
          const auto infos = world.infos(cut);
          cuda::UpdateArgs args =
              update_args(v, types, cut.chunk(infos), scalars);
          args.grads = block ? world.grads.pointer() : nullptr;
          args.params_out = block ? world.params_out.pointer() : nullptr;
          run(&CudaApi::update, args);
          if (!CHECK(world == wanted)) {
            std::cerr << v.name << ", param " << dtype_name(types.param)
                      << ", grad " << dtype_name(types.grad) << ", state "
                      << dtype_name(types.state) << ", masters "
                      << types.masters << ", shift " << shift << ", rank "
                      << cut.rank << std::endl;
            return;
          }
        }
      }
    }
  }
}

TEST(cuda_tiles_lamb_moments) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  const Variant v = all_variants()[5];
  for (const Cut& cut : all_cuts()) {
    for (const Types& types : all_types()) {
      std::vector<std::vector<double>> found;
      for (const size_t shift : {0, 1}) {
        const auto scalars = scalars_of(v, cut.counts.size());
        World wanted(cut, types, shift);
        World world = wanted;
        const auto sums =
            update_on_cpu(cut, types, v, scalars, true, true, true, wanted);
        const auto infos = world.infos(cut);
        std::vector<double> tile_sums(2 * cut.tiles.size(), -1);
        MomentsArgs args{
            update_args(v, types, cut.chunk(infos), scalars), tile_sums.data()};
        args.update.grads = world.grads.pointer();
        args.update.params_out = world.params_out.pointer();
        run(&CudaApi::lamb_moments, args);
        CHECK(world == wanted);

        // The tiles of a tensor lie in order here.
        std::vector<uint32_t> list;
        std::vector<uint32_t> begin{0};
        for (uint32_t t = 0; t < cut.counts.size(); ++t) {
          for (uint32_t i = 0; i < cut.tiles.size(); ++i) {
            if (cut.pieces[cut.tiles[i].piece].tensor == t) {
              list.push_back(i);
            }
          }
          begin.push_back(static_cast<uint32_t>(list.size()));
        }
        std::vector<double> total(2 * cut.counts.size(), -1);
        run(&CudaApi::add_sums,
            {tile_sums.data(),
             list.data(),
             begin.data(),
             total.data(),
             static_cast<uint32_t>(cut.counts.size()),
             1});
        for (size_t i = 0; i < total.size(); ++i) {
          CHECK(std::fabs(total[i] - sums[i]) <= 1e-13 * sums[i]);
        }
        found.push_back(std::move(total));
      }
      // The order of additions does not depend on addresses.
      CHECK(found[0] == found[1]);
    }
  }
}

TEST(cuda_tiles_sum_of_many_tiles) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  constexpr uint32_t kTiles = 1000;
  std::vector<double> tile_sums;
  std::vector<uint32_t> list;
  long double wanted[2] = {0, 0};
  for (uint32_t i = 0; i < kTiles; ++i) {
    list.push_back(kTiles - 1 - i);
    tile_sums.push_back(1.0 / (i + 1));
    tile_sums.push_back(std::sqrt(i));
    wanted[0] += tile_sums[2 * i];
    wanted[1] += tile_sums[2 * i + 1];
  }
  const auto check = [&](uint32_t pairs) {
    const uint32_t begin[] = {0, 0, kTiles / pairs};
    const uint32_t* parts = list.data() + kTiles - kTiles / pairs;
    double sums[4] = {-1, -1, -1, -1};
    run(&CudaApi::add_sums, {tile_sums.data(), parts, begin, sums, 2, pairs});
    CHECK(sums[0] == 0 && sums[1] == 0);
    for (int k = 0; k < 2; ++k) {
      CHECK(std::fabs(sums[2 + k] - double(wanted[k])) <= 1e-13 * sums[2 + k]);
    }
  };
  check(1);
  check(8); // the last of `list` are 124 ... 0
}

// Kernels that stride over their items have as many blocks as the device holds
// at once, which is asked once for each kernel and device.
TEST(cuda_tiles_blocks_that_fit) {
  const Clean clean("FUSEDPG_FAKE_DELAY_US", "0");
  struct Device {
    int number;
    const char* sms;
    const char* on_each;
    uint32_t most;
  };
  const auto launched = [](uint32_t blocks) {
    return fake_gpu::hooks().calls(
        (std::to_string(blocks) + " blocks").c_str());
  };
  // No other test has asked these.
  for (const Device& device :
       {Device{4, "1", "1", 1},
        Device{5, "1", "3", 3},
        Device{6, "1", "8", 8},
        Device{7, "4", "3", 12}}) {
    setenv("FUSEDPG_FAKE_SMS", device.sms, 1);
    setenv("FUSEDPG_FAKE_OCCUPANCY", device.on_each, 1);
    fake_gpu::hooks().reset();
    CHECK_EQ(fake_gpu::gpu().set_device(device.number), 0);
    const auto add = [&](uint32_t tensors) {
      std::vector<uint32_t> list(tensors + 1);
      std::iota(list.begin(), list.end(), 0);
      std::vector<double> partial(2 * tensors);
      std::iota(partial.begin(), partial.end(), 1);
      std::vector<double> sums(2 * tensors, -1);
      run(&CudaApi::add_sums,
          {partial.data(), list.data(), list.data(), sums.data(), tensors, 1});
      CHECK(sums == partial);
    };
    add(20);
    CHECK_EQ(launched(device.most), 1u);
    add(1);
    CHECK_EQ(launched(1), device.most == 1 ? 2u : 1u);
    CHECK_EQ(fake_gpu::hooks().calls("occupancy"), 1u);
    // A tile of each of 20 owners.
    std::vector<float> data(20 * kShardAlignment);
    std::iota(data.begin(), data.end(), 0);
    std::vector<float> wire(data.size(), -1);
    TensorInfo info{};
    info.grad = data.data();
    info.count = data.size();
    info.shard = kShardAlignment;
    const ShardPiece piece{0, 0, 0, kShardAlignment, 0};
    const Tile tile{0, 0};
    PackArgs pack{};
    pack.chunk = {&info, &piece, &tile, 1, 0, 20, 0, kShardAlignment};
    pack.wire = wire.data();
    pack.type = DType::kFloat32;
    pack.weight = 1;
    run(&CudaApi::pack, pack);
    CHECK(wire == data);
    CHECK_EQ(launched(device.most), device.most == 1 ? 3u : 2u);
    CHECK_EQ(fake_gpu::hooks().calls("occupancy"), 2u);
  }
  CHECK_EQ(fake_gpu::gpu().set_device(0), 0);
  unsetenv("FUSEDPG_FAKE_SMS");
  unsetenv("FUSEDPG_FAKE_OCCUPANCY");
}

} // namespace fusedpg::test
