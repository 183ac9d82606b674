#include "aggregate/protocol.hpp"

#include <charconv>
#include <optional>
#include <sstream>

#include "base/error.hpp"

namespace fusedpg::aggregate {
namespace {

constexpr const char* kVersion = "fusedpg-aggregator 2";

} // namespace

std::string Request::text() const {
  std::string text =
      formatted("{}\n{} {} {}\n", kVersion, workers.size(), aggregators, index);
  for (const std::string& one : workers) {
    text += one + "\n";
  }
  return text;
}

Request Request::of(const std::string& text) {
  std::istringstream lines(text);
  std::string version;
  std::getline(lines, version);
  if (version != kVersion) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: this aggregator speaks \"{}\", not \"{}\"",
        kVersion,
        version.substr(0, 40));
  }
  Request request;
  size_t workers = 0;
  lines >> workers >> request.aggregators >> request.index;
  lines.ignore(1);
  std::string line;
  while (lines && request.workers.size() < workers &&
         std::getline(lines, line)) {
    request.workers.push_back(line);
  }
  if (!lines || workers == 0 || workers > kMostWorkers ||
      request.workers.size() != workers || request.aggregators == 0 ||
      request.aggregators > kMostAggregators ||
      request.index >= request.aggregators) {
    fail(ErrorKind::kPeerFailed, "fused: what was said is no request of a job");
  }
  return request;
}

TcpAddress front_door(const std::string& place, const Key128& key) {
  const size_t colon = place.rfind(':');
  std::string host = place.substr(0, std::min(colon, place.size()));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  uint16_t port = 0;
  const char* end = place.data() + place.size();
  const char* digits =
      colon == std::string::npos ? end : place.data() + colon + 1;
  const auto read = std::from_chars(digits, end, port);
  if (host.empty() || digits == end || read.ptr != end ||
      read.ec != std::errc()) {
    fail(
        ErrorKind::kInvalid,
        "fused: an aggregator is named \"host:port\", got \"{}\"",
        place);
  }
  return {SocketAddress::named(host, port), kFrontDoor, key};
}

Key128 key_of(const std::string& digits) {
  const std::optional<Key128> key = key_of_digits(digits);
  if (!key) {
    fail(
        ErrorKind::kInvalid,
        "fused: the key of aggregators (FUSEDPG_AGGREGATOR_KEY) is 32 "
        "hexadecimal digits, the same on aggregators and workers; got {} "
        "characters",
        digits.size());
  }
  return *key;
}

} // namespace fusedpg::aggregate
