#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.hpp"

namespace fusedpg {

// The key-value store that ranks meet in; csrc/c10d gives it c10d::Store.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; throws when the deadline passes.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  // Several, in few requests; nothing where some are not there after so long.
  virtual std::optional<std::vector<std::string>> get_all(
      const std::vector<std::string>& keys,
      std::chrono::milliseconds most) {
    const Deadline deadline(most);
    std::vector<std::string> values;
    for (const std::string& key : keys) {
      while (!has(key)) {
        if (deadline.expired()) {
          return std::nullopt;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      values.push_back(get(key, deadline));
    }
    return values;
  }
  virtual bool has(const std::string& key) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // The address of its server. The host is empty if it has no server.
  virtual std::pair<std::string, uint16_t> address() const {
    return {};
  }
  // True if the store ends with this process.
  virtual bool is_here() const {
    return false;
  }
};

} // namespace fusedpg
