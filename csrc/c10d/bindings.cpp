// The Python module fusedpg._C. torch._C._distributed_c10d must be imported
// first: it registers the base classes.

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include "base/ownership.hpp"
#include "c10d/process_group_fused.hpp"

namespace py = pybind11;

namespace fusedpg {
namespace {

using Milliseconds = std::chrono::milliseconds;

void set_python_factory(py::object factory) {
  // Leaked on purpose: it may be called until the process ends.
  auto* held = new py::object(std::move(factory));
  set_delegate_factory([held](
                           const c10::intrusive_ptr<c10d::Store>& store,
                           int rank,
                           int size,
                           Milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout)
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  });
}

py::dict info_dict(ProcessGroupFused& group) {
  const ProcessGroupFused::Info info = group.info();
  py::dict d;
  d["engine"] = info.engine;
  d["world_size"] = group.getSize();
  d["local_world_size"] = info.local_world_size;
  d["threads"] = info.threads;
  d["isa"] = info.isa;
  d["arena_reserved"] = info.arena_reserved;
  d["arena_used"] = info.arena_used;
  d["sequence_number"] = info.sequence_number;
  d["state"] = info.failed ? "failed" : "ok";
  return d;
}

void bind_options(py::module_& m) {
  using Options = ProcessGroupFused::Options;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(
      m, "Options")
      .def(
          py::init([](Milliseconds timeout,
                      std::optional<int64_t> arena_bytes,
                      std::optional<int> threads,
                      std::optional<bool> nan_check) {
            TORCH_CHECK_VALUE(
                !arena_bytes || *arena_bytes >= 0,
                "fused: arena_bytes must not be negative");
            auto options = c10::make_intrusive<Options>(timeout);
            if (arena_bytes) {
              options->engine.arena_bytes = static_cast<size_t>(*arena_bytes);
            }
            options->engine.threads = threads;
            options->engine.nan_check = nan_check;
            return options;
          }),
          py::kw_only(),
          py::arg("timeout") = Milliseconds(kBackendDefaultTimeout),
          py::arg("arena_bytes") = py::none(),
          py::arg("threads") = py::none(),
          py::arg("nan_check") = py::none())
      .def_property_readonly(
          "arena_bytes", [](const Options& o) { return o.engine.arena_bytes; })
      .def_property_readonly(
          "threads", [](const Options& o) { return o.engine.threads; })
      .def_property_readonly(
          "nan_check", [](const Options& o) { return o.engine.nan_check; })
      .def(
          "__copy__",
          [](const Options& o) { return c10::make_intrusive<Options>(o); })
      .def("__deepcopy__", [](const Options& o, const py::dict&) {
        return c10::make_intrusive<Options>(o);
      });
}

void bind_group(py::module_& m) {
  py::class_<
      ProcessGroupFused,
      c10::intrusive_ptr<ProcessGroupFused>,
      c10d::Backend>(m, "ProcessGroupFused")
      .def(
          py::init<
              const c10::intrusive_ptr<c10d::Store>&,
              int,
              int,
              c10::intrusive_ptr<ProcessGroupFused::Options>>(),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &ProcessGroupFused::getBackendOptions)
      .def(
          "empty",
          [](ProcessGroupFused& group,
             const std::vector<int64_t>& sizes,
             at::ScalarType dtype) { return group.empty(sizes, dtype); },
          py::arg("sizes"),
          py::arg("dtype"))
      .def("in_arena", &ProcessGroupFused::in_arena, py::arg("tensor"))
      .def("info", &info_dict)
      .def(
          "fused_adamw_",
          [](ProcessGroupFused& group,
             std::vector<at::Tensor> params,
             std::vector<at::Tensor> grads,
             std::vector<at::Tensor> exp_avgs,
             std::vector<at::Tensor> exp_avg_sqs,
             std::vector<at::Tensor> max_exp_avg_sqs,
             std::vector<at::Tensor> state_steps,
             std::variant<double, at::Tensor> lr,
             double beta1,
             double beta2,
             double weight_decay,
             double eps,
             bool amsgrad,
             bool maximize,
             std::optional<at::Tensor> grad_scale,
             std::optional<at::Tensor> found_inf,
             bool mean,
             bool async_op) -> c10::intrusive_ptr<c10d::Work> {
            return group.fused_adamw_(
                {std::move(params),
                 std::move(grads),
                 std::move(exp_avgs),
                 std::move(exp_avg_sqs),
                 std::move(max_exp_avg_sqs),
                 std::move(state_steps),
                 std::move(lr),
                 beta1,
                 beta2,
                 weight_decay,
                 eps,
                 amsgrad,
                 maximize,
                 std::move(grad_scale),
                 std::move(found_inf),
                 mean},
                async_op);
          },
          py::arg("params"),
          py::arg("grads"),
          py::arg("exp_avgs"),
          py::arg("exp_avg_sqs"),
          py::arg("max_exp_avg_sqs"),
          py::arg("state_steps"),
          py::kw_only(),
          py::arg("lr"),
          py::arg("beta1"),
          py::arg("beta2"),
          py::arg("weight_decay"),
          py::arg("eps"),
          py::arg("amsgrad"),
          py::arg("maximize"),
          py::arg("grad_scale"),
          py::arg("found_inf"),
          py::arg("mean"),
          py::arg("async_op"),
          py::call_guard<py::gil_scoped_release>());
}

py::tuple shard_range_tuple(int64_t numel, int64_t world_size, int64_t rank) {
  TORCH_CHECK_VALUE(
      numel >= 0 && world_size > 0 && rank >= 0 && rank < world_size,
      "fused: shard_range(numel=",
      numel,
      ", world_size=",
      world_size,
      ", rank=",
      rank,
      ") needs numel >= 0 and 0 <= rank < world_size");
  const ShardRange range = shard_range(numel, world_size, rank);
  return py::make_tuple(range.offset, range.length);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = FUSEDPG_TORCH_VERSION;
  m.attr("version") = FUSEDPG_VERSION;
  bind_options(m);
  bind_group(m);
  m.def(
      "shard_range",
      &shard_range_tuple,
      py::arg("numel"),
      py::arg("world_size"),
      py::arg("rank"));
  m.def("isa", [] { return std::string(kernels::table()->name); });
  m.def("_set_delegate_factory", &set_python_factory);
  m.def(
      "_shutdown_all_groups",
      &shutdown_all_groups,
      py::call_guard<py::gil_scoped_release>());
}

} // namespace fusedpg
