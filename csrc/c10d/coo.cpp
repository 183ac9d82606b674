#include "c10d/coo.hpp"

#include "base/error.hpp"
#include "base/hash.hpp"
#include "c10d/tensors.hpp"
#include "collectives/way.hpp"

namespace fusedpg {
namespace {

// What ranks tell each other of their tensors.
struct CooHeader {
  int64_t entries;
  uint64_t shape; // hash of everything else, which must be the same
};

// The coordinates and values of all ranks.
struct Gathered {
  std::vector<at::Tensor> indices; // of each rank: [sparse_dim, entries]
  std::vector<at::Tensor> values; // [entries, dense sizes...]
};

uint64_t shape_hash(const at::Tensor& t) {
  Hash hash;
  hash.add(static_cast<uint64_t>(t.sparse_dim()));
  hash.add(static_cast<uint64_t>(t.scalar_type()));
  for (const int64_t size : t.sizes()) {
    hash.add(static_cast<uint64_t>(size));
  }
  return hash.value();
}

Gathered gather_entries(Context& ctx, const at::Tensor& mine) {
  CooHeader header{mine._nnz(), shape_hash(mine)};
  std::vector<CooHeader> headers(ctx.size());
  std::vector<Span> parts;
  for (CooHeader& h : headers) {
    parts.push_back({&h, sizeof h});
  }
  ctx.begin_item(0, 3);
  ShmWay way(ctx);
  all_gather(way, parts, {&header, sizeof header}, DType::kOpaque);
  for (int p = 0; p < ctx.size(); ++p) {
    if (headers[p].shape != header.shape) {
      fail(
          ErrorKind::kMismatch,
          "fused: all_reduce of sparse tensors, sequence number {}: sizes, "
          "dtypes or sparse dimensions differ between rank {} (here) and rank "
          "{} (there)",
          ctx.sequence,
          ctx.rank(),
          p);
    }
  }
  Gathered all;
  const auto exchange = [&](const at::Tensor& part,
                            std::vector<at::Tensor>& list,
                            int64_t dim,
                            uint64_t item) {
    ctx.begin_item(item, 3); // before what may find no memory
    for (const CooHeader& h : headers) {
      std::vector<int64_t> sizes = part.sizes().vec();
      sizes[dim] = h.entries;
      list.push_back(at::empty(sizes, part.options()));
    }
    const Flat in = Flat::input(part);
    const auto outs = flat_outputs(list);
    ShmWay way(ctx);
    all_gather(
        way, Parts(outs).spans(), in.span(), to_dtype(part.scalar_type()));
    finish(outs);
  };
  exchange(mine.indices(), all.indices, 1, 1);
  exchange(mine.values(), all.values, 0, 2);
  return all;
}

// Every entry is a left fold over the ranks that have it, in rank order.
at::Tensor add_entries(const at::Tensor& like, const Gathered& all) {
  std::vector<at::Tensor> flat;
  const int64_t dims = like.sparse_dim();
  std::vector<int64_t> strides(dims, 1);
  for (int64_t d = dims - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * like.size(d);
  }
  const at::Tensor factors = at::tensor(strides, at::kLong).unsqueeze(1);
  for (const at::Tensor& indices : all.indices) {
    flat.push_back((indices * factors).sum(0));
  }
  const auto [places, inverse, counts] =
      at::_unique2(at::cat(flat), /*sorted=*/true, /*return_inverse=*/true);
  std::vector<int64_t> sizes = all.values[0].sizes().vec();
  sizes[0] = places.numel();
  at::Tensor values = at::zeros(sizes, all.values[0].options());
  at::Tensor indices = at::empty({dims, places.numel()}, at::kLong);
  int64_t begin = 0;
  for (size_t p = 0; p < flat.size(); ++p) {
    const int64_t entries = flat[p].numel();
    const at::Tensor mine = inverse.narrow(0, begin, entries);
    values.index_add_(0, mine, all.values[p]);
    indices.index_copy_(1, mine, all.indices[p]);
    begin += entries;
  }
  return at::_sparse_coo_tensor_unsafe(
      indices,
      values,
      like.sizes(),
      like.options(),
      /*is_coalesced=*/true);
}

} // namespace

at::Tensor coo_mean(const at::Tensor& sum, int size) {
  return sum.is_floating_point() || sum.is_complex()
      ? sum / size
      : at::div(sum, size, "trunc");
}

at::Tensor coo_all_reduce(Context& ctx, const at::Tensor& mine, bool mean) {
  const Gathered all = gather_entries(ctx, mine);
  const at::Tensor sum = add_entries(mine, all);
  OpStats stats;
  for (int p = 0; p < ctx.size(); ++p) {
    const size_t bytes = all.indices[p].nbytes() + all.values[p].nbytes();
    if (p == ctx.rank()) {
      stats.bytes_sent = bytes * static_cast<size_t>(ctx.size() - 1);
    } else {
      stats.bytes_received += bytes;
    }
  }
  ctx.stats.add(OpCode::kAllReduce, DataPath::kCoordinates, stats);
  return mean ? coo_mean(sum, ctx.size()) : sum;
}

} // namespace fusedpg
