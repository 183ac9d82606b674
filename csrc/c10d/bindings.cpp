// The Python module fusedpg._C. torch._C._distributed_c10d must be imported
// first: it registers the base classes.

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/ownership.hpp"
#include "c10d/bindings.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/delegate.hpp"
#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"
#include "cuda/cuda_api.hpp"
#include "host/domain.hpp"

namespace fusedpg {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Loaded = std::shared_ptr<cuda::LoadedProgram>;

void set_python_factory(py::object factory) {
  // Leaked on purpose: it may be called until the process ends.
  auto* held = new py::object(std::move(factory));
  set_delegate_factory(
      [held](
          const std::string& device,
          const c10::intrusive_ptr<c10d::Store>& store,
          int rank,
          int size,
          const c10::intrusive_ptr<c10d::Backend::Options>& options) {
        const py::gil_scoped_acquire gil;
        return (*held)(device, store, rank, size, options)
            .cast<c10::intrusive_ptr<c10d::Backend>>();
      });
}

py::dict info_dict(ProcessGroupFused& group) {
  GroupInfo info;
  {
    // Whoever connects the hosts may need it.
    const py::gil_scoped_release release;
    info = group.info();
  }
  py::dict d;
  d["backend"] = group.getBackendName();
  d["engine"] = info.engine;
  d["world_size"] = group.getSize();
  d["local_world_size"] = info.local_ranks.size();
  d["local_ranks"] = info.local_ranks;
  d["threads"] = info.threads;
  d["isa"] = info.isa;
  d["arena_reserved"] = info.arena_reserved;
  d["arena_used"] = info.arena_used;
  d["sequence_number"] = info.sequence_number;
  d["cuda_arena"] = info.cuda_arena;
  if (info.nccl_version != 0) {
    d["nccl_version"] = info.nccl_version;
    d["cuda_path"] = info.cuda_path;
  }
  if (!info.transport.empty()) {
    d["transport"] = info.transport;
  }
  if (!info.aggregators.empty()) {
    d["aggregators"] = info.aggregators;
    d["aggregate"] = info.aggregate;
  }
  if (!info.address.empty()) {
    d["address"] = info.address;
  }
  d["state"] = info.failed ? "failed" : "ok";
  return d;
}

void set_python_announcer(py::object announcer) {
  auto* held = new py::object(std::move(announcer)); // leaked, as above
  ProcessGroupFused::set_announcer([held](
                                       ProcessGroupFused& group, bool asked) {
    const py::gil_scoped_acquire gil;
    try {
      (*held)(group.getBackendOptions()->group_name, info_dict(group), asked);
    } catch (py::error_already_set& error) {
      // A filter of the user's log may raise; the group is there.
      error.discard_as_unraisable("fusedpg's log line for a new group");
    }
  });
}

py::dict stats_dict(const Stats& stats, const Waits& waits, int rank) {
  py::dict all;
  for (int code = 0; code < kOpCodes; ++code) {
    const auto op = static_cast<OpCode>(code);
    const OpStats s = stats.of(op);
    py::dict paths;
    uint64_t calls = 0;
    for (size_t p = 0; p < kDataPaths; ++p) {
      if (s.calls[p] != 0) {
        paths[path_name(static_cast<DataPath>(p))] = s.calls[p];
        calls += s.calls[p];
      }
    }
    if (calls == 0) {
      continue;
    }
    const auto share = [&](uint64_t blocks) {
      return s.blocks == 0 ? py::object(py::none())
                           : py::cast(double(blocks) / double(s.blocks));
    };
    py::dict d;
    d["calls"] = calls;
    d["paths"] = paths;
    d["bytes_sent"] = s.bytes_sent;
    d["bytes_received"] = s.bytes_received;
    d["messages_sent"] = s.messages_sent;
    d["blocks"] = s.blocks;
    d["blocks_present"] = s.blocks_present;
    d["blocks_union"] = s.blocks_union;
    d["density"] = share(s.blocks_present);
    d["union_density"] = share(s.blocks_union);
    all[op_name(op)] = d;
  }
  py::dict waited;
  for (int p = 0; p < waits.size(); ++p) {
    if (p != rank) {
      waited[py::int_(p)] = std::chrono::duration<double>(waits.of(p)).count();
    }
  }
  all["waited"] = waited;
  return all;
}

// One of the engine's options, and its name in Python.
template <typename Value>
struct EngineOption {
  // Python's integers have a sign.
  using Given = std::optional<
      std::conditional_t<std::is_same_v<Value, size_t>, int64_t, Value>>;

