#include "c10d/coo.hpp"

#include "base/error.hpp"
#include "base/hash.hpp"
#include "c10d/tensors.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/perform.hpp"
#include "collectives/reduction.hpp"

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

Gathered gather_entries(Way& way, const at::Tensor& mine) {
  CooHeader header{mine._nnz(), shape_hash(mine)};
  std::vector<CooHeader> headers(way.size());
  std::vector<Buffer> parts;
  for (CooHeader& h : headers) {
    parts.push_back({&h, sizeof h});
  }
  way.begin_item(0, 3);
  const Buffer here{&header, sizeof header};
  perform(
      way,
      {.op = OpCode::kAllGather, .inputs = single(here), .outputs = parts});
  for (int p = 0; p < way.size(); ++p) {
    if (headers[p].shape != header.shape) {
      fail(
          ErrorKind::kMismatch,
          "fused: all_reduce of sparse tensors, sequence number {}: sizes, "
          "dtypes or sparse dimensions differ between rank {} (here) and rank "
          "{} (there)",
          way.op().sequence,
          way.rank(),
          p);
    }
  }
  Gathered all;
  const auto exchange = [&](const at::Tensor& part,
                            std::vector<at::Tensor>& list,
                            int64_t dim,
                            uint64_t item) {
    way.begin_item(item, 3); // before what may find no memory
    for (const CooHeader& h : headers) {
      std::vector<int64_t> sizes = part.sizes().vec();
      sizes[dim] = h.entries;
      list.push_back(at::empty(sizes, part.options()));
    }
    const Flat in = Flat::input(part);
    const auto outs = flat_outputs(list);
    perform(
        way,
        {.op = OpCode::kAllGather,
         .dtype = dtype_of(in),
         .inputs = single(in.buffer()),
         .outputs = buffers(outs)});
    finish(outs);
  };
  exchange(mine.indices(), all.indices, 1, 1);
  exchange(mine.values(), all.values, 0, 2);
  return all;
}

// Between hosts. What ranks do not agree about is told by enter(); what they
// have are the numbers of their entries.
std::vector<int64_t> gather_numbers(Way& way, const at::Tensor& mine) {
  OpDescriptor d;
  d.op = OpCode::kAllReduce;
  d.dtype = to_dtype(mine.scalar_type());
  d.count = static_cast<uint64_t>(mine.numel());
  d.shape_hash = shape_hash(mine);
  way.enter(nullptr, d, {static_cast<uint64_t>(mine._nnz())});
  std::vector<int64_t> entries;
  for (int p = 0; p < way.size(); ++p) {
    entries.push_back(static_cast<int64_t>(*way.extra(p)));
  }
  return entries;
}

// All ranks' coordinates, or values, of which `dim` counts the entries.
std::vector<at::Tensor> gather_parts(
    NetContext& ctx,
    const at::Tensor& mine,
    const std::vector<int64_t>& entries,
    int64_t dim) {
  const at::Tensor part = mine.contiguous();
  const size_t me = ctx.transport.rank();
  std::vector<at::Tensor> list;
  std::vector<NetBuffer> ins;
  for (size_t p = 0; p < entries.size(); ++p) {
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[dim] = entries[p];
    list.push_back(p == me ? part : at::empty(sizes, part.options()));
    ins.emplace_back(list[p].nbytes());
  }
  NetBuffer out(part.nbytes());
  std::copy_n(
      static_cast<const char*>(part.data_ptr()), out.bytes(), out.data());
  net_exchange(ctx, std::vector<NetBuffer>(ins.size(), out), ins);
  for (size_t p = 0; p < list.size(); ++p) {
    if (p != me) {
      std::copy_n(
          ins[p].data(),
          ins[p].bytes(),
          static_cast<char*>(list[p].data_ptr()));
    }
  }
  return list;
}

// The coordinates that any rank has, in order.
struct Union {
  at::Tensor indices; // [sparse_dim, entries]
  std::vector<at::Tensor> places; // of each rank's entries among them
};

Union unite(const at::Tensor& like, const std::vector<at::Tensor>& ranks) {
  std::vector<at::Tensor> flat;
  const int64_t dims = like.sparse_dim();
  std::vector<int64_t> strides(dims, 1);
  for (int64_t d = dims - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * like.size(d);
  }
  const at::Tensor factors = at::tensor(strides, at::kLong).unsqueeze(1);
  for (const at::Tensor& indices : ranks) {
    flat.push_back((indices * factors).sum(0));
  }
  const auto [places, inverse, counts] =
      at::_unique2(at::cat(flat), /*sorted=*/true, /*return_inverse=*/true);
  Union all{at::empty({dims, places.numel()}, at::kLong), {}};
  int64_t begin = 0;
  for (size_t p = 0; p < flat.size(); ++p) {
    all.places.push_back(inverse.narrow(0, begin, flat[p].numel()));
    all.indices.index_copy_(1, all.places[p], ranks[p]);
    begin += flat[p].numel();
  }
  return all;
}

