#include "c10d/coo.hpp"

#include "base/error.hpp"
#include "base/hash.hpp"
#include "c10d/tensors.hpp"
#include "collectives/hosts_way.hpp"

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

// Between hosts. What ranks do not agree about is told by enter().
Gathered gather_entries(NetContext& ctx, const at::Tensor& mine) {
  HostsWay way(ctx);
  OpDescriptor d;
  d.op = OpCode::kAllReduce;
  d.dtype = to_dtype(mine.scalar_type());
  d.count = static_cast<uint64_t>(mine.numel());
  d.shape_hash = shape_hash(mine);
  way.enter(nullptr, d, {static_cast<uint64_t>(mine._nnz())});
  const auto sized = [](const at::Tensor& part, int64_t dim, int64_t entries) {
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[dim] = entries;
    return at::empty(sizes, part.options());
  };
  Gathered all;
  for (int p = 0; p < way.size(); ++p) {
    const auto entries = static_cast<int64_t>(*way.extra(p));
    all.indices.push_back(sized(mine.indices(), 1, entries));
    all.values.push_back(sized(mine.values(), 0, entries));
  }
  for (std::vector<at::Tensor>* list : {&all.indices, &all.values}) {
    const at::Tensor part =
        (list == &all.indices ? mine.indices() : mine.values()).contiguous();
    (*list)[way.rank()] = part;
    NetBuffer out(part.nbytes());
    std::copy_n(
        static_cast<const char*>(part.data_ptr()), out.bytes(), out.data());
    std::vector<NetBuffer> ins;
    for (const at::Tensor& one : *list) {
      ins.emplace_back(one.nbytes());
    }
    net_exchange(ctx, std::vector<NetBuffer>(ins.size(), out), ins);
    for (int p = 0; p < way.size(); ++p) {
      if (p != way.rank()) {
        std::copy_n(
            ins[p].data(),
            ins[p].bytes(),
            static_cast<char*>((*list)[p].data_ptr()));
      }
    }
  }
  return all;
}

// Every entry is a left fold over the ranks that have it: in rank order, or
// where several share a host those of each host first.
at::Tensor add_entries(
    const at::Tensor& like,
    const Gathered& all,
    const HostMap& hosts) {
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
  std::vector<at::Tensor> mine; // places, by rank
  int64_t begin = 0;
  for (size_t p = 0; p < flat.size(); ++p) {
    mine.push_back(inverse.narrow(0, begin, flat[p].numel()));
    indices.index_copy_(1, mine[p], all.indices[p]);
    begin += flat[p].numel();
  }
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    const bool one = hosts.ranks(h).size() == 1;
    at::Tensor sum = one ? values : at::zeros_like(values);
    for (const int p : hosts.ranks(h)) {
      sum.index_add_(0, mine[p], all.values[p]);
    }
    if (!one) {
      values.add_(sum);
    }
  }
  return at::_sparse_coo_tensor_unsafe(
      indices,
      values,
      like.sizes(),
      like.options(),
      /*is_coalesced=*/true);
}

// A sum of `size` ranks' tensors as their mean; integers are truncated.
at::Tensor coo_mean(const at::Tensor& sum, int size) {
  return sum.is_floating_point() || sum.is_complex()
      ? sum / size
      : at::div(sum, size, "trunc");
}

void count(OpContext& ctx, const Gathered& all, int rank) {
  OpStats stats;
  const int size = static_cast<int>(all.values.size());
  for (int p = 0; p < size; ++p) {
    const size_t bytes = all.indices[p].nbytes() + all.values[p].nbytes();
    if (p == rank) {
      stats.bytes_sent = bytes * static_cast<size_t>(size - 1);
    } else {
      stats.bytes_received += bytes;
    }
  }
  ctx.stats.add(OpCode::kAllReduce, DataPath::kCoordinates, stats);
}

} // namespace

at::Tensor coo_all_reduce(Context& ctx, const at::Tensor& mine, bool mean) {
  const Gathered all = gather_entries(ctx, mine);
  const at::Tensor sum = add_entries(mine, all, HostMap::apart(ctx.size()));
  count(ctx, all, ctx.rank());
  return mean ? coo_mean(sum, ctx.size()) : sum;
}

at::Tensor coo_all_reduce(NetContext& ctx, const at::Tensor& mine, bool mean) {
  const Gathered all = gather_entries(ctx, mine);
  const at::Tensor sum = add_entries(mine, all, *ctx.hosts);
  count(ctx, all, ctx.transport.rank());
  return mean ? coo_mean(sum, ctx.transport.size()) : sum;
}

} // namespace fusedpg