  const char* name;
  std::optional<Value> fusedpg::Options::* member;

  void set(fusedpg::Options& to, const Given& value) const {
    if constexpr (std::is_same_v<Value, size_t>) {
      TORCH_CHECK_VALUE(
          value.value_or(0) >= 0,
          formatted("fused: {} must not be negative", name));
    }
    to.*member = value;
  }
};
template <typename Value>
EngineOption(const char*, std::optional<Value> fusedpg::Options::*)
    -> EngineOption<Value>;

template <typename... Values>
void bind_options(py::module_& m, const EngineOption<Values>&... option) {
  using Options = ProcessGroupFused::Options;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>
      options(m, "Options");
  options
      .def(
          py::init([option...](
                       Milliseconds timeout,
                       const typename EngineOption<Values>::Given&... value,
                       c10::intrusive_ptr<c10d::Backend::Options> nccl_options,
                       bool cpu_as_cuda,
                       const std::string& name,
                       bool gloo_for_cuda) {
            auto options = c10::make_intrusive<Options>(timeout, name);
            (option.set(options->engine, value), ...);
            TORCH_CHECK_VALUE(
                !nccl_options || nccl_options->backend == "nccl",
                "fused: nccl_options must be ProcessGroupNCCL.Options");
            options->nccl_options = std::move(nccl_options);
            options->cpu_as_cuda = cpu_as_cuda;
            options->gloo_for_cuda = gloo_for_cuda;
            return options;
          }),
          py::kw_only(),
          py::arg("timeout") = Milliseconds(kBackendDefaultTimeout),
          (py::arg(option.name) = py::none())...,
          py::arg("nccl_options") = py::none(),
          py::arg("_cpu_as_cuda") = false,
          py::arg("_name") = "fused",
          py::arg("_gloo_for_cuda") = false)
      // As Gloo's options have them; neither has an effect.
      .def_readwrite("_threads", &Options::threads)
      .def_property_readonly(
          "_devices", [](const Options&) { return py::list(); })
      .def_readonly("_gloo_for_cuda", &Options::gloo_for_cuda)
      .def_readonly("nccl_options", &Options::nccl_options)
      .def(
          "__copy__",
          [](const Options& o) { return c10::make_intrusive<Options>(o); })
      .def("__deepcopy__", [](const Options& o, const py::dict&) {
        return c10::make_intrusive<Options>(o);
      });
  (options.def_property_readonly(
       option.name,
       [member = option.member](const Options& o) { return o.engine.*member; }),
   ...);
}

void bind_options(py::module_& m) {
  using Engine = fusedpg::Options;
  bind_options(
      m,
      EngineOption{"arena_bytes", &Engine::arena_bytes},
      EngineOption{"threads", &Engine::threads},
      EngineOption{"nan_check", &Engine::nan_check},
      EngineOption{"block_skip", &Engine::block_skip},
      EngineOption{"block_size", &Engine::block_size},
      EngineOption{"cuda_chunk_bytes", &Engine::cuda_chunk_bytes},
      EngineOption{"cuda_arena_bytes", &Engine::cuda_arena_bytes},
      EngineOption{"nccl", &Engine::nccl},
      EngineOption{"half_sums", &Engine::half_sums},
      EngineOption{"transport", &Engine::transport},
      EngineOption{"order", &Engine::order},
      EngineOption{"aggregators", &Engine::aggregators},
      EngineOption{"aggregate", &Engine::aggregate},
      EngineOption{"aggregate_rates", &Engine::aggregate_rates},
      EngineOption{
          "aggregate_message_bytes", &Engine::aggregate_message_bytes});
}

c10::intrusive_ptr<c10d::Work> fused_step_(
    ProcessGroupFused& group,
    const std::string& op,
    std::vector<at::Tensor> params,
    std::vector<at::Tensor> grads,
    std::vector<std::vector<at::Tensor>> states,
    std::vector<at::Tensor> state_steps,
    std::vector<HyperArguments> hypers,
    std::vector<int64_t> hyper_index,
    std::vector<at::Tensor> master_params,
    bool masters_follow,
    bool mean,
    std::optional<double> weight,
    std::optional<at::Tensor> used,
    bool reduced,
    bool shared_params,
    bool block_skip,
    uint64_t done_before,
    std::optional<at::Tensor> grad_scale,
    std::optional<at::Tensor> found_inf,
    bool async_op) {
  StepArguments a;
  a.op = step_inputs(op).op;
  a.params = std::move(params);
  a.grads = std::move(grads);
  a.masters = std::move(master_params);
  a.masters_follow = masters_follow;
  a.states = std::move(states);
  a.steps = std::move(state_steps);
  a.hypers = std::move(hypers);
  a.hyper_index = std::move(hyper_index);
  a.reduction = {mean, weight, std::move(used)};
  a.reduced = reduced;
  a.shared_params = shared_params;
  a.block_skip = block_skip;
  a.done_before = done_before;
  a.grad_scale = std::move(grad_scale);
  a.found_inf = std::move(found_inf);
  return group.fused_step_(std::move(a), async_op);
}

void bind_hyper(py::module_& m) {
  py::class_<cuda::LoadedProgram, Loaded>(
      m, "LoadedProgram", "A generated kernel that a GPU's driver has loaded.");

  py::class_<HyperArguments>(m, "Hyper")
      .def(
          py::init([](std::variant<double, at::Tensor> lr,
                      const py::kwargs& others) {
            StepHyper h;
            for (const auto& [key, given] : others) {
              const auto name = key.cast<std::string_view>();
              bool taken = false;
              kernels::for_each_hyper(h, [&](const char* known, auto& value) {
                if (name == known) {
                  using Value = std::decay_t<decltype(value)>;
                  py::detail::make_caster<Value> caster;
                  taken = caster.load(given, /*convert=*/true);
                  if (taken) {
                    value = py::detail::cast_op<Value>(caster);
                  }
                }
              });
              if (!taken) {
                throw py::type_error(formatted(
                    "Hyper: {}={} is no hyperparameter, or of another type",
                    name,
                    std::string(py::repr(given))));
              }
            }
            return HyperArguments{std::move(lr), h};
          }),
          py::kw_only(),
          py::arg("lr"));
}

// Methods that torch's ProcessGroupNCCL has in Python, of the one that serves
// the group's tensors on GPUs.
template <typename Class>
void bind_delegates_methods(Class& group) {
  for (const char* name :
       {"register_mem_pool",
        "deregister_mem_pool",
        "_add_ephemeral_timeout",
        "_start_time_estimate",
        "_end_time_estimate",
        "suspend",
        "resume",
        "memory_stats"}) {
    group.def(
        name,
        [name](ProcessGroupFused& self, const py::args& args) {
          c10::intrusive_ptr<c10d::Backend> delegate;
          {
            const py::gil_scoped_release no_gil;
            delegate = self.delegate();
          }
          return py::object(py::cast(delegate).attr(name)(*args));
        },
        "ProcessGroupNCCL's.");
  }
}

void bind_group(py::module_& m) {
  py::class_<
      ProcessGroupFused,
      c10::intrusive_ptr<ProcessGroupFused>,
      c10d::Backend>
      group(m, "ProcessGroupFused");
  bind_delegates_methods(group);
  group
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store,
                      int rank,
                      int size,
                      c10::intrusive_ptr<ProcessGroupFused::Options> options,
                      const c10::intrusive_ptr<ProcessGroupFused>& world) {
            ProcessGroupFused::Known known;
            const auto& ranks = options->global_ranks_in_group;
            if (world && ranks.size() == static_cast<size_t>(size)) {
              known = world->known({ranks.begin(), ranks.end()});
            }
            return c10::make_intrusive<ProcessGroupFused>(
                store, rank, size, std::move(options), std::move(known));
          }),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::arg("world") = c10::intrusive_ptr<ProcessGroupFused>(),
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &ProcessGroupFused::getBackendOptions)
      .def(
          "_set_default_timeout",
          &ProcessGroupFused::setTimeout,
          "Gloo's and NCCL's name of setTimeout.",
          py::arg("timeout"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "perform_nocolor_split",
          [](ProcessGroupFused&, const py::object&) {},
          "What ranks outside of a new group do where the default group is "
          "bound to a GPU: nothing, as the new one is no split of NCCL's.",
          py::arg("device"))
      .def_static("_layout_is_gloos", &ProcessGroupFused::layout_is_gloos)
      .def(
          "empty",
          [](ProcessGroupFused& group,
             const std::vector<int64_t>& sizes,
             at::ScalarType dtype,
             at::Device device,
             bool lives_long) {
            const py::gil_scoped_release no_gil;
            return group.empty(sizes, dtype, device, lives_long);
          },
          "An uninitialised tensor in the group's arena: see fusedpg.empty. "
          "With "
          "lives_long its memory goes back to the system when it is freed.",
          py::arg("sizes"),
          py::arg("dtype"),
          py::arg("device") = at::Device(at::kCPU),
          py::kw_only(),
          py::arg("lives_long") = false)
      .def(
          "in_arena",
          &ProcessGroupFused::in_arena,
          "Whether the tensor's storage lies in the group's arena.",
          py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "refuse",
          &ProcessGroupFused::refuse,
          "Tells the peers why this rank cannot begin an operation.",
          py::arg("reason"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "set_async_call",
          &ProcessGroupFused::set_async_call,
          "Marks what this thread does on the group from now on as a part of "
          "this asynchronous call of a fused function, which ranks compare; 0: "
          "of none.",
          py::arg("number"))
      .def("info", &info_dict, "Facts about the group: see fusedpg.group_info.")
      .def(
          "stats",
          [](ProcessGroupFused& group) {
            const Stats* stats = nullptr;
            {
              const py::gil_scoped_release no_gil;
              stats = &group.stats();
            }
            return stats_dict(*stats, group.waits(), group.getRank());
          },
          "What operations have cost: see fusedpg.stats.")
      .def(
          "reset_stats",
          &ProcessGroupFused::reset_stats,
          "Begins to count anew.",
          py::call_guard<py::gil_scoped_release>())
      .def(
          "sparse_all_reduce",
          [](ProcessGroupFused& group,
             const at::Tensor& tensor,
             const c10d::ReduceOp& op,
             std::optional<int64_t> block_size,
             double threshold,
             std::optional<at::Tensor> residual,
             std::optional<at::Tensor> bitmap,
             bool async_op) {
            return group.sparse_all_reduce(
                tensor,
                {op,
                 block_size.value_or(group.block_size()),
                 threshold,
                 std::move(residual),
                 std::move(bitmap)},
                async_op);
          },
          "all_reduce that moves only blocks that are not zero: see "
          "fusedpg.sparse_all_reduce.",
          py::arg("tensor"),
          py::arg("op"),
          py::arg("block_size"),
          py::arg("threshold"),
          py::arg("residual"),
          py::arg("bitmap"),
          py::arg("async_op"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "empty_shared",
          [](ProcessGroupFused& group,
             const std::vector<int64_t>& sizes,
             at::ScalarType dtype) {
            const py::gil_scoped_release no_gil;
            return group.empty_shared(sizes, dtype);
          },
          "Collective: a tensor of which the ranks of the machine hold one "
          "copy.",
          py::arg("sizes"),
          py::arg("dtype"))
      .def(
          "fused_step_",
          &fused_step_,
          "One optimizer step as one collective, with a Hyper for each "
          "parameter "
          "group: see fusedpg.fused_adamw_.",
          py::arg("op"),
          py::arg("params"),
          py::arg("grads"),
          py::arg("states"),
          py::arg("state_steps"),
          py::arg("hypers"),
          py::kw_only(),
          py::arg("hyper_index") = std::vector<int64_t>(),
          py::arg("master_params") = std::vector<at::Tensor>(),
          py::arg("masters_follow") = false,
          py::arg("mean") = true,
          py::arg("weight") = py::none(),
          py::arg("used") = py::none(),
          py::arg("reduced") = false,
          py::arg("shared_params") = false,
          py::arg("block_skip") = false,
          py::arg("done_before") = 0,
          py::arg("grad_scale") = py::none(),
          py::arg("found_inf") = py::none(),
          py::arg("async_op") = false,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "on_gpu",
          &ProcessGroupFused::on_gpu,
          "Whether the group takes a tensor for a GPU's.",
          py::arg("tensor"))
      .def(
          "program_architecture",
          [](ProcessGroupFused& group, const at::Tensor& tensor) {
            return translate(
                [&] { return group.program_architecture(tensor); });
          },
          "The compute capability of a tensor's GPU, as 90 for 9.0.",
          py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "load_program",
          [](ProcessGroupFused& group,
             const std::string& image,
             const std::string& entry,
             uint32_t parameters,
             const at::Tensor& tensor) {
            return translate([&] {
              return group.load_program(image, entry, parameters, tensor);
            });
          },
          "A kernel on a tensor's GPU, as fused_program_ takes it.",
          py::arg("image"),
          py::arg("entry"),
          py::arg("parameters"),
          py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "fused_program_",
          [](ProcessGroupFused& group,
             const std::variant<uint64_t, Loaded>& function,
             uint64_t program,
             std::string op,
             at::Tensor source,
             std::vector<at::Tensor> operands,
             std::vector<int64_t> kinds,
             std::vector<int64_t> reads,
             std::vector<at::Tensor> outputs,
             std::vector<bool> gathered,
             std::vector<double> numbers,
             std::vector<uint64_t> seeds,
             at::Tensor done,
             bool async_op,
             const std::array<uint64_t, 5>& layout,
             ProgramArguments::Phases phases) {
            const auto* address = std::get_if<uint64_t>(&function);
            return group.fused_program_(
                {address ? reinterpret_cast<ProgramFunction>(*address)
                         : nullptr,
                 address ? nullptr : std::get<Loaded>(function),
                 program,
                 std::move(op),
                 std::move(source),
                 std::move(operands),
                 std::move(kinds),
                 std::move(reads),
                 std::move(outputs),
                 std::move(gathered),
                 std::move(numbers),
                 std::move(seeds),
                 std::move(done),
                 layout,
                 std::move(phases)},
                async_op);
          },
          "A reduce-scatter, a generated function on the owned slice, and "
          "all-gathers of its results: see fusedpg/fusion/compiled.py.",
          py::arg("function"),
          py::arg("program"),
          py::arg("op"),
          py::arg("source"),
          py::arg("operands"),
          py::arg("kinds"),
          py::arg("reads"),
          py::arg("outputs"),
          py::arg("gathered"),
          py::arg("numbers"),
          py::arg("seeds"),
          py::arg("done"),
          py::arg("async_op") = false,
          py::arg("layout") = std::array<uint64_t, 5>{0, 0, 0, 1, 0},
          py::arg("phases") = ProgramArguments::Phases(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "reduce_shards_",
          [](ProcessGroupFused& group,
             std::vector<at::Tensor> grads,
             std::vector<at::Tensor> outputs,
             bool mean,
             std::optional<double> weight,
             std::optional<at::Tensor> used,
             bool async_op) {
            return group.reduce_shards_(
                {std::move(grads),
                 std::move(outputs),
                 {mean, weight, std::move(used)}},
                async_op);
          },
          "Reduces each gradient to its owners: the slice of the output that "
          "shard_range gives this rank holds the sum or mean, the rest stays.",
          py::arg("grads"),
          py::arg("outputs") = std::vector<at::Tensor>(),
          py::kw_only(),
          py::arg("mean") = true,
          py::arg("weight") = py::none(),
          py::arg("used") = py::none(),
          py::arg("async_op") = false,
          py::call_guard<py::gil_scoped_release>());
}

py::tuple shard_range_tuple(int64_t numel, int64_t world_size, int64_t rank) {
  TORCH_CHECK_VALUE(
      numel >= 0 && world_size > 0 && rank >= 0 && rank < world_size,
      formatted(
          "fused: shard_range(numel={}, world_size={}, rank={}) needs numel >= "
          "0 and 0 <= rank < world_size",
          numel,
          world_size,
          rank));
  const ShardRange range = shard_range(numel, world_size, rank);
  return py::make_tuple(range.offset, range.length);
}

// Of FlightRecorder::Sizes.
py::list shapes(const FlightRecorder::Sizes& sizes) {
  py::list all;
  for (size_t i = 0; i < sizes.size(); i += 1 + sizes[i]) {
    py::list one;
    for (int64_t d = 1; d <= sizes[i]; ++d) {
      one.append(sizes[i + d]);
    }
    all.append(std::move(one));
  }
  return all;
}

template <typename Types>
py::list type_names(const Types& types) {
  py::list all;
  for (const at::ScalarType type : types) {
    all.append(at::toString(type));
  }
  return all;
}

py::tuple flight_recorder_dump() {
  name_recorded_groups();
  FlightRecorder& recorder = FlightRecorder::get();
  const auto facts = recorder.dump();
  std::map<int, std::shared_ptr<RecordedGroup>> known;
  for (auto& group : recorder.groups()) {
    known[group->number] = group;
  }
  py::list entries;
  for (const FlightRecorder::Facts& f : facts) {
    known[f.group->number] = f.group;
    py::dict d;
    d["group"] = f.group->number;
    d["title"] = f.title;
    d["rank"] = f.group->rank;
    d["peer"] =
        f.peer < 0 ? py::object(py::none()) : py::object(py::int_(f.peer));
    d["sequence"] = f.sequence;
    d["timeout_ms"] = f.timeout_ms;
    d["created_ns"] = f.created;
    d["started_ns"] = f.started;
    d["completed_ns"] = f.completed;
    d["ended"] = f.ended;
    d["input_sizes"] = shapes(f.inputs);
    d["input_dtypes"] = type_names(f.input_types);
    d["output_sizes"] = shapes(f.outputs);
    d["output_dtypes"] = type_names(f.output_types);
    entries.append(std::move(d));
  }
  py::dict groups;
  for (const auto& [number, group] : known) {
    const RecordedGroup::Name name = recorder.name_of(*group);
    groups[py::int_(number)] =
        py::make_tuple(name.name, name.description, name.ranks);
  }
  return py::make_tuple(entries, groups);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = FUSEDPG_TORCH_VERSION;
  m.attr("version") = FUSEDPG_VERSION;
  bind_options(m);
  bind_hyper(m);
  bind_gradients(m);
  bind_step_lists(m);
  bind_group(m);
  bind_operators(m);
  compress_bindings::bind(m);
  bind_udp_worker(m);
  bind_prepared_programs(m);
  bind_earlier_calls(m);
  m.def(
      "shard_range",
      &shard_range_tuple,
      "(offset, length) of the elements that a rank owns: see "
      "fusedpg.shard_range.",
      py::arg("numel"),
      py::arg("world_size"),
      py::arg("rank"));
  m.def(
      "find_blocks",
      [](const at::Tensor& t, int64_t block_size) {
        check_tensor("find_blocks", t);
        TORCH_CHECK_VALUE(
            t.is_contiguous() && block_size > 0,
            "fused: find_blocks: needs a contiguous tensor and a block size");
        const int64_t blocks = (t.numel() + block_size - 1) / block_size;
        at::Tensor bits = at::zeros({(blocks + 63) / 64}, at::kLong);
        default_kernels().find_blocks(
            t.const_data_ptr(),
            t.nbytes(),
            static_cast<size_t>(block_size) * t.element_size(),
            reinterpret_cast<uint64_t*>(bits.data_ptr<int64_t>()));
        return bits;
      },
      "One bit for each block of a contiguous tensor, in int64 words: whether "
      "any of its bits is set.",
      py::arg("tensor"),
      py::arg("block_size"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "isa",
      [] { return std::string(default_kernels().name); },
      "The instruction set of the kernels that run by default.");
  m.def(
      "_flight_recorder_dump",
      &flight_recorder_dump,
      "The operations that the flight recorder has, oldest first, and by "
      "number "
      "the name, the description and the ranks of their groups.");
  m.def(
      "_shared_memory_refusal",
      [](int size) { return Domain::refusal(size); },
      "Why this process cannot have the shared memory of a group, or \"\".",
      py::arg("size"));
  m.def("_shared_errors", [] { return shared_errors(); });
  m.def("_set_delegate_factory", &set_python_factory);
  m.def("_set_announcer", &set_python_announcer);
  m.def("_fusion_settings", [] {
    const FusionSettings s = translate(&fusion_settings);
    return py::make_tuple(s.compiles, s.cache_dir, s.compiler, s.nvrtc);
  });
  m.def("_load_cuda_kernels", [] {
    translate([] { cuda::load_cuda_api(resolve({}).cuda_lib); });
  });
  m.def(
      "_end_at_exit",
      &end_at_exit,
      "Shuts down all groups when the interpreter exits; peers read `exit`.",
      py::arg("exit"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace fusedpg
