// Updates, LAMB's moments and their sums.

#include "check.hpp"
#include "cuda_tiles.hpp"

namespace fusedpg::test {

namespace {

// What a step reads and writes.
struct World {
  struct Tensor {
    Array param, grad, master, state[3];
  };
  std::vector<Tensor> tensors;
  Array grads; // this rank's block
  Array params_out;

  World(const Cut& cut, const Types& types, size_t shift) {
    uint32_t seed = 1;
    for (size_t t = 0; t < cut.counts.size(); ++t) {
      const auto slice = static_cast<size_t>(cut.slice(t).length);
      Tensor tensor;
      tensor.param = Array(types.param, cut.counts[t], shift, seed++);
      tensor.grad = Array(types.grad, slice, shift, seed++);
      tensor.master = Array(DType::kFloat32, slice, shift, seed++);
      for (int k = 0; k < 3; ++k) {
        tensor.state[k] = Array(types.state, slice, shift, seed++);
        for (size_t i = 0; k > 0 && i < slice; ++i) {
          tensor.state[k].set(i, std::fabs(tensor.state[k].get(i)));
        }
      }
      tensors.push_back(std::move(tensor));
    }
    grads = Array(types.grad, cut.block, shift, seed++);
    params_out = Array(types.param, cut.block, shift, seed++);
  }
  std::vector<TensorInfo> infos(const Cut& cut) const {
    std::vector<TensorInfo> infos(tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      infos[t].param = tensors[t].param.pointer();
      infos[t].grad = tensors[t].grad.pointer();
      infos[t].master = tensors[t].master.pointer();
      for (int k = 0; k < 3; ++k) {
        infos[t].state[k] = tensors[t].state[k].pointer();
      }
      infos[t].count = cut.counts[t];
      infos[t].shard = cut.shard(t);
    }
    return infos;
  }
  bool operator==(const World& o) const {
    bool same = params_out.bytes() == o.params_out.bytes() &&
        grads.bytes() == o.grads.bytes();
    for (size_t t = 0; t < tensors.size(); ++t) {
      const Tensor& a = tensors[t];
      const Tensor& b = o.tensors[t];
      same = same && a.param.bytes() == b.param.bytes() &&
          a.grad.bytes() == b.grad.bytes() &&
          a.master.bytes() == b.master.bytes();
      for (int k = 0; k < 3; ++k) {
        same = same && a.state[k].bytes() == b.state[k].bytes();
      }
    }
    return same;
  }
};

std::vector<TensorScalars> scalars_of(const Variant& v, size_t tensors) {
  std::vector<TensorScalars> all(tensors);
  for (size_t t = 0; t < tensors; ++t) {
    kernels::resolve_scalars(v.hyper, 3.0 + static_cast<double>(t), all[t]);
    all[t].lamb.step_size = 0.007;
    all[t].grad_factor = -1.0 / 3;
    all[t].skip = t == 2;
  }
  return all;
}

cuda::UpdateArgs update_args(
    const Variant& v,
    const Types& types,
    const Chunk& chunk,
    const std::vector<TensorScalars>& scalars) {
  cuda::UpdateArgs a{};
  a.chunk = chunk;
  a.formula = v.formula;
  a.param_type = types.param;
  a.grad_type = types.grad;
  a.state_type = types.state;
  a.masters = types.masters;
  a.decoupled = v.hyper.decoupled;
  a.amsgrad = v.hyper.amsgrad;
  a.momentum = v.hyper.momentum != 0;
  a.nesterov = v.hyper.nesterov;
  a.scalars = scalars.data();
  return a;
}

// The same piece by piece with the CPU's kernels; returns the sums of squares
// of LAMB's first half.
std::vector<double> update_on_cpu(
    const Cut& cut,
    const Types& types,
    const Variant& v,
    const std::vector<TensorScalars>& scalars,
    bool moments,
    bool from_block,
    bool to_block,
    World& world) {
  std::vector<double> sums(2 * cut.counts.size());
  for (const Piece& piece : cut.pieces) {
    World::Tensor& tensor = world.tensors[piece.tensor];
    const TensorScalars& s = scalars[piece.tensor];
    const auto first =
        static_cast<size_t>(cut.slice(piece.tensor).offset) + piece.begin;
    const size_t n = cut.valid(piece);
    void* param = n == 0 ? nullptr : tensor.param.pointer(first);
    void* out = to_block ? world.params_out.pointer(piece.wire) : param;
    if (n == 0) {
      continue;
    }
    if (s.skip) {
      if (out != param && !moments) {
        std::memcpy(out, param, n * dtype_size(types.param));
      }
      continue;
    }
    const void* grad = from_block ? world.grads.pointer(piece.wire)
                                  : tensor.grad.pointer(piece.begin);
    kernels::UpdateArgs args;
    static_cast<kernels::StepScalars&>(args) = s;
    args.formula = v.formula;
    args.grad_factor = s.grad_factor;
    kernels::UpdateSpans spans;
    spans.param_type = types.param;
    spans.grad_type = types.grad;
    spans.state_type = types.state;
    spans.params_out = &out;
    spans.num_out = moments ? 0 : 1;
    spans.param = param;
    spans.grads = &grad;
    spans.num_grads = 1;
    spans.master = types.masters ? tensor.master.pointer(piece.begin) : nullptr;
    for (int k = 0; k < 3; ++k) {
      spans.state[k] = tensor.state[k].pointer(piece.begin);
    }
    spans.count = n;
    if (!moments) {
      kernels::table()->update(args, spans);
      continue;
    }
    std::vector<double> blocks(2 * (n / kernels::kSumBlock + 1));
    kernels::table()->lamb_moments(args, spans, blocks.data());
    for (size_t i = 0; i < blocks.size(); ++i) {
      sums[2 * piece.tensor + i % 2] += blocks[i];
    }
  }
  return sums;
}

// As the GPU does it: all threads of a block, here one after the other.
void update_by_threads(const cuda::UpdateArgs& args) {
  const auto run = [&](auto compute) {
    with_rule<decltype(compute)>(args, [&](auto tag) {
      for (uint32_t tile = 0; tile < args.chunk.num_tiles; ++tile) {
        for (int thread = 0; thread < kThreads; ++thread) {
          update_tile<typename decltype(tag)::Type>(
              args, tile, thread, kThreads);
        }
      }
    });
  };
  args.param_type == DType::kFloat64 ? run(double()) : run(float());
}

} // namespace

TEST(cuda_tiles_update) {
  for (const Cut& cut : all_cuts()) {
    for (const Types& types : all_types()) {
      for (const size_t shift : {0, 1}) {
        const World fresh(cut, types, shift);
        for (const Variant& v : all_variants()) {
          const auto scalars = scalars_of(v, cut.counts.size());
          World wanted = fresh;
          World serial = fresh;
          World threads = fresh;
          // Gradients from the wire or as slices; to the wire or in place.
          const bool block = shift == 0 || types.masters;
          update_on_cpu(cut, types, v, scalars, false, block, block, wanted);
          for (World* world : {&serial, &threads}) {
            const auto infos = world->infos(cut);
            cuda::UpdateArgs args =
                update_args(v, types, cut.chunk(infos), scalars);
            args.grads = block ? world->grads.pointer() : nullptr;
            args.params_out = block ? world->params_out.pointer() : nullptr;
            world == &serial ? serial::update(args) : update_by_threads(args);
          }
          if (!CHECK(serial == wanted) || !CHECK(threads == wanted)) {
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
        serial::lamb_moments(args);
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
        serial::sum_tiles(
            {tile_sums.data(),
             list.data(),
             begin.data(),
             total.data(),
             static_cast<uint32_t>(cut.counts.size())});
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
  const uint32_t begin[] = {0, 0, kTiles};
  double sums[4] = {-1, -1, -1, -1};
  serial::sum_tiles({tile_sums.data(), list.data(), begin, sums, 2});
  CHECK(sums[0] == 0 && sums[1] == 0);
  for (int k = 0; k < 2; ++k) {
    CHECK(std::fabs(sums[2 + k] - double(wanted[k])) <= 1e-13 * sums[2 + k]);
  }
}

} // namespace fusedpg::test
