// The kernels of libfusedpg_cuda.so one by one, on tensors: a Python module for
// benchmarks/gpu.py and tests/gpu, through the headers that the engine uses. A
// launch sees one rank of a group that need not exist.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ownership.hpp"
#include "cuda/device.hpp"
#include "cuda/layout.hpp"

namespace py = pybind11;

namespace fusedpg::cuda {
namespace {

using Tensor = py::object; // torch's, or None
using Tensors = std::vector<Tensor>; // empty: none

size_t numel(const Tensor& tensor) {
  return tensor.attr("numel")().cast<size_t>();
}

template <typename T = void>
T* address(const Tensor& tensor) {
  return tensor.is_none() || numel(tensor) == 0
      ? nullptr
      : reinterpret_cast<T*>(tensor.attr("data_ptr")().cast<uintptr_t>());
}

template <typename T = void>
T* address(const Tensors& tensors, size_t i) {
  return tensors.empty() ? nullptr : address<T>(tensors[i]);
}

DType type_of(const Tensor& tensor) {
  const auto name = py::str(tensor.attr("dtype")).cast<std::string>();
  for (const DType type :
       {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (name == std::string("torch.") + dtype_name(type)) {
      return type;
    }
  }
  throw py::type_error("the kernels know no " + name);
}

kernels::Formula formula_of(const std::string& name) {
  using kernels::Formula;
  static const std::map<std::string, Formula> formulas{
      {"sgd", Formula::kSgd},
      {"adam", Formula::kAdam},
      {"lamb", Formula::kLamb}};
  return formulas.at(name);
}

kernels::Hyper make_hyper(const py::dict& values) {
  using kernels::Hyper;
  static const std::map<std::string, double Hyper::*> numbers{
      {"lr", &Hyper::lr},
      {"beta1", &Hyper::beta1},
      {"beta2", &Hyper::beta2},
      {"eps", &Hyper::eps},
      {"weight_decay", &Hyper::weight_decay},
      {"momentum", &Hyper::momentum}};
  static const std::map<std::string, bool Hyper::*> flags{
      {"nesterov", &Hyper::nesterov},
      {"first_step", &Hyper::first_step},
      {"decoupled", &Hyper::decoupled},
      {"amsgrad", &Hyper::amsgrad}};
  Hyper hyper;
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    if (const auto number = numbers.find(name); number != numbers.end()) {
      hyper.*number->second = value.cast<double>();
    } else if (const auto flag = flags.find(name); flag != flags.end()) {
      hyper.*flag->second = value.cast<bool>();
    } else {
      throw py::key_error(name);
    }
  }
  return hyper;
}

// Launches go to torch's stream, or to one of their own where the library is
// not CUDA's (the tests' fake).
class Launcher {
 public:
  Launcher(const CudaApi& api, const Tensor& tensor)
      : api_(api),
        device_(tensor.attr("device")) {
    if (device_.attr("type").cast<std::string>() != "cuda") {
      own_ = make_stream(api_);
    }
  }

  template <typename Args>
  void launch(
      const char* what,
      int (*CudaApi::*kernel)(const Args*, Stream),
      const Args& args) const {
    check(api_, what, (api_.*kernel)(&args, stream()));
  }

  void synchronize() const {
    check(api_, "synchronize", api_.stream_synchronize(stream()));
  }

  DeviceMemory zeros(size_t bytes) const {
    bytes = std::max<size_t>(bytes, 1);
    DeviceMemory memory = allocate_device(api_, bytes);
    check(api_, "clear", api_.clear(memory.get(), bytes, stream()));
    return memory;
  }

  template <typename T>
  DeviceMemory upload(const std::vector<T>& values) const {
    const size_t bytes = values.size() * sizeof(T);
    DeviceMemory memory = zeros(bytes);
    check(
        api_, "copy", api_.copy(memory.get(), values.data(), bytes, stream()));
    synchronize(); // `values` may go
    return memory;
  }

 private:
  Stream stream() const {
    if (own_) {
      return own_.get();
    }
    const py::object current = py::module_::import("torch.cuda")
                                   .attr("current_stream")(device_)
                                   .attr("cuda_stream");
    return reinterpret_cast<Stream>(current.cast<uintptr_t>());
  }

