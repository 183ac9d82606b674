#include "base/options.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "base/error.hpp"

namespace fusedpg {
namespace {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kMaxDefaultArena = size_t(64) << 30;

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return std::string(value);
}

std::optional<int64_t> env_integer(const char* name) {
  const auto text = env(name);
  if (!text) {
    return std::nullopt;
  }
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text->c_str(), &end, 10);
  if (errno != 0 || *end != '\0') {
    fail(
        ErrorKind::kInvalid,
        "fused: environment variable {}={} is not an integer; unset it or give "
        "a whole number",
        name,
        *text);
  }
  return value;
}

// A number of bytes by option, environment or default.
size_t bytes_of(
    const std::optional<size_t>& option,
    const char* name,
    size_t otherwise) {
  const auto value = env_integer(name);
  if (value && *value < 0) {
    fail(
        ErrorKind::kInvalid,
        "fused: {} must not be negative, got {}",
        name,
        *value);
  }
  return option.value_or(value ? static_cast<size_t>(*value) : otherwise);
}

// One of a few by option or environment; the first is the default.
template <typename Choice, size_t kChoices>
Choice choice_of(
    const std::optional<std::string>& option,
    const char* option_name,
    const char* name,
    const std::pair<const char*, Choice> (&choices)[kChoices]) {
  const std::string given =
      option.value_or(env(name).value_or(choices[0].first));
  for (const auto& [text, choice] : choices) {
    if (given == text) {
      return choice;
    }
  }
  std::string all = choices[0].first;
  for (size_t i = 1; i < kChoices; ++i) {
    all += (i + 1 < kChoices ? ", " : " or ") + std::string(choices[i].first);
  }
  fail(
      ErrorKind::kInvalid,
      "fused: {} ({}) must be {}, got {}",
      option_name,
      name,
      all,
      given);
}

// There was a carrier of messages by UCX. Programs that ask for it would not
// learn from "must be tcp" that they can leave the option out.
void check_transport(const std::optional<std::string>& option) {
  if (option.value_or(env("FUSEDPG_TRANSPORT").value_or("")) == "ucx") {
    fail(
        ErrorKind::kInvalid,
        "fused: transport (FUSEDPG_TRANSPORT) \"ucx\" has been removed, and "
        "messages between hosts go by TCP: leave it unset, or set it to tcp");
  }
  choice_of<bool>(option, "transport", "FUSEDPG_TRANSPORT", {{"tcp", true}});
}

size_t default_arena_bytes() {
  const auto pages = static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(pages * page, kMaxDefaultArena);
}

} // namespace

void check_block_size(int64_t elements) {
  if (elements < kMinBlockSize || elements > kMaxBlockSize) {
    fail(
        ErrorKind::kInvalid,
        "fused: block_size (FUSEDPG_BLOCK_SIZE) must be from {} to {} "
        "elements, got {}",
        kMinBlockSize,
        kMaxBlockSize,
        elements);
  }
}

const char* block_skip_name(BlockSkip mode) {
  constexpr const char* kNames[] = {"off", "auto", "on"};
  return kNames[static_cast<size_t>(mode)];
}

const char* aggregate_name(Aggregate mode) {
  constexpr const char* kNames[] = {"auto", "on"};
  return kNames[static_cast<size_t>(mode)];
}

namespace {

// "1,10": Gbit/s.
std::optional<LinkRates> link_rates(const std::string& text) {
  if (text.empty()) {
    return std::nullopt;
  }
  std::istringstream words(text);
  LinkRates rates{};
  char comma = 0;
  char more = 0;
  const bool read =
      static_cast<bool>(words >> rates.rank >> comma >> rates.aggregator);
  if (!read || comma != ',' || words >> more || !(rates.rank > 0) ||
      !(rates.aggregator > 0)) {
    fail(
        ErrorKind::kInvalid,
        "fused: aggregate_rates (FUSEDPG_AGGREGATE_RATES) are two numbers of "
        "Gbit/s, as \"1,10\", got \"{}\"",
        text);
  }
  constexpr double kBytes = 1e9 / 8;
  return LinkRates{rates.rank * kBytes, rates.aggregator * kBytes};
}

size_t message_bytes(int64_t bytes) {
  constexpr int64_t kLeast = 4096;
  constexpr int64_t kMost = 248 << 10; // see select_stripe()
  if (bytes != 0 && (bytes < kLeast || bytes > kMost)) {
    fail(
        ErrorKind::kInvalid,
        "fused: aggregate_message_bytes (FUSEDPG_AGGREGATE_MESSAGE_BYTES) must "
        "be from {} to {}, or 0, got {}",
        kLeast,
        kMost,
        bytes);
  }
  return static_cast<size_t>(bytes);
}

} // namespace

