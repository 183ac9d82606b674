#include "c10d/symm_mem.hpp"

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "c10d/errors.hpp"

namespace fusedpg {
namespace {

namespace symm_mem = c10d::symmetric_memory;

// By the allocator itself: empty_strided_p2p() of some versions of torch counts
// elements in an int.
class TorchBlock final : public SymmetricBlock {
 public:
  TorchBlock(
      c10::intrusive_ptr<symm_mem::SymmetricMemoryAllocator> allocator,
      const c10::Device& device,
      size_t bytes,
      std::string group_name)
      : allocator_(std::move(allocator)),
        group_name_(std::move(group_name)),
        data_(allocator_->alloc(bytes, device.index(), group_name_)) {}
  ~TorchBlock() override {
    handle_.reset();
    if (!symm_mem::is_finalizing()) {
      allocator_->free(data_);
    }
  }
  TorchBlock(const TorchBlock&) = delete;

  void* data() const override {
    return data_;
  }

  cuda::Carrier::Peers meet() override {
    handle_ = allocator_->rendezvous(data_, group_name_);
    // world_within_direct_access() is not every kind's: the pointers tell.
    cuda::Carrier::Peers peers;
    const size_t offset = handle_->get_offset();
    const auto place = [offset](void* begin) {
      return begin == nullptr ? nullptr : static_cast<char*>(begin) + offset;
    };
    for (void* begin : handle_->get_buffer_ptrs()) {
      peers.arenas.push_back(place(begin));
    }
    if (handle_->has_multicast_support()) {
      peers.multicast = place(handle_->get_multicast_ptr());
    }
    return peers;
  }

 private:
  const c10::intrusive_ptr<symm_mem::SymmetricMemoryAllocator> allocator_;
  const std::string group_name_;
  void* const data_;
  c10::intrusive_ptr<symm_mem::SymmetricMemory> handle_; // keeps it mapped
};

} // namespace

std::shared_ptr<SymmetricBlock> SymmetricBlock::allocate(
    const c10::Device& device,
    size_t bytes,
    const std::string& group_name) {
  const auto backend = symm_mem::get_backend(device);
  if (!backend || (device.is_cuda() && *backend != "CUDA")) {
    return nullptr;
  }
  try {
    return std::make_shared<TorchBlock>(
        symm_mem::get_allocator(device.type()), device, bytes, group_name);
  } catch (const std::exception& error) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: the GPU has no {} bytes of symmetric memory for "
        "FUSEDPG_CUDA_ARENA_BYTES ({})",
        bytes,
        one_line(error));
  }
}

} // namespace fusedpg
