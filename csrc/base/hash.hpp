#pragma once

#include <cstdint>

namespace fusedpg {

// FNV-1a, for shape_hash and value_hash.
class Hash {
 public:
  Hash& add(uint64_t value) {
    for (int i = 0; i < 8; ++i) {
      value_ = (value_ ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ULL;
    }
    return *this;
  }
  Hash& add(double value) {
    uint64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return add(bits);
  }
  uint64_t value() const {
    return value_;
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

} // namespace fusedpg