Settings resolve(const Options& options) {
  Settings s;
  s.arena_bytes = bytes_of(
      options.arena_bytes, "FUSEDPG_ARENA_BYTES", default_arena_bytes());
  s.arena_bytes = (s.arena_bytes + kMiB - 1) / kMiB * kMiB;
  const int64_t threads = options.threads
      ? *options.threads
      : env_integer("FUSEDPG_THREADS").value_or(0);
  if (threads < 0 || threads > 1024) {
    fail(
        ErrorKind::kInvalid,
        "fused: threads must be between 1 and 1024 (or 0 for the default), got "
        "{}",
        threads);
  }
  s.threads = static_cast<int>(threads);
  s.nan_check = options.nan_check.value_or(
      env_integer("FUSEDPG_NAN_CHECK").value_or(0) != 0);
  s.block_skip = choice_of<BlockSkip>(
      options.block_skip,
      "block_skip",
      "FUSEDPG_BLOCK_SKIP",
      {{block_skip_name(BlockSkip::kOff), BlockSkip::kOff},
       {block_skip_name(BlockSkip::kAuto), BlockSkip::kAuto},
       {block_skip_name(BlockSkip::kOn), BlockSkip::kOn}});
  const int64_t block = options.block_size
      ? *options.block_size
      : env_integer("FUSEDPG_BLOCK_SIZE").value_or(kBlockSize);
  check_block_size(block);
  s.block_size = static_cast<size_t>(block);
  s.cuda_chunk_bytes =
      bytes_of(options.cuda_chunk_bytes, "FUSEDPG_CUDA_CHUNK_BYTES", 0);
  s.cuda_arena_bytes =
      bytes_of(options.cuda_arena_bytes, "FUSEDPG_CUDA_ARENA_BYTES", 0);
  s.nccl = choice_of<NcclChoice>(
      options.nccl,
      "nccl",
      "FUSEDPG_NCCL",
      {{"auto", NcclChoice::kAuto},
       {"patched", NcclChoice::kPatched},
       {"stock", NcclChoice::kStock}});
  s.wide_half_sums = choice_of<bool>(
      options.half_sums,
      "half_sums",
      "FUSEDPG_HALF_SUMS",
      {{"fp32", true}, {"wire", false}});
  s.cuda_lib = env("FUSEDPG_CUDA_LIB").value_or("");
  s.nccl_lib = env("FUSEDPG_NCCL_LIB").value_or("");
  check_transport(options.transport);
  s.flat_order = choice_of<bool>(
      options.order,
      "order",
      "FUSEDPG_ORDER",
      {{"hosts", false}, {"flat", true}});
  std::istringstream places(
      options.aggregators.value_or(env("FUSEDPG_AGGREGATORS").value_or("")));
  for (std::string place; std::getline(places, place, ',');) {
    s.aggregators.push_back(place);
  }
  s.aggregate = choice_of<Aggregate>(
      options.aggregate,
      "aggregate",
      "FUSEDPG_AGGREGATE",
      {{aggregate_name(Aggregate::kAuto), Aggregate::kAuto},
       {aggregate_name(Aggregate::kOn), Aggregate::kOn}});
  s.aggregate_rates = link_rates(options.aggregate_rates.value_or(
      env("FUSEDPG_AGGREGATE_RATES").value_or("")));
  s.aggregate_message_bytes = message_bytes(
      options.aggregate_message_bytes
          ? *options.aggregate_message_bytes
          : env_integer("FUSEDPG_AGGREGATE_MESSAGE_BYTES").value_or(0));
  s.aggregator_key = env("FUSEDPG_AGGREGATOR_KEY").value_or("");
  const std::string interfaces =
      env("FUSEDPG_SOCKET_IFNAME")
          .value_or(env("GLOO_SOCKET_IFNAME").value_or(""));
  s.socket_ifname = interfaces.substr(0, interfaces.find(','));
  s.port_range = env("FUSEDPG_PORT_RANGE").value_or("");
  s.host_id = env("FUSEDPG_HOST_ID").value_or("");
  s.isa = env("FUSEDPG_ISA").value_or("");
  s.spin_us = env_integer("FUSEDPG_SPIN_US").value_or(-1);
  s.local_world_size =
      static_cast<int>(env_integer("LOCAL_WORLD_SIZE").value_or(0));
  s.log_level = env("FUSEDPG_LOG").value_or("") == "info" ? 1 : 0;
  return s;
}

void log_line(const std::string& text) {
  std::fprintf(stderr, "[fusedpg] %s\n", text.c_str());
}

AggregatorSettings aggregator_settings() {
  return {
      env("FUSEDPG_AGGREGATOR_LISTEN").value_or(""),
      env("FUSEDPG_AGGREGATOR_STATS").value_or(""),
      env("FUSEDPG_AGGREGATOR_KEY").value_or("")};
}

size_t flight_recorder_entries() {
  constexpr int64_t kEntries = 2000;
  const auto newer = env_integer("TORCH_FR_BUFFER_SIZE");
  const auto entries =
      newer ? newer : env_integer("TORCH_NCCL_TRACE_BUFFER_SIZE");
  return static_cast<size_t>(std::max<int64_t>(entries.value_or(kEntries), 0));
}

bool fusion_compiles() {
  enum class Mode { kCompiled, kEager };
  return choice_of<Mode>(
             std::nullopt,
             "fusion",
             "FUSEDPG_FUSION",
             {{"compiled", Mode::kCompiled}, {"eager", Mode::kEager}}) ==
      Mode::kCompiled;
}

FusionSettings fusion_settings() {
  FusionSettings s;
  s.compiles = fusion_compiles();
  if (const auto own = env("FUSEDPG_CACHE_DIR")) {
    s.cache_dir = *own;
  } else if (const auto cache = env("XDG_CACHE_HOME")) {
    s.cache_dir = *cache + "/fusedpg";
  } else if (const auto home = env("HOME")) {
    s.cache_dir = *home + "/.cache/fusedpg";
  }
  s.compiler = env("CXX").value_or("");
  s.nvrtc = env("FUSEDPG_NVRTC_LIB").value_or("");
  return s;
}

} // namespace fusedpg
