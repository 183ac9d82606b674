#include "base/siphash.hpp"

#include <sys/random.h>

#include <bit>
#include <charconv>

#include "base/error.hpp"

namespace fusedpg {
namespace {

struct State {
  uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1;
      v1 = std::rotl(v1, 13) ^ v0;
      v0 = std::rotl(v0, 32);
      v2 += v3;
      v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3;
      v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1;
      v1 = std::rotl(v1, 17) ^ v2;
      v2 = std::rotl(v2, 32);
    }
  }

  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

uint64_t word_at(const uint8_t* from, size_t bytes = 8) {
  uint64_t word = 0;
  for (size_t i = 0; i < bytes; ++i) {
    word |= static_cast<uint64_t>(from[i]) << (8 * i);
  }
  return word;
}

void put(uint8_t* to, uint64_t word) {
  for (size_t i = 0; i < 8; ++i) {
    to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

} // namespace

Key128 siphash(const Key128& key, const void* data, size_t bytes) {
  const auto* in = static_cast<const uint8_t*>(data);
  const uint64_t k0 = word_at(key.data());
  const uint64_t k1 = word_at(key.data() + 8);
  State s{
      0x736f6d6570736575 ^ k0,
      0x646f72616e646f6d ^ k1 ^ 0xee,
      0x6c7967656e657261 ^ k0,
      0x7465646279746573 ^ k1};
  const size_t whole = bytes / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) {
    s.absorb(word_at(in + i));
  }
  s.absorb(word_at(in + whole, bytes - whole) | uint64_t(bytes & 0xff) << 56);
  Key128 result;
  s.v2 ^= 0xee;
  s.rounds(4);
  put(result.data(), s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
  s.v1 ^= 0xdd;
  s.rounds(4);
  put(result.data() + 8, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
  return result;
}

bool same_secret(const Key128& a, const Key128& b) {
  unsigned differ = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    differ |= static_cast<unsigned>(a[i] ^ b[i]);
  }
  return differ == 0;
}

std::optional<Key128> key_of_digits(std::string_view text) {
  Key128 key{};
  bool right = text.size() == 2 * key.size();
  for (size_t i = 0; right && i < key.size(); ++i) {
    const char* digits = text.data() + 2 * i;
    right = std::from_chars(digits, digits + 2, key[i], 16).ptr == digits + 2;
  }
  return right ? std::optional(key) : std::nullopt;
}

Key128 random_key() {
  Key128 key;
  // So few bytes come whole, once the system has started.
  if (getrandom(key.data(), key.size(), 0) !=
      static_cast<ssize_t>(key.size())) {
    fail_errno("fused: getrandom");
  }
  return key;
}

} // namespace fusedpg
