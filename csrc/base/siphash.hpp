#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace fusedpg {

using Key128 = std::array<uint8_t, 16>;

// SipHash-2-4 with a result of 128 bits (Aumasson and Bernstein, 2012): a keyed
// hash that nobody can compute who does not have the key.
Key128 siphash(const Key128& key, const void* data, size_t bytes);

// Compares in a time that does not depend on where they differ.
bool same_secret(const Key128& a, const Key128& b);

// From 32 hexadecimal digits; none if the text is anything else.
std::optional<Key128> key_of_digits(std::string_view text);

// From the system's generator.
Key128 random_key();

} // namespace fusedpg
