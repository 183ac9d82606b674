// The collectives that only move data between hosts.

#include "c10d/routes/hosts_turn.hpp"
#include "collectives/collectives.hpp"
#include "collectives/hosts_way.hpp"

namespace fusedpg {
template <typename Move>
void HostsTurn::run(const Move& move) {
  NetContext ctx = context();
  HostsWay way(ctx);
  move(way);
}

void HostsTurn::refuse(const std::string& reason) {
  if (entered_) {
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
  run([&](Way& way) {
    fusedpg::broadcast(way, tensor.span(), dtype_of(tensor), root);
  });
}

void HostsTurn::all_gather(const Parts& outputs, const Flat& input) {
  run([&](Way& way) {
    fusedpg::all_gather(way, outputs.spans(), input.span(), dtype_of(input));
  });
}

void HostsTurn::gather(
    const std::vector<Flat>& outputs,
    const Flat& input,
    int root) {
  run([&](Way& way) {
    fusedpg::gather(
        way, Parts(outputs).spans(), input.span(), dtype_of(input), root);
  });
}

void HostsTurn::scatter(
    const Flat& output,
    const std::vector<Flat>& inputs,
    int root) {
  run([&](Way& way) {
    fusedpg::scatter(
        way, output.span(), Parts(inputs).spans(), dtype_of(output), root);
  });
}

void HostsTurn::all_to_all(const Parts& outputs, const Parts& inputs) {
  run([&](Way& way) {
    fusedpg::all_to_all(way, outputs.spans(), inputs.spans(), inputs.dtype());
  });
}

void HostsTurn::barrier() {
  run([&](Way& way) { fusedpg::barrier(way); });
}

} // namespace fusedpg
