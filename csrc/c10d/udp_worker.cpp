// A worker of SwitchML's protocol for Python (fusedpg/aggregation/_backends.py), which takes tensors.
#include "c10d/bindings.hpp"

#include <memory>

#include "aggregate/protocol.hpp"
#include "aggregate/udp_client.hpp"
#include "base/options.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/errors.hpp"
#include "c10d/tensor_memory.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

namespace udp = aggregate::udp;

py::dict stats_of(const udp::Client& client) {
  const udp::Stream::Stats& stats = client.stats();
  py::dict d;
  d["packets_sent"] = stats.packets_sent;
  d["bytes_sent"] = stats.bytes_sent;
  d["retransmissions"] = stats.retransmissions;
  d["packets_received"] = stats.packets_received;
  d["repeated"] = stats.repeated;
  d["wrong"] = stats.wrong;
  return d;
}

std::unique_ptr<udp::Client> udp_worker(
    const std::string& place,
    const std::string& session,
    int64_t rank,
    int64_t workers,
    int64_t packet_numel,
    int64_t slots,
    double timeout_ms,
    bool with_seal,
    int64_t deadline_ms) {
  return translate([&] {
    const auto number = [](const char* name, int64_t value, int64_t most) {
      if (value < 0 || value > most) {
        fail(ErrorKind::kInvalid, "fused: {} cannot be {}", name, value);
      }
      return static_cast<uint32_t>(value);
    };
    udp::Stream::Config config;
    config.secret = aggregate::key_of(aggregator_settings().key);
    config.session = aggregate::key_of(session);
    config.workers = static_cast<uint8_t>(number("workers", workers, 255));
    config.rank = static_cast<uint8_t>(number("rank", rank, 255));
    config.numel = number("packet_numel", packet_numel, UINT16_MAX);
    config.slots = number("slots", slots, UINT32_MAX);
    config.timeout =
        std::chrono::microseconds(static_cast<int64_t>(timeout_ms * 1000));
    config.with_seal = with_seal;
    return std::make_unique<udp::Client>(
        place, config, Deadline(std::chrono::milliseconds(deadline_ms)));
  });
}

void udp_all_reduce(
    udp::Client& client,
    const at::Tensor& tensor,
    int64_t deadline_ms) {
  translate([&] {
    const bool floats = tensor.scalar_type() == at::kFloat;
    if (!tensor.device().is_cpu() || !tensor.is_contiguous() ||
        (!floats && tensor.scalar_type() != at::kInt)) {
      fail(
          ErrorKind::kInvalid,
          "fused: aggregators by UDP take contiguous float32 and int32 tensors "
          "of the CPU");
    }
    check_memory("all_reduce", tensor);
    const Deadline deadline{std::chrono::milliseconds(deadline_ms)};
    const auto count = static_cast<size_t>(tensor.numel());
    if (floats) {
      client.all_reduce(
          tensor.data_ptr<float>(), count, default_kernels(), deadline);
    } else {
      client.all_reduce(tensor.data_ptr<int32_t>(), count, deadline);
    }
  });
}

} // namespace

void bind_udp_worker(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> free;
  py::class_<udp::Client>(m, "UdpWorker")
      .def(
          py::init(&udp_worker),
          "Joins a session at the aggregator \"host:port\".",
          py::arg("place"),
          py::arg("session"),
          py::kw_only(),
          py::arg("rank"),
          py::arg("workers"),
          py::arg("packet_numel"),
          py::arg("slots"),
          py::arg("timeout_ms"),
          py::arg("with_seal"),
          py::arg("deadline_ms"),
          free)
      .def(
          "all_reduce",
          &udp_all_reduce,
          "The sum over the session's workers, in place.",
          py::arg("tensor"),
          py::arg("deadline_ms"),
          free)
      .def("end", &udp::Client::end, free)
      .def_property_readonly("slots", &udp::Client::slots)
      .def("stats", &stats_of);
}

} // namespace fusedpg
