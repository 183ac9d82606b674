#include "c10d/bindings.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <pybind11/stl.h>

#include "c10d/process_group_fused.hpp"
#include "c10d/tensor_memory.hpp"
#include "collectives/fused_program.hpp"

namespace fusedpg {
namespace {

using Tensors = std::vector<at::Tensor>;

// A fused collective of a group on CPU tensors, of which calls pass tensors of
// the same kinds. It keeps no tensor.
class PreparedProgram {
 public:
  // `read`: the contribution and the operands of a call like those to come,
  // `made`: its results.
  PreparedProgram(
      c10::intrusive_ptr<ProcessGroupFused> group,
      uint64_t program,
      std::string op,
      const Tensors& read,
      std::vector<int64_t> kinds,
      std::vector<int64_t> reads,
      const Tensors& made,
      std::vector<bool> gathered,
      std::vector<uint64_t> periods,
      const std::array<uint64_t, 5>& layout,
      ProgramArguments::Phases phases)
      : group_(std::move(group)),
        call_{
            .program = program,
            .op = std::move(op),
            .kinds = std::move(kinds),
            .reads = std::move(reads),
            .gathered = std::move(gathered),
            .layout = layout,
            .phases = std::move(phases)},
        count_(read.at(0).numel()),
        periods_(std::move(periods)) {
    for (const at::Tensor& t : read) {
      read_types_.push_back(t.scalar_type());
    }
    for (const at::Tensor& t : made) {
      made_.emplace_back(t.sizes().vec(), t.scalar_type());
    }
  }

  // Done by this thread. `function`: its address, 0 if this rank has none.
  // None: a rank has no function, and nothing has been
  // written on any. `results`: empty for new tensors.
  std::optional<Tensors> run(
      uint64_t function,
      Tensors read,
      Tensors results,
      std::vector<double> numbers,
      std::vector<uint64_t> seeds,
      uint64_t mark) const {
    check(read, results);
    if (results.empty()) {
      for (const auto& [sizes, type] : made_) {
        results.push_back(at::empty(sizes, type));
      }
    }
    seeds.insert(seeds.end(), periods_.begin(), periods_.end());
    uint8_t done = 0;
    ProgramArguments call = call_;
    call.function = reinterpret_cast<ProgramFunction>(function);
    call.program ^= mark;
    call.source = std::move(read.front());
    read.erase(read.begin());
    call.operands = std::move(read);
    call.outputs = results;
    call.numbers = std::move(numbers);
    call.seeds = std::move(seeds);
    call.done = at::from_blob(&done, {1}, at::kByte);
    group_->fused_program_(std::move(call), /*async_op=*/false);
    return done != 0 ? std::optional(std::move(results)) : std::nullopt;
  }

 private:
  // The function reads and writes memory as these types; the group's operation
  // checks how many elements there are but for the contribution.
  void check(const Tensors& read, const Tensors& results) const {
    bool fits = read.size() == read_types_.size() &&
        (results.empty() || results.size() == made_.size()) &&
        read.front().numel() == count_;
    for (size_t i = 0; fits && i < read.size(); ++i) {
      fits = read[i].scalar_type() == read_types_[i];
    }
    for (size_t i = 0; fits && i < results.size(); ++i) {
      fits = results[i].scalar_type() == made_[i].second;
    }
    TORCH_CHECK_VALUE(
        fits,
        "fused: a prepared program got tensors whose types or sizes differ "
        "from those it was made for: this is a bug of fusedpg, please report "
        "it");
  }

  c10::intrusive_ptr<ProcessGroupFused> group_;
  ProgramArguments call_; // but for what is of one call
  int64_t count_;
  std::vector<uint64_t> periods_;
  std::vector<at::ScalarType> read_types_;
  std::vector<std::pair<std::vector<int64_t>, at::ScalarType>> made_;
};

// A generated function on this rank's tensors alone. `sum`: what it takes for
// the reduced contributions. With `scratch` bytes of memory as if they were one
// more result.
void call_generated(
    uint64_t function,
    const std::optional<at::Tensor>& sum,
    const Tensors& operands,
    const Tensors& results,
    const std::vector<double>& numbers,
    const std::vector<uint64_t>& seeds,
    uint64_t begin,
    uint64_t count,
    size_t scratch) {
  const auto usable = [](const at::Tensor& t) {
    return t.device().is_cpu() && t.is_contiguous() && has_memory(t);
  };
  TORCH_CHECK_VALUE(
      function != 0 && std::all_of(operands.begin(), operands.end(), usable) &&
          std::all_of(results.begin(), results.end(), usable) &&
          (!sum || usable(*sum)),
      "fused: a generated function reads and writes contiguous CPU tensors, "
      "whose storage has not been freed");
  const void* source = sum ? sum->const_data_ptr() : nullptr;
  std::vector<const void*> inputs;
  for (const at::Tensor& t : operands) {
    inputs.push_back(t.const_data_ptr());
  }
  constexpr size_t kLine = 64;
  // Not initialised: it may be megabytes.
  const std::unique_ptr<char[]> memory(
      scratch == 0 ? nullptr : new char[scratch + kLine]);
  std::vector<void*> places;
  for (const at::Tensor& t : results) {
    places.push_back(t.data_ptr());
  }
  if (scratch != 0) {
    const auto first = reinterpret_cast<uintptr_t>(memory.get());
    places.push_back(memory.get() + (kLine - first % kLine) % kLine);
  }
  std::vector<ProgramOutput> outputs;
  for (void*& place : places) {
    outputs.push_back({&place, 1, 1, 0});
  }
  const ProgramArgs args{
      &source,
      0,
      inputs.data(),
      outputs.data(),
      numbers.data(),
      seeds.data(),
      0,
      nullptr,
      nullptr};
  reinterpret_cast<ProgramFunction>(function)(&args, begin, count);
}

} // namespace

void bind_prepared_programs(py::module_& m) {
  py::class_<PreparedProgram>(m, "_PreparedProgram")
      .def(
          py::init<
              c10::intrusive_ptr<ProcessGroupFused>,
              uint64_t,
              std::string,
              const Tensors&,
              std::vector<int64_t>,
              std::vector<int64_t>,
              const Tensors&,
              std::vector<bool>,
              std::vector<uint64_t>,
              const std::array<uint64_t, 5>&,
              ProgramArguments::Phases>(),
          py::arg("group"),
          py::arg("program"),
          py::arg("op"),
          py::arg("read"),
          py::arg("kinds"),
          py::arg("reads"),
          py::arg("made"),
          py::arg("gathered"),
          py::arg("periods"),
          py::arg("layout"),
          py::arg("phases"))
      .def(
          "run",
          &PreparedProgram::run,
          py::arg("function"),
          py::arg("read"),
          py::arg("results"),
          py::arg("numbers"),
          py::arg("seeds"),
          py::arg("mark"),
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "_call_generated",
      &call_generated,
      py::arg("function"),
      py::arg("sum"),
      py::arg("operands"),
      py::arg("results"),
      py::arg("numbers"),
      py::arg("seeds"),
      py::arg("begin"),
      py::arg("count"),
      py::arg("scratch") = 0,
      py::call_guard<py::gil_scoped_release>());
}

} // namespace fusedpg