  const CudaApi& api_;
  const py::object device_;
  OwnedStream own_;
};

template <typename T>
T* at(const DeviceMemory& memory) {
  return static_cast<T*>(memory.get());
}

// The memory of ranks that are one process on one GPU: that of rank r lies at
// `base` + r * `stride`, whoever has mapped it there. Behind the first
// `arena_bytes` of each is what the kernels of the direct path need, of zeros.
class MappedArenas {
 public:
  MappedArenas(
      const CudaApi& api,
      uint64_t base,
      uint64_t stride,
      int size,
      uint64_t arena_bytes)
      : stop_(allocate_host(api, sizeof(uint64_t))) {
    *static_cast<uint64_t*>(stop_.get()) = 0;
    peers_.size = size;
    for (int rank = 0; rank < size; ++rank) {
      peers_.arenas[rank] =
          reinterpret_cast<char*>(base + static_cast<uint64_t>(rank) * stride);
    }
    peers_.room = arena_bytes;
    peers_.stop = static_cast<const uint64_t*>(stop_.get());
    peers_.nanoseconds = 60'000'000'000;
    peers_.late = static_cast<uint64_t*>(stop_.get()); // which ends the others
    peers_.sequence = 1;
  }

  PeerAccess of(int rank) const {
    PeerAccess peers = peers_;
    peers.rank = rank;
    return peers;
  }

  // Ends kernels that wait for a peer.
  void stop() {
    __atomic_store_n(static_cast<uint64_t*>(stop_.get()), 1, __ATOMIC_RELEASE);
  }

 private:
  HostMemory stop_;
  PeerAccess peers_{};
};

// What a launch knows of some tensors: one chunk that holds all of this rank's
// slices. `grads` are whole gradients, or update() gets a block of the wire
// with reduced ones. States and masters are slices.
class Slices {
 public:
  Slices(
      const CudaApi& api,
      int rank,
      int size,
      const py::dict& hyper,
      Tensors params,
      Tensors grads,
      Tensors outputs,
      Tensors masters,
      std::vector<Tensors> states,
      Tensors steps)
      : launcher_(api, params.at(0)),
        hyper_(make_hyper(hyper)),
        params_(std::move(params)),
        grads_(std::move(grads)),
        outputs_(std::move(outputs)),
        masters_(std::move(masters)),
        states_(std::move(states)),
        steps_(std::move(steps)) {
    std::vector<size_t> counts;
    std::vector<TensorInfo> infos;
    for (size_t i = 0; i < params_.size(); ++i) {
      counts.push_back(numel(params_[i]));
      shards.push_back(shard_size(static_cast<int64_t>(counts[i]), size));
      TensorInfo info{};
      info.param = address(params_[i]);
      info.grad = address(grads_, i);
      info.output = address(outputs_, i);
      info.master = address(masters_, i);
      for (size_t s = 0; s < states_.size(); ++s) {
        info.state[s] = address(states_[s], i);
      }
      info.step = address<float>(steps_, i);
      info.count = counts[i];
      info.shard = static_cast<uint64_t>(shards[i]);
      infos.push_back(info);
    }
    constexpr size_t kAll = size_t(1) << 40;
    const Layout cut = make_layout(counts, size, kAll, kAll);
    const size_t n = counts.size();
    num_tensors_ = static_cast<uint32_t>(n);
    infos_ = launcher_.upload(infos);
    pieces_ = launcher_.upload(cut.pieces);
    tiles_ = launcher_.upload(cut.tiles);
    tile_list_ = launcher_.upload(cut.tile_list);
    tile_begin_ = launcher_.upload(cut.tile_begin);
    hypers_ = launcher_.upload(std::vector<kernels::Hyper>{hyper_});
    scalars_ = launcher_.zeros(n * sizeof(TensorScalars));
    tile_sums_ = launcher_.zeros(2 * cut.tiles.size() * sizeof(double));
    sums_ = launcher_.zeros(2 * n * sizeof(double));
    chunk_.tensors = at<TensorInfo>(infos_);
    chunk_.pieces = at<ShardPiece>(pieces_);
    chunk_.tiles = at<Tile>(tiles_);
    chunk_.num_tiles = static_cast<uint32_t>(cut.tiles.size());
    chunk_.rank = rank;
    chunk_.size = size;
    chunk_.block = cut.max_block;
  }

  uint64_t block() const {
    return chunk_.block;
  }

  void synchronize() const {
    launcher_.synchronize();
  }

  // To the bytes of a tensor, which follow those of other ranks.
  void propose(
      const Tensor& header,
      uint64_t hash,
      const Tensor& used,
      const Tensor& found) const {
    ProposeArgs args{};
    args.to = header_at(header, hash);
    args.copies = 1;
    args.items = static_cast<uint32_t>(numel(header));
    args.used = address<uint8_t>(used);
    args.found_inf = address<float>(found);
    launcher_.launch("propose", &CudaApi::propose, args);
  }

