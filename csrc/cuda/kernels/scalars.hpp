#pragma once

#include "cuda/kernels/updates.hpp"

// The headers of a step, and the scalars of the updates.
namespace fusedpg::cuda {

FUSEDPG_HOST_DEVICE uint32_t wire_size(DType type) {
  return type == DType::kInt64 ? 8 : float_size(type);
}

FUSEDPG_HOST_DEVICE void store_number(char* to, DType type, int value) {
  switch (type) {
    case DType::kFloat16:
      return store_as(to, float_to_half(static_cast<float>(value)));
    case DType::kBFloat16:
      return store_as(to, float_to_bfloat(static_cast<float>(value)));
    case DType::kFloat64:
      return store_as(to, static_cast<double>(value));
    case DType::kInt32:
      return store_as(to, value);
    case DType::kInt64:
      return store_as(to, static_cast<int64_t>(value));
    default:
      return store_as(to, static_cast<float>(value));
  }
}

FUSEDPG_HOST_DEVICE double load_number(const char* from, DType type) {
  switch (type) {
    case DType::kFloat16:
      return half_to_float(load_as<uint16_t>(from));
    case DType::kBFloat16:
      return bfloat_to_float(load_as<uint16_t>(from));
    case DType::kFloat64:
      return load_as<double>(from);
    case DType::kInt32:
      return load_as<int32_t>(from);
    case DType::kInt64:
      return static_cast<double>(load_as<int64_t>(from));
    default:
      return load_as<float>(from);
  }
}

// Byte i of this rank's raw header.
FUSEDPG_HOST_DEVICE uint8_t proposed_byte(const ProposeArgs& args, uint32_t i) {
  if (i < kHeaderWeight) {
    return static_cast<uint8_t>(args.to.hash >> (8 * i));
  }
  if (i < kHeaderFlags) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &args.weight, sizeof bits);
    return static_cast<uint8_t>(bits >> (8 * (i - kHeaderWeight)));
  }
  if (i == kHeaderFlags) {
    return args.found_inf != nullptr && *args.found_inf != 0;
  }
  const uint32_t t = i - kHeaderFlags - 1;
  return t < args.to.tensors && (args.used == nullptr || args.used[t] != 0);
}

// Element i of its coded one.
FUSEDPG_HOST_DEVICE int proposed_number(const ProposeArgs& args, uint32_t i) {
  if (i < kCodedFlags) {
    return static_cast<int>(args.to.hash >> (i / 2) & 1) == (i + 1) % 2;
  }
  const uint32_t flag = i - kCodedFlags;
  if (flag <= args.to.tensors) {
    return proposed_byte(args, kHeaderFlags + flag);
  }
  const uint32_t byte = flag - args.to.tensors - 1;
  return args.to.weighted && byte / 8 == static_cast<uint32_t>(args.to.rank)
      ? proposed_byte(args, kHeaderWeight + byte % 8)
      : 0;
}

FUSEDPG_HOST_DEVICE void propose_items(
    const ProposeArgs& args,
    uint32_t thread,
    uint32_t threads) {
  const Header& to = args.to;
  for (uint64_t k = thread; k < uint64_t(args.copies) * args.items;
       k += threads) {
    const auto i = static_cast<uint32_t>(k % args.items);
    char* place = to.data + k / args.items * to.stride;
    if (to.type == DType::kOpaque) {
      store_as(place + i, proposed_byte(args, i));
    } else {
      const int number = proposed_number(args, i);
      store_number(
          place + uint64_t(i) * wire_size(to.type),
          to.type,
          to.op == RedOp::kMin ? -number : number);
    }
  }
}

FUSEDPG_HOST_DEVICE double coded_number(const Header& from, uint32_t i) {
  const double number =
      load_number(from.data + uint64_t(i) * wire_size(from.type), from.type);
  return from.op == RedOp::kMin ? -number : number;
}

// Exactly: what is read where ranks have called something else may be anything.
FUSEDPG_HOST_DEVICE bool ranks_agree(const Header& from) {
  bool same = true;
  if (from.data == nullptr) {
    return same;
  }
  if (from.type == DType::kOpaque) {
    for (int p = 0; p < from.size; ++p) {
      same =
          same && load_as<uint64_t>(from.data + p * from.stride) == from.hash;
    }
    return same;
  }
  // Beyond 256 ones a sum may be rounded.
  const bool adds = from.op != RedOp::kMin && from.op != RedOp::kMax;
  const double least = !adds ? 1 : from.size < 256 ? from.size : 256;
  const double most = least < 256 ? least : 2.0 * from.size;
  for (uint32_t bit = 0; bit < 64; ++bit) {
    const auto zero = static_cast<uint32_t>(from.hash >> bit & 1);
    const double there = coded_number(from, 2 * bit + 1 - zero);
    same = same && there >= least && there <= most &&
        coded_number(from, 2 * bit + zero) == 0;
  }
  return same;
}

