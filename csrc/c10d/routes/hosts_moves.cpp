// The collectives that only move data between hosts: ours, or Gloo's where that is the transport.

#include "c10d/routes/hosts_turn.hpp"
#include "collectives/collectives.hpp"
#include "collectives/hosts_way.hpp"

namespace fusedpg {
namespace {

DType dtype_of(const Flat& flat) {
  return to_dtype(flat.tensor().scalar_type());
}

} // namespace

bool HostsTurn::ours(const std::function<void(Way&)>& move) {
  if (!route_.all_ours()) {
    return false;
  }
  NetContext ctx = context();
  HostsWay way(ctx);
  move(way);
  return true;
}

void HostsTurn::refuse(const std::string& reason) {
  if (entered_ || !route_.all_ours()) {
    return;
  }
  try {
    NetContext ctx = context();
    net_refuse(ctx, reason);
  } catch (const std::exception&) {
    // They hear of that otherwise.
  }
}

void HostsTurn::broadcast(const Flat& tensor, int root) {
  if (ours([&](Way& way) {
        fusedpg::broadcast(way, tensor.span(), dtype_of(tensor), root);
      })) {
    return;
  }
  auto opts = options<c10d::BroadcastOptions>();
  opts.rootRank = root;
  Tensors one{tensor.tensor()};
  gloo_.broadcast(one, opts)->wait();
}

void HostsTurn::all_gather(const Parts& outputs, const Flat& input) {
  if (ours([&](Way& way) {
        fusedpg::all_gather(
            way, outputs.spans(), input.span(), dtype_of(input));
      })) {
    return;
  }
  if (outputs.whole() != nullptr) {
    at::Tensor to = outputs.whole()->tensor();
    at::Tensor from = input.tensor();
    gloo_._allgather_base(to, from, options<c10d::AllgatherOptions>())->wait();
    return;
  }
  // Broadcasts, so that sizes may differ from rank to rank.
  for (int p = 0; p < size_; ++p) {
    const Flat& part = outputs.tensors()[p];
    if (p == rank_) {
      input.give(part.tensor());
    }
    if (part.tensor().numel() != 0) {
      broadcast(part, p);
    }
  }
}

void HostsTurn::gather(
    const std::vector<Flat>& outputs,
    const Flat& input,
    int root) {
  if (ours([&](Way& way) {
        fusedpg::gather(
            way, Parts(outputs).spans(), input.span(), dtype_of(input), root);
      })) {
    return;
  }
  auto opts = options<c10d::GatherOptions>();
  opts.rootRank = root;
  TensorLists lists;
  if (!outputs.empty()) {
    lists.push_back(flat_tensors(outputs));
  }
  Tensors one{input.tensor()};
  gloo_.gather(lists, one, opts)->wait();
}

void HostsTurn::scatter(
    const Flat& output,
    const std::vector<Flat>& inputs,
    int root) {
  if (ours([&](Way& way) {
        fusedpg::scatter(
            way, output.span(), Parts(inputs).spans(), dtype_of(output), root);
      })) {
    return;
  }
  auto opts = options<c10d::ScatterOptions>();
  opts.rootRank = root;
  TensorLists lists;
  if (!inputs.empty()) {
    lists.push_back(flat_tensors(inputs));
  }
  Tensors one{output.tensor()};
  gloo_.scatter(one, lists, opts)->wait();
}

void HostsTurn::all_to_all(const Parts& outputs, const Parts& inputs) {
  if (ours([&](Way& way) {
        fusedpg::all_to_all(
            way, outputs.spans(), inputs.spans(), inputs.dtype());
      })) {
    return;
  }
  // As one exchange: Gloo has no list form.
  at::Tensor from = inputs.joined();
  at::Tensor to =
      outputs.whole() != nullptr ? outputs.joined() : outputs.like_joined();
  auto to_splits = outputs.splits();
  auto from_splits = inputs.splits();
  gloo_
      .alltoall_base(
          to, from, to_splits, from_splits, options<c10d::AllToAllOptions>())
      ->wait();
  if (outputs.whole() == nullptr) {
    // Anew, as Gloo empties what it is given.
    const auto received = to.split_with_sizes(outputs.splits());
    for (size_t p = 0; p < received.size(); ++p) {
      Flat::input(received[p]).give(outputs.tensors()[p].tensor());
    }
  }
}

void HostsTurn::barrier() {
  if (ours([&](Way& way) { fusedpg::barrier(way); })) {
    return;
  }
  gloo_.barrier(options<c10d::BarrierOptions>())->wait();
}

} // namespace fusedpg
