#include "base/siphash.hpp"

#include <numeric>

#include "check.hpp"

namespace {

using namespace fusedpg;

// Of the reference implementation: keys and messages of bytes 0, 1, 2, ...
TEST(siphash_gives_the_published_values) {
  Key128 key;
  std::iota(key.begin(), key.end(), uint8_t{0});
  std::array<uint8_t, 64> message;
  std::iota(message.begin(), message.end(), uint8_t{0});
  const Key128 of_nothing{
      0xa3,
      0x81,
      0x7f,
      0x04,
      0xba,
      0x25,
      0xa8,
      0xe6,
      0x6d,
      0xf6,
      0x72,
      0x14,
      0xc7,
      0x55,
      0x02,
      0x93};
  CHECK(siphash(key, message.data(), 0) == of_nothing);
  const Key128 of_one{
      0xda,
      0x87,
      0xc1,
      0xd8,
      0x6b,
      0x99,
      0xaf,
      0x44,
      0x34,
      0x76,
      0x59,
      0x11,
      0x9b,
      0x22,
      0xfc,
      0x45};
  CHECK(siphash(key, message.data(), 1) == of_one);
}

TEST(siphash_depends_on_every_bit) {
  const Key128 key = random_key();
  std::array<uint8_t, 41> message{};
  const Key128 before = siphash(key, message.data(), message.size());
  for (size_t bit = 0; bit < 8 * message.size(); ++bit) {
    message[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    CHECK(!same_secret(before, siphash(key, message.data(), message.size())));
    message[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
  CHECK(same_secret(before, siphash(key, message.data(), message.size())));
  CHECK(!same_secret(before, siphash(random_key(), message.data(), 41)));
}

} // namespace
