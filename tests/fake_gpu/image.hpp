#pragma once

#include <cstring>
#include <optional>
#include <sstream>
#include <string>

// What the fake's NVRTC makes in place of PTX: text, as PTX is.
namespace fusedpg::fake {

constexpr int kFakeArchitecture = 90;

struct Image {
  int architecture = 0;
  std::string library; // a shared object

  std::string text() const {
    static const char* const kDigits = "0123456789abcdef";
    std::ostringstream out;
    out << kHead << architecture << ' ' << library.size() << '\n';
    for (const char byte : library) {
      const auto value = static_cast<unsigned char>(byte);
      out << kDigits[value >> 4] << kDigits[value & 15];
    }
    return out.str();
  }
  static std::optional<Image> read(const char* text) {
    if (std::strncmp(text, kHead, std::strlen(kHead)) != 0) {
      return std::nullopt;
    }
    std::istringstream in(text + std::strlen(kHead));
    Image image;
    size_t bytes = 0;
    std::string digits;
    in >> image.architecture >> bytes >> digits;
    if (digits.size() != 2 * bytes) {
      return std::nullopt;
    }
    const auto value = [](char digit) {
      return digit <= '9' ? digit - '0' : digit - 'a' + 10;
    };
    for (size_t i = 0; i < bytes; ++i) {
      image.library.push_back(
          static_cast<char>(
              value(digits[2 * i]) << 4 | value(digits[2 * i + 1])));
    }
    return image;
  }

 private:
  static constexpr const char* kHead = "// a fake's image for ";
};

} // namespace fusedpg::fake
