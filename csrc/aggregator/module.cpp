// fusedpg._aggregator: the aggregators for Python (fusedpg/aggregator.py). It knows no torch, so that
// a machine that only adds up need not load it.
#include <memory>
#include <string>

#include <pybind11/pybind11.h>

#include "aggregate/server.hpp"
#include "aggregate/udp_server.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/options.hpp"
#include "collectives/engine.hpp"

namespace py = pybind11;

namespace fusedpg {
namespace {

using aggregate::Server;
namespace udp = aggregate::udp;

// An aggregator that ends here, not in a child which fork() has given a copy of it.
template <typename T, typename... Arguments>
std::shared_ptr<T> make(Arguments&&... arguments) {
  return std::shared_ptr<T>(
      new T(std::forward<Arguments>(arguments)...), DeleteAtOrigin());
}

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

py::dict udp_stats_of(udp::Server& server) {
  const udp::Sums::Stats stats = [&] {
    const py::gil_scoped_release free;
    return server.stats();
  }();
  py::dict d;
  d["sessions"] = stats.sessions;
  d["active"] = stats.active;
  d["refused"] = stats.refused;
  d["packets"] = stats.packets;
  d["sums"] = stats.sums;
  d["repeated"] = stats.repeated;
  d["resent"] = stats.resent;
  d["asked"] = stats.asked;
  d["stale"] = stats.stale;
  d["wrong"] = stats.wrong;
  return d;
}

} // namespace

PYBIND11_MODULE(_aggregator, m) {
  const py::call_guard<py::gil_scoped_release> free;
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      const bool argument = error.kind() == ErrorKind::kInvalid;
      PyErr_SetString(
          argument ? PyExc_ValueError : PyExc_RuntimeError, error.what());
    }
  });
  py::class_<Server, std::shared_ptr<Server>>(m, "Aggregator")
      .def(
          py::init([](const std::string& listen, const std::string& key) {
            return make<Server>(
                aggregate::front_door(listen, aggregate::key_of(key)),
                select_kernels(resolve(Options{})));
          }),
          "Listens at \"host:port\" for jobs of workers that have the key.",
          py::arg("listen"),
          py::arg("key"),
          free)
      .def_property_readonly("address", &Server::address)
      .def("drain", &Server::drain, "Takes no more jobs.", free)
      .def("stats", &stats_of);
  py::class_<udp::Server, std::shared_ptr<udp::Server>>(m, "UdpAggregator")
      .def(
          py::init([](const std::string& listen, const std::string& key) {
            const Key128 secret = aggregate::key_of(key);
            return make<udp::Server>(
                aggregate::front_door(listen, secret).socket, secret);
          }),
          "Listens at \"host:port\" for packets of workers that have the key.",
          py::arg("listen"),
          py::arg("key"),
          free)
      .def_property_readonly("address", &udp::Server::address)
      .def("drain", &udp::Server::drain, "Takes no more sessions.", free)
      .def("stats", &udp_stats_of);
  m.def("settings", [] {
    const AggregatorSettings s = aggregator_settings();
    return py::make_tuple(s.listen, s.stats, s.key);
  });
}

} // namespace fusedpg