// A rank's entries, with zeros where only others have some.
at::Tensor spread(const at::Tensor& values, const Union& all, int rank) {
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = all.indices.size(1);
  at::Tensor whole = at::zeros(sizes, values.options());
  whole.index_copy_(0, all.places[rank], values);
  return whole;
}

// Every entry is a left fold over the ranks that have it, which begins with
// zero: in rank order, or where several share a host those of each host first.
at::Tensor add_values(
    const Union& all,
    const std::vector<at::Tensor>& ranks,
    const HostMap& hosts) {
  std::vector<int64_t> sizes = ranks[0].sizes().vec();
  sizes[0] = all.indices.size(1);
  at::Tensor values = at::zeros(sizes, ranks[0].options());
  for (int h = 0; h < hosts.num_hosts(); ++h) {
    const bool one = hosts.ranks(h).size() == 1;
    at::Tensor sum = one ? values : at::zeros_like(values);
    for (const int p : hosts.ranks(h)) {
      sum.index_add_(0, all.places[p], ranks[p]);
    }
    if (!one) {
      values.add_(sum);
    }
  }
  return values;
}

// Sums of blocks must have the bits of sums of entries. Those of half types do
// not: entries are rounded after each addition.
bool may_use_blocks(const NetContext& ctx, const kernels::ReduceArgs& args) {
  return ctx.aggregators != nullptr && can_skip(args) &&
      args.dtype != DType::kFloat16 && args.dtype != DType::kBFloat16;
}

// The same sums by blocks of the entries that any rank has, of which a rank
// sends those in which it has some: by the group's aggregators, or where the
// model finds that faster among the ranks.
at::Tensor add_blocks(
    Way& way,
    const at::Tensor& mine,
    const Union& all,
    const kernels::ReduceArgs& args) {
  constexpr size_t kLargestBlock = 65536;
  const int rank = way.rank();
  at::Tensor sum = spread(mine, all, rank);
  const auto count = static_cast<size_t>(sum.numel());
  if (count == 0) {
    return sum;
  }
  const size_t entry = count / static_cast<size_t>(sum.size(0));
  SkipOptions skip;
  if (entry <= kLargestBlock) {
    skip.block = (kBlockSize + entry - 1) / entry * entry; // of whole entries
  }
  std::vector<uint8_t> bitmap((count + skip.block - 1) / skip.block);
  const at::Tensor places = all.places[rank].contiguous();
  for (int64_t i = 0; i < places.numel(); ++i) {
    const size_t begin = static_cast<size_t>(places.data_ptr<int64_t>()[i]);
    for (size_t b = begin * entry / skip.block;
         b * skip.block < (begin + 1) * entry;
         ++b) {
      bitmap[b] = 1;
    }
  }
  skip.bitmap = bitmap.data();
  skip.bitmap_block = skip.block;
  const Buffer tensor{sum.data_ptr(), count};
  OpDescriptor d = facts(
      {.op = OpCode::kSparseAllReduce,
       .dtype = args.dtype,
       .inputs = single(tensor),
       .skip = skip});
  Plan plan = in_place(way.kernels(), way.size(), single(tensor), args);
  plan.skip = skip;
  plan.zeros_stay = true;
  way.op().list_index = 1;
  way.op().list_length = 2;
  way.enter(&plan, d, {});
  way.run(plan, d);
  return sum.add_(0); // a fold that begins with zero has no -0.0
}

at::Tensor united(
    const at::Tensor& like,
    const Union& all,
    const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(
      all.indices,
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

at::Tensor coo_all_reduce(Way& way, const at::Tensor& mine, bool mean) {
  NetContext* const net = way.net();
  Gathered all;
  Union places;
  at::Tensor values;
  if (net == nullptr) {
    all = gather_entries(way, mine);
    places = unite(mine, all.indices);
    values = add_values(places, all.values, HostMap::apart(way.size()));
    count(way.op(), all, way.rank());
  } else {
    kernels::ReduceArgs args;
    args.dtype = to_dtype(mine.scalar_type());
    const auto entries = gather_numbers(way, mine);
    all.indices = gather_parts(*net, mine.indices(), entries, 1);
    places = unite(mine, all.indices);
    if (may_use_blocks(*net, args)) {
      values = add_blocks(way, mine.values(), places, args);
      net->stats.add(
          OpCode::kAllReduce,
          net->aggregated ? DataPath::kAggregated : DataPath::kCoordinates,
          net->moved);
    } else {
      all.values = gather_parts(*net, mine.values(), entries, 0);
      values = add_values(places, all.values, *net->hosts);
      count(*net, all, way.rank());
    }
  }
  const at::Tensor sum = united(mine, places, values);
  return mean ? coo_mean(sum, way.size()) : sum;
}

} // namespace fusedpg
