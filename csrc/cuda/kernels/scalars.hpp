#pragma once

#include "cuda/kernels/updates.hpp"

// What ranks agree on before a step, and the scalars of the updates.
namespace fusedpg::cuda {

// Byte i of the kAgreeBytes.
FUSEDPG_HOST_DEVICE uint8_t proposed_byte(const ProposeArgs& args, uint32_t i) {
  if (i < kAgreeComplement) {
    return static_cast<uint8_t>(args.hash >> (8 * i));
  }
  if (i < kAgreeComplement + 8) {
    return static_cast<uint8_t>(~args.hash >> (8 * (i - kAgreeComplement)));
  }
  if (i == kAgreeFoundInf) {
    return args.found_inf != nullptr && *args.found_inf != 0;
  }
  if (i < kAgreeUsed || i - kAgreeUsed >= args.tensors) {
    return 0;
  }
  return args.used == nullptr || args.used[i - kAgreeUsed] != 0;
}

FUSEDPG_HOST_DEVICE void propose_bytes(
    const ProposeArgs& args,
    int thread,
    int threads) {
  for (uint32_t i = thread; i < kAgreeBytes; i += threads) {
    args.agree[i] = proposed_byte(args, i);
  }
}

FUSEDPG_HOST_DEVICE bool ranks_agree(const uint8_t* agree) {
  if (agree == nullptr) {
    return true;
  }
  bool same = true;
  for (uint32_t i = 0; i < 8; ++i) {
    same = same && (agree[kAgreeHash + i] ^ agree[kAgreeComplement + i]) == 255;
  }
  return same;
}

// Calls that prepare_tensor has to be called for: without tensors one is left.
FUSEDPG_HOST_DEVICE uint32_t prepare_calls(const PrepareArgs& args) {
  return args.num_tensors == 0 ? 1 : args.num_tensors;
}

// The call for tensor 0 also writes the flags of the whole. Nothing that is
// written here is read here by another call: found_inf and mismatch are never
// read, and used[t], scalars[t] and the counter of t belong to call t.
FUSEDPG_HOST_DEVICE void prepare_tensor(const PrepareArgs& args, uint32_t t) {
  const bool agreed = ranks_agree(args.agree);
  const bool found_inf =
      args.agree != nullptr && args.agree[kAgreeFoundInf] != 0;
  if (t == 0) {
    if (!agreed) {
      if (args.mismatch != nullptr) {
        tell_host(args.mismatch, args.sequence);
      }
    } else if (found_inf && args.found_inf != nullptr) {
      *args.found_inf = 1;
    }
  }
  if (t >= args.num_tensors) {
    return;
  }
  const bool used = args.agree == nullptr || args.agree[kAgreeUsed + t] != 0;
  if (agreed && args.used != nullptr) {
    args.used[t] = used;
  }
  if (args.tensors == nullptr) {
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
  TensorScalars scalars;
  const float step = tensor.step != nullptr ? *tensor.step : 0;
  kernels::resolve_scalars(hyper, static_cast<double>(step) + 1, scalars);
  const double scale =
      args.grad_scale != nullptr ? static_cast<double>(*args.grad_scale) : 1;
  const double weight =
      args.weights != nullptr ? total_weight(args.weights, args.size) : 1;
  const double sign = hyper.maximize ? -1 : 1;
  scalars.grad_factor = weight > 0 ? sign / (scale * args.divisor * weight) : 0;
  scalars.skip = !agreed || found_inf || !used;
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