  void prepare(
      double divisor,
      const Tensor& headers,
      uint64_t hash,
      const Tensor& used,
      const Tensor& found_inf,
      const Tensor& mismatch,
      uint64_t sequence) const {
    PrepareArgs args{};
    args.from = header_at(headers, hash);
    args.tensors = chunk_.tensors;
    args.hypers = at<kernels::Hyper>(hypers_);
    args.divisor = divisor;
    args.scalars = at<TensorScalars>(scalars_);
    args.used = address<uint8_t>(used);
    args.found_inf = address<float>(found_inf);
    args.mismatch = address<uint64_t>(mismatch);
    args.sequence = sequence;
    launcher_.launch("prepare", &CudaApi::prepare, args);
  }

  void pack(const Tensor& wire, double weight) const {
    const PackArgs args{chunk_, address(wire), type_of(wire), weight, false};
    launcher_.launch("pack", &CudaApi::pack, args);
  }

  void unpack(const Tensor& wire, bool to_outputs, double divisor) const {
    UnpackArgs args{};
    args.chunk = chunk_;
    args.wire = address(wire);
    args.type = type_of(wire);
    args.to_outputs = to_outputs;
    args.divisor = divisor;
    launcher_.launch("unpack", &CudaApi::unpack, args);
  }

  // `grads`, `out`: this rank's blocks of the wire; without them the tensors
  // themselves. `folds`: `grads` are the blocks of all ranks, to be added.
  void update(
      const std::string& formula,
      const Tensor& grads,
      const Tensor& out,
      bool folds) const {
    UpdateArgs args = update_args(formula_of(formula), grads, out);
    args.folds = folds;
    launcher_.launch("update", &CudaApi::update, args);
  }

  // What all ranks tell each other before a step; `headers` are bytes, a row for
  // each rank.
  void exchange(
      const MappedArenas& arenas,
      const Tensor& headers,
      const Tensor& offsets,
      const Tensor& all_offsets) const {
    ExchangeArgs args{};
    args.peers = arenas.of(chunk_.rank);
    args.headers = address<uint64_t>(headers);
    args.offsets = address<uint64_t>(offsets);
    args.all_offsets = address<uint64_t>(all_offsets);
    args.num_tensors = num_tensors_;
    args.header_words =
        headers.attr("size")(-1).cast<uint32_t>() / sizeof(uint64_t);
    launcher_.launch("exchange", &CudaApi::exchange, args);
  }

  // The whole step of this rank; `offsets` are of gradients and parameters in
  // all ranks' memory, by rank.
  void direct_step(
      const std::string& formula,
      const MappedArenas& arenas,
      const Tensor& offsets) const {
    DirectArgs args{};
    args.update = update_args(formula_of(formula), py::none(), py::none());
    args.peers = arenas.of(chunk_.rank);
    args.offsets = address<uint64_t>(offsets);
    args.num_tensors = num_tensors_;
    launcher_.launch("direct_step", &CudaApi::direct_step, args);
  }

  // Both halves of a step of a group of one rank.
  void lamb(const Tensor& grads, const Tensor& out) const {
    const UpdateArgs args = update_args(kernels::Formula::kLamb, grads, out);
    const MomentsArgs moments{args, at<double>(tile_sums_)};
    launcher_.launch("lamb_moments", &CudaApi::lamb_moments, moments);
    AddSumsArgs add{};
    add.partial = at<double>(tile_sums_);
    add.list = at<uint32_t>(tile_list_);
    add.begin = at<uint32_t>(tile_begin_);
    add.sums = at<double>(sums_);
    add.num_tensors = num_tensors_;
    add.pairs = 1;
    launcher_.launch("add_sums", &CudaApi::add_sums, add);
    TrustArgs trust{};
    trust.gathered = at<double>(sums_);
    trust.tensors = chunk_.tensors;
    trust.hypers = at<kernels::Hyper>(hypers_);
    trust.scalars = at<TensorScalars>(scalars_);
    trust.num_tensors = num_tensors_;
    trust.size = 1;
    launcher_.launch("trust", &CudaApi::trust, trust);
    launcher_.launch("update", &CudaApi::update, args);
  }

  std::vector<int64_t> shards; // elements of each tensor's full shard

 private:
  Header header_at(const Tensor& bytes, uint64_t hash) const {
    Header header{};
    header.data = address<char>(bytes);
    header.stride =
        header.data == nullptr ? 0 : bytes.attr("size")(-1).cast<uint64_t>();
    header.hash = hash;
    header.type = DType::kOpaque;
    header.tensors = num_tensors_;
    header.rank = chunk_.rank;
    header.size = chunk_.size;
    return header;
  }

