// CPU tensors in the group's arena.

#include "c10d/delegate.hpp"
#include "c10d/errors.hpp"
#include "c10d/routes/cpu.hpp"
#include "collectives/way.hpp"
#include "host/arena.hpp"

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

at::Tensor tensor_in(
    const std::shared_ptr<Arena>& arena,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    Arena::Freed freed) {
  const size_t bytes = checked_bytes(sizes, options);
  auto data = allocate(arena, bytes, freed);
  void* p = data.get();
  return at::from_blob(
      p,
      sizes,
      [held = std::make_shared<c10::DataPtr>(std::move(data))](void*) {},
      options.device(at::kCPU));
}

} // namespace

std::shared_ptr<c10::Allocator> CpuRoute::getMemAllocator() {
  TORCH_CHECK(
      arena() != nullptr,
      "fused: this rank has no shared arena, as it is the group's only one on "
      "its host");
  return std::make_shared<ArenaAllocator>(arena());
}

bool CpuRoute::supportsTensorAlloc(c10::DeviceIndex /* device */) {
  return arena() != nullptr && arena()->heap_bytes() > 0;
}

at::Tensor CpuRoute::allocateTensor(long size, at::TensorOptions options) {
  if (arena() != nullptr && !group_.forked()) {
    try {
      // DDP's buckets, which it makes twice.
      return tensor_in(arena(), {size}, options, Arena::Freed::kReturned);
    } catch (const Error& error) {
      // Communication buffers work anywhere, only more slowly.
      log_once(formatted(
          "{}; falling back to ordinary memory for buffers", error.what()));
    }
  }
  return at::empty({size}, options);
}

at::Tensor CpuRoute::empty(
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    bool lives_long) {
  if (arena() == nullptr) {
    return at::empty(sizes, options);
  }
  group_.check_open("fused:empty");
  return translate([&] {
    return tensor_in(
        arena(),
        sizes,
        options,
        lives_long ? Arena::Freed::kReturned : Arena::Freed::kKept);
  });
}

at::Tensor CpuRoute::empty_shared(
    at::IntArrayRef sizes,
    const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(
      !spans_hosts(),
      "fused: parameters cannot be shared in a group that spans hosts");
  const size_t bytes = checked_bytes(sizes, options);
  void* data = nullptr;
  run(group_.info(c10d::OpType::UNKNOWN, "fused:share_memory", false),
      {},
      {},
      [&data, bytes](Way& way) {
        data = share_memory(static_cast<ShmWay&>(way).context(), bytes);
      });
  return at::from_blob(
      data, sizes, [keep = engine_->host()->mapping(0)](void*) {}, options);
}

bool CpuRoute::in_arena(const at::Tensor& t) {
  return arena() != nullptr && t.device().is_cpu() && t.has_storage() &&
      t.storage().nbytes() != 0 &&
      arena()->locate(t.storage().data(), t.storage().nbytes()).has_value();
}

} // namespace fusedpg
