// The aggregator for Python: fusedpg.aggregator runs it.
#include "c10d/aggregator.hpp"

#include <memory>

#include "aggregate/server.hpp"
#include "base/options.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/errors.hpp"

namespace fusedpg {
namespace {

using aggregate::Server;

py::dict stats_of(Server& server) {
  const Server::Stats stats = [&] {
    const py::gil_scoped_release free;
    return server.stats();
  }();
  py::dict d;
  d["jobs"] = stats.jobs;
  d["active"] = stats.active;
  d["refused"] = stats.refused;
  d["failed"] = stats.failed;
  d["operations"] = stats.operations;
  d["segments"] = stats.segments;
  d["bytes_received"] = stats.bytes_received;
  d["bytes_sent"] = stats.bytes_sent;
  return d;
}

} // namespace

void bind_aggregator(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> free;
  py::class_<Server, std::shared_ptr<Server>>(m, "Aggregator")
      .def(
          py::init([](const std::string& listen, const std::string& key) {
            return translate([&] {
              return std::make_shared<Server>(
                  aggregate::front_door(listen, aggregate::key_of(key)),
                  default_kernels());
            });
          }),
          "Listens at \"host:port\" for jobs of workers that have the key.",
          py::arg("listen"),
          py::arg("key"),
          free)
      .def_property_readonly("address", &Server::address)
      .def("drain", &Server::drain, "Takes no more jobs.", free)
      .def("stats", &stats_of);
  m.def("_aggregator_settings", [] {
    const AggregatorSettings s = aggregator_settings();
    return py::make_tuple(s.listen, s.stats, s.key);
  });
}

} // namespace fusedpg