  UpdateArgs update_args(
      kernels::Formula formula,
      const Tensor& grads,
      const Tensor& out) const {
    UpdateArgs args{};
    args.chunk = chunk_;
    args.formula = formula;
    args.param_type = type_of(params_[0]);
    args.grad_type = !grads.is_none() ? type_of(grads)
        : grads_.empty()              ? args.param_type
                                      : type_of(grads_[0]);
    args.state_type =
        states_.empty() ? DType::kFloat32 : type_of(states_[0].at(0));
    args.masters = !masters_.empty();
    args.decoupled = hyper_.decoupled;
    args.amsgrad = hyper_.amsgrad;
    args.momentum = hyper_.momentum != 0;
    args.nesterov = hyper_.nesterov;
    args.scalars = at<TensorScalars>(scalars_);
    args.grads = address(grads);
    args.params_out = address(out);
    return args;
  }

  const Launcher launcher_;
  const kernels::Hyper hyper_;
  // Kept: the device's arrays hold their addresses.
  const Tensors params_, grads_, outputs_, masters_;
  const std::vector<Tensors> states_;
  const Tensors steps_;
  DeviceMemory infos_, pieces_, tiles_, tile_list_, tile_begin_, hypers_;
  DeviceMemory scalars_, tile_sums_, sums_;
  uint32_t num_tensors_ = 0;
  Chunk chunk_{};
};

} // namespace
} // namespace fusedpg::cuda

PYBIND11_MODULE(fusedpg_gpu_table, m) {
  using namespace fusedpg;
  using namespace fusedpg::cuda;
  using py::arg;
  const Tensor none = py::none();
  const Tensors no_tensors;

  m.def("header_bytes", &header_bytes);
  m.def("shard_size", &shard_size);

  py::class_<CudaApi>(m, "CudaApi")
      .def_readonly("name", &CudaApi::name)
      .def_readonly("runtime_version", &CudaApi::runtime_version);
  m.def("load_api", &load_cuda_api, py::return_value_policy::reference);

  py::class_<MappedArenas>(m, "MappedArenas")
      .def(py::init<const CudaApi&, uint64_t, uint64_t, int, uint64_t>())
      .def("stop", &MappedArenas::stop);
  m.attr("DIRECT_ROOM") = sizeof(DirectRoom);
  m.attr("DIRECT_BLOCKS") = kDirectBlocks;
  m.attr("SIGNAL_BYTES") = sizeof(DirectSignals);

  py::class_<Slices>(m, "Slices")
      .def(
          py::init<
              const CudaApi&,
              int,
              int,
              const py::dict&,
              Tensors,
              Tensors,
              Tensors,
              Tensors,
              std::vector<Tensors>,
              Tensors>(),
          arg("api"),
          arg("rank"),
          arg("size"),
          arg("hyper"),
          arg("params"),
          py::kw_only(),
          arg("grads") = no_tensors,
          arg("outputs") = no_tensors,
          arg("masters") = no_tensors,
          arg("states") = std::vector<Tensors>(),
          arg("steps") = no_tensors)
      .def_readonly("shards", &Slices::shards)
      .def_property_readonly("block", &Slices::block)
      .def("synchronize", &Slices::synchronize)
      .def(
          "propose",
          &Slices::propose,
          arg("header"),
          arg("hash"),
          py::kw_only(),
          arg("used") = none,
          arg("found") = none)
      .def(
          "prepare",
          &Slices::prepare,
          py::kw_only(),
          arg("divisor") = 1.0,
          arg("headers") = none,
          arg("hash") = 0,
          arg("used") = none,
          arg("found_inf") = none,
          arg("mismatch") = none,
          arg("sequence") = 0)
      .def("pack", &Slices::pack, arg("wire"), arg("weight") = 1.0)
      .def(
          "unpack",
          &Slices::unpack,
          arg("wire"),
          py::kw_only(),
          arg("to_outputs") = false,
          arg("divisor") = 1.0)
      .def(
          "update",
          &Slices::update,
          arg("formula"),
          arg("grads"),
          arg("out") = none,
          py::kw_only(),
          arg("folds") = false)
      .def(
          "exchange",
          &Slices::exchange,
          arg("arenas"),
          arg("headers"),
          arg("offsets"),
          arg("all_offsets"))
      .def(
          "direct_step",
          &Slices::direct_step,
          arg("formula"),
          arg("arenas"),
          arg("offsets"))
      .def("lamb", &Slices::lamb, arg("grads"), arg("out") = none);
}
