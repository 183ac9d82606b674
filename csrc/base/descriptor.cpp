#include "base/descriptor.hpp"

#include "base/error.hpp"

namespace fusedpg {
namespace {

// ", weighted, with used flags"
std::string options_text(uint16_t options) {
  constexpr const char* kNames[] = {
      "weighted",
      "with used flags",
      "with masters",
      "masters follow",
      "reduced gradients",
      "shared parameters",
      "dense where few blocks are zero",
      "with grad_scale",
      "for the first time"};
  std::string text;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    text +=
        (options >> i & 1) != 0 ? formatted(", {}", kNames[i]) : std::string();
  }
  return text;
}

} // namespace

std::string describe(const OpDescriptor& d) {
  std::ostringstream out;
  out << op_name(d.op);
  if (d.op == OpCode::kBarrier || d.op == OpCode::kNone) {
    return out.str();
  }
  out << '(';
  if (reduces(d.op)) {
    out << red_op_name(d.red_op) << ", ";
  }
  out << dtype_name(d.dtype);
  if (d.op != OpCode::kAllToAll) { // there each rank has its own sizes
    out << ", " << d.count << " elements";
  }
  if (d.items != 1) {
    out << " in " << d.items << " tensors";
  }
  if (d.root >= 0) {
    out << ", root " << d.root;
  }
  if (d.block != 0) {
    out << ", blocks of " << d.block;
  }
  if (d.grad_type != DType::kOpaque && d.grad_type != d.dtype) {
    out << ", gradients " << dtype_name(d.grad_type);
  }
  out << options_text(d.options);
  out << ')';
  return out.str();
}

std::string difference(const OpDescriptor& here, const OpDescriptor& there) {
  const auto differ = [](const char* what, const auto& a, const auto& b) {
    return formatted("{} {} here, {} there", what, a, b);
  };
  if (here.op != there.op) {
    return differ("operation", op_name(here.op), op_name(there.op));
  }
  if (here.sequence != there.sequence) {
    return differ("sequence number", here.sequence, there.sequence);
  }
  if (here.async_call != there.async_call) {
    const auto text = [](uint64_t number) {
      return number == 0 ? "none" : formatted("number {}", number);
    };
    return differ(
               "asynchronous call of a fused function",
               text(here.async_call),
               text(there.async_call)) +
        "; wait for such calls in the same order on all ranks, and in one "
        "order with other collectives";
  }
  if (here.dtype != there.dtype) {
    return differ("dtype", dtype_name(here.dtype), dtype_name(there.dtype));
  }
  if (here.red_op != there.red_op) {
    return differ(
        "reduction", red_op_name(here.red_op), red_op_name(there.red_op));
  }
  if (here.root != there.root) {
    return differ("root", here.root, there.root);
  }
  if (here.grad_type != there.grad_type) {
    return differ(
        "dtype of the gradients",
        dtype_name(here.grad_type),
        dtype_name(there.grad_type));
  }
  if (here.state_type != there.state_type) {
    return differ(
        "dtype of the states",
        dtype_name(here.state_type),
        dtype_name(there.state_type));
  }
  if (here.options != there.options) {
    const auto text = [](uint16_t options) {
      return options == 0 ? "none" : options_text(options).substr(2);
    };
    return differ("options", text(here.options), text(there.options));
  }
  if (here.block != there.block) {
    return differ("size of blocks", here.block, there.block);
  }
  if (here.list_length != there.list_length ||
      here.list_index != there.list_index) {
    return differ(
        "number of tensors in the list", here.list_length, there.list_length);
  }
  if (here.items != there.items) {
    return differ("number of tensors", here.items, there.items);
  }
  if (here.count != there.count) {
    return differ("number of elements", here.count, there.count);
  }
  const bool program = here.op == OpCode::kFusedProgram;
  if (program && here.shape_hash != there.shape_hash) {
    return "the programs differ (operations, shapes, types or schedule)";
  }
  if (program && here.value_hash != there.value_hash) {
    return "numbers that the program takes (scalars, seeds) differ";
  }
  if (here.shape_hash != there.shape_hash) {
    return "sizes or memory layouts of the tensors differ";
  }
  if (here.value_hash != there.value_hash) {
    return "scalar arguments (learning rate, step, factor, ..., a norm or "
           "factor by which gradients were multiplied, or a state dict that "
           "was loaded) differ";
  }
  if (here.path != there.path) {
    return differ(
        "path (are the tensors in the arena?)",
        gpu_path_name(here.path),
        gpu_path_name(there.path));
  }
  return {};
}

uint64_t hash_of(const OpDescriptor& d) {
  return Hash()
      .add(
          uint64_t(d.op) | uint64_t(d.dtype) << 8 | uint64_t(d.red_op) << 16 |
          uint64_t(d.path) << 24 | uint64_t(d.grad_type) << 32 |
          uint64_t(d.state_type) << 40 | uint64_t(d.options) << 48)
      .add(uint64_t(uint32_t(d.root)) | uint64_t(d.block) << 32)
      .add(d.count)
      .add(d.items)
      .add(d.shape_hash)
      .add(d.value_hash)
      .value();
}

void check_agreement(
    const OpDescriptor& here,
    int rank,
    const OpDescriptor& there,
    int peer) {
  const std::string what =
      peer == rank ? std::string() : difference(here, there);
  if (!what.empty()) {
    fail(
        ErrorKind::kMismatch,
        "fused: ranks disagree at sequence number {}: rank {} (here) called "
        "{}, rank {} (there) called {}: {}",
        here.sequence,
        rank,
        describe(here),
        peer,
        describe(there),
        what);
  }
}

void fail_refused(
    const OpDescriptor& here,
    int rank,
    int peer,
    const std::string& reason) {
  fail(
      ErrorKind::kMismatch,
      "fused: {}, sequence number {}, on rank {}: rank {} refused to take "
      "part: "
      "{}",
      describe(here),
      here.sequence,
      rank,
      peer,
      reason);
}

void check_nan_flag(const OpDescriptor& there, int peer) {
  if (there.flags & kHasNan) {
    fail(
        ErrorKind::kInvalid,
        "fused: {}, sequence number {}: the input of rank {} holds a NaN "
        "(nan_check is on)",
        describe(there),
        there.sequence,
        peer);
  }
}

} // namespace fusedpg
