#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm.hpp"

namespace fusedpg::fake {

// One context of direct_create(): what the fake knows around that of direct.cu.
class Direct {
 public:
  Direct(
      std::shared_ptr<Comm> comm,
      std::shared_ptr<Window> window,
      int channel);
  ~Direct();

  int create(const cuda::DirectCreateArgs& args, int* usable);
  void destroy(void* comm);
  void step(const cuda::DirectArgs& args);

 private:
  // The kernel, and a look at whether the other ranks' was the same.
  void run(
      const Announcement::Common& common,
      const std::function<bool()>& stopped,
      const std::function<int()>& kernel,
      const std::function<std::string()>& params);

  const std::shared_ptr<Comm> comm_;
  const std::shared_ptr<Window> window_;
  const int channel_;
  void* context_ = nullptr; // direct.cu's
  std::mutex executing_;
  uint64_t next_sequence_ = 0;
};

int direct_create(
    const cuda::DirectCreateArgs* args,
    void** context,
    int* usable);
int direct_destroy(void* context, void* comm);
int direct_step(const cuda::DirectArgs* args, cuda::Stream stream);

} // namespace fusedpg::fake
