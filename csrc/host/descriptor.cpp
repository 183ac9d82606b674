#include "host/descriptor.hpp"

#include "base/error.hpp"

namespace fusedpg {
namespace {

bool reduces(OpCode op) {
  return op == OpCode::kAllReduce || op == OpCode::kReduce ||
      op == OpCode::kReduceScatter;
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
  out << ')';
  return out.str();
}

std::string difference(const OpDescriptor& here, const OpDescriptor& there) {
  const auto differ = [](const char* what, const auto& a, const auto& b) {
    return str("{} {} here, {} there", what, a, b);
  };
  if (here.op != there.op) {
    return differ("operation", op_name(here.op), op_name(there.op));
  }
  if (here.sequence != there.sequence) {
    return differ("sequence number", here.sequence, there.sequence);
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
  if (here.shape_hash != there.shape_hash) {
    return "sizes or memory layouts of the tensors differ";
  }
  if (here.value_hash != there.value_hash) {
    return "scalar arguments (learning rate, step, factor, ...) differ";
  }
  return {};
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
