// Tensors in the group's arena.

#include <limits>

#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"

namespace fusedpg {
namespace {

// A block of the arena as torch holds memory: the deleter owns the arena, so a
// tensor may outlive its group.
struct Block {
  std::shared_ptr<Arena> arena;
  void* data;
  Arena::Freed freed;
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->arena->deallocate(block->data, block->freed);
    delete block;
  }
};

c10::DataPtr allocate(
    const std::shared_ptr<Arena>& arena,
    size_t bytes,
    Arena::Freed freed) {
  void* data = arena->allocate(bytes);
  return {data, new Block{arena, data, freed}, &Block::release, at::kCPU};
}

class ArenaAllocator : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::shared_ptr<Arena> arena)
      : arena_(std::move(arena)) {}
  c10::DataPtr allocate(size_t bytes) override {
    return translate(
        [&] { return fusedpg::allocate(arena_, bytes, Arena::Freed::kKept); });
  }
  void copy_data(void* dst, const void* src, std::size_t count) const override {
    default_copy_data(dst, src, count);
  }

 private:
  std::shared_ptr<Arena> arena_;
};

// Of a tensor with these sizes. ValueError where there is no such tensor.
size_t bytes_of(at::IntArrayRef sizes, const at::TensorOptions& options) {
  uint64_t bytes = options.dtype().itemsize();
  bool overflow = false;
  bool none = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK_VALUE(
        sizes[i] >= 0,
        "fused: empty: dimension ",
        i,
        " of the sizes ",
        sizes,
        " is negative");
    none = none || sizes[i] == 0;
    overflow =
        c10::mul_overflows(bytes, static_cast<uint64_t>(sizes[i]), &bytes) ||
        overflow;
  }
  TORCH_CHECK_VALUE(
      none ||
          (!overflow &&
           bytes <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())),
      "fused: empty: a tensor of sizes ",
      sizes,
      " and type ",
      options.dtype(),
      " has more bytes than 64 bits can count");
  return none ? 0 : bytes;
}

at::Tensor tensor_in(
    const std::shared_ptr<Arena>& arena,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    Arena::Freed freed) {
  const size_t bytes = bytes_of(sizes, options);
  auto data = allocate(arena, bytes, freed);
  void* p = data.get();
  return at::from_blob(
      p,
      sizes,
      [held = std::make_shared<c10::DataPtr>(std::move(data))](void*) {},
      options.device(at::kCPU));
}

} // namespace

std::shared_ptr<c10::Allocator> ProcessGroupFused::getMemAllocator() {
  // It is asked for no device: a group that is bound to a GPU means that.
  if (const auto device = getBoundDeviceId(); device && device->is_cuda()) {
    return cuda_->pool_allocator(timeout_.load());
  }
  TORCH_CHECK(
      !spans_hosts(), "fused: a group that spans hosts has no shared arena");
  return std::make_shared<ArenaAllocator>(engine_->domain().arena());
}

// DDP asks with index -1 for the CPU.
bool ProcessGroupFused::supportsTensorAlloc(c10::DeviceIndex device) {
  if ((device >= 0 || options_->cpu_as_cuda) &&
      settings_.cuda_arena_bytes > 0) {
    return true;
  }
  return !spans_hosts() && engine_->domain().arena()->heap_bytes() > 0;
}

at::Tensor ProcessGroupFused::allocateTensor(
    long size,
    at::TensorOptions options) {
  if (options.device().is_cuda() || options_->cpu_as_cuda) {
    const auto t = cuda_->allocate({size}, options, timeout_.load());
    return t ? *t : at::empty({size}, options);
  }
  if (!spans_hosts() && !forked()) {
    try {
      // DDP's buckets, which it makes twice.
      return tensor_in(
          engine_->domain().arena(), {size}, options, Arena::Freed::kReturned);
    } catch (const Error& error) {
      // Communication buffers work anywhere, only more slowly.
      log_once(
          c10::str(
              error.what(), "; falling back to ordinary memory for buffers"));
    }
  }
  return at::empty({size}, options);
}

at::Tensor ProcessGroupFused::empty(
    at::IntArrayRef sizes,
    at::ScalarType type,
    at::Device device,
    bool lives_long) {
  TORCH_CHECK_VALUE(
      device.is_cpu() || device.is_cuda(),
      "fused: empty: device must be the CPU or a GPU, got ",
      device);
  const auto options = at::TensorOptions().dtype(type).device(device);
  bytes_of(sizes, options);
  if (device.is_cuda() || options_->cpu_as_cuda) {
    check_open("fused:empty");
    const auto t = cuda_->allocate(sizes, options, timeout_.load());
    return t ? *t : at::empty(sizes, options);
  }
  if (spans_hosts()) {
    return at::empty(sizes, at::TensorOptions().dtype(type));
  }
  check_open("fused:empty");
  return translate([&] {
    return tensor_in(
        engine_->domain().arena(),
        sizes,
        at::TensorOptions().dtype(type),
        lives_long ? Arena::Freed::kReturned : Arena::Freed::kKept);
  });
}

at::Tensor ProcessGroupFused::empty_shared(
    at::IntArrayRef sizes,
    at::ScalarType type) {
  TORCH_CHECK_VALUE(
      !spans_hosts(),
      "fused: parameters cannot be shared in a group that spans hosts");
  const auto options = at::TensorOptions().dtype(type).device(at::kCPU);
  const size_t bytes = bytes_of(sizes, options);
  const Call call{
      c10d::OpType::UNKNOWN, "fused:share_memory", timeout_.load(), false};
  void* data = nullptr;
  run(call, {}, {}, [&](Context& ctx) { data = share_memory(ctx, bytes); });
  return at::from_blob(
      data, sizes, [keep = engine_->domain().mapping(0)](void*) {}, options);
}

bool ProcessGroupFused::in_arena(const at::Tensor& t) const {
  if (on_gpu(t)) {
    const auto engine = cuda_->engine();
    const auto* begin =
        engine ? static_cast<const char*>(engine->arena()) : nullptr;
    const auto* data = static_cast<const char*>(t.const_data_ptr());
    return begin != nullptr && data >= begin &&
        data < begin + engine->arena_bytes();
  }
  return !spans_hosts() && t.device().is_cpu() && t.has_storage() &&
      t.storage().nbytes() != 0 &&
      engine_->domain()
          .arena()
          ->locate(t.storage().data(), t.storage().nbytes())
          .has_value();
}

} // namespace fusedpg