// Flag 0 is found_inf, flag 1 + t that of tensor t.
FUSEDPG_HOST_DEVICE bool any_rank(const Header& from, uint32_t flag) {
  if (from.data == nullptr) {
    return flag != 0;
  }
  if (from.type != DType::kOpaque) {
    return coded_number(from, kCodedFlags + flag) != 0;
  }
  bool any = false;
  for (int p = 0; p < from.size; ++p) {
    any = any ||
        load_as<uint8_t>(from.data + p * from.stride + kHeaderFlags + flag) !=
            0;
  }
  return any;
}

FUSEDPG_HOST_DEVICE double weight_of(const Header& from, int rank) {
  if (from.type == DType::kOpaque) {
    return load_as<double>(from.data + rank * from.stride + kHeaderWeight);
  }
  uint64_t bits = 0;
  for (uint32_t byte = 0; byte < 8; ++byte) {
    const double number = coded_number(
        from, kCodedFlags + 1 + from.tensors + 8 * uint32_t(rank) + byte);
    bits |= static_cast<uint64_t>(number) << (8 * byte);
  }
  double weight = 0;
  __builtin_memcpy(&weight, &bits, sizeof weight);
  return weight;
}

// Calls that prepare_tensor has to be called for: without tensors one is left.
FUSEDPG_HOST_DEVICE uint32_t prepare_calls(const PrepareArgs& args) {
  return args.from.tensors == 0 ? 1 : args.from.tensors;
}

// The call for tensor 0 also writes what is of the whole. Nothing that is written
// here is read here by another call: found_inf, mismatch and weights are never
// read, and used[t], scalars[t] and the counter of t belong to call t.
FUSEDPG_HOST_DEVICE void prepare_tensor(const PrepareArgs& args, uint32_t t) {
  const Header& from = args.from;
  const bool without = args.stop != nullptr && stopped(args.stop, args.late);
  const bool agreed = !without && ranks_agree(from);
  if (t == 0) {
    if (!agreed) {
      if (args.mismatch != nullptr && !without) {
        tell_host(args.mismatch, args.sequence);
      }
    } else if (args.found_inf != nullptr && any_rank(from, 0)) {
      *args.found_inf = 1;
    }
    for (int p = 0; args.weights != nullptr && p < from.size; ++p) {
      args.weights[p] = weight_of(from, p);
    }
  }
  if (t >= from.tensors) {
    return;
  }
  const bool used = any_rank(from, 1 + t);
  if (agreed && args.used != nullptr) {
    args.used[t] = used;
  }
  TensorScalars scalars{};
  scalars.skip = !agreed || any_rank(from, 0) || !used;
  if (args.tensors == nullptr) {
    args.scalars[t] = scalars;
    return;
  }
  const TensorInfo& tensor = args.tensors[t];
  kernels::Hyper hyper = args.hypers[tensor.hyper];
  if (args.lrs != nullptr && args.lrs[tensor.hyper] != nullptr) {
    const void* lr = args.lrs[tensor.hyper];
    hyper.lr = args.lr_types[tensor.hyper] == DType::kFloat64
        ? *static_cast<const double*>(lr)
        : static_cast<double>(*static_cast<const float*>(lr));
  }
  const float step = tensor.step != nullptr ? *tensor.step : 0;
  kernels::resolve_scalars(hyper, static_cast<double>(step) + 1, scalars);
  const double scale =
      args.grad_scale != nullptr ? static_cast<double>(*args.grad_scale) : 1;
  double weight = args.weights != nullptr ? 0 : 1;
  for (int p = 0; args.weights != nullptr && p < from.size; ++p) {
    weight += weight_of(from, p);
  }
  const double sign = hyper.maximize ? -1 : 1;
  scalars.grad_factor = weight > 0 ? sign / (scale * args.divisor * weight) : 0;
  args.scalars[t] = scalars;
  if (!scalars.skip && tensor.step != nullptr) {
    *tensor.step = step + 1;
  }
}

// Lane `lane` of kThreads of a tensor's sums; see fold_lanes().
FUSEDPG_HOST_DEVICE Sums
add_sums_lane(const AddSumsArgs& args, uint32_t t, int lane) {
  Sums sums{};
  const uint64_t end = uint64_t(args.begin[t + 1]) * args.pairs;
  for (uint64_t i = uint64_t(args.begin[t]) * args.pairs + lane; i < end;
       i += kThreads) {
    const uint64_t part = args.list[i / args.pairs];
    const double* pair =
        args.partial + 2 * (part * args.pairs + i % args.pairs);
    sums.add({pair[0], pair[1]});
  }
  return sums;
}

FUSEDPG_HOST_DEVICE void trust_tensor(const TrustArgs& args, uint32_t t) {
  Sums sums{};
  for (int p = 0; p < args.size; ++p) {
    const double* of_rank =
        args.gathered + 2 * (uint64_t(p) * args.num_tensors + t);
    sums.add({of_rank[0], of_rank[1]});
  }
  TensorScalars& scalars = args.scalars[t];
  const kernels::Hyper& hyper = args.hypers[args.tensors[t].hyper];
  // The learning rate as it was resolved: it may not be that of `hypers`.
  scalars.lamb.step_size =
      scalars.sgd.lr * kernels::trust_ratio(hyper, sums.param, sums.direction);
}

} // namespace fusedpg::cuda
