#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.hpp"

namespace fusedpg {

// The key-value store that ranks meet in; csrc/c10d gives it c10d::Store.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; throws when the deadline passes.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};

} // namespace fusedpg
