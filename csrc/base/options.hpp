#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fusedpg {

// Options that a user can set for one group. An unset field takes the
// environment's value, and that failing the default. docs/reference/env.md
// describes each.
struct Options {
  // Address space reserved for the group's arena on this rank, in bytes; memory
  // is committed as it is used. FUSEDPG_ARENA_BYTES.
  std::optional<size_t> arena_bytes;
  // Threads that work on one collective, the caller's included.
  // FUSEDPG_THREADS.
  std::optional<int> threads;
  // Raise when an input holds a NaN. FUSEDPG_NAN_CHECK.
  std::optional<bool> nan_check;
  // Whether all_reduce skips blocks of zeros: "off", "on", or "auto", where
  // they are many enough. The same on all ranks. FUSEDPG_BLOCK_SKIP.
  std::optional<std::string> block_skip;
  // Elements of such a block, 32 to 65536. FUSEDPG_BLOCK_SIZE.
  std::optional<int64_t> block_size;
  // CUDA: bytes that one NCCL call of a fused operation moves. Smaller pieces
  // overlap better, larger ones are transferred faster. 0: chosen by the bytes
  // of the operation. The same on all ranks. FUSEDPG_CUDA_CHUNK_BYTES.
  std::optional<size_t> cuda_chunk_bytes;
  // CUDA: device memory that all GPUs of an NVLink domain see, for the direct
  // path; 0: none. FUSEDPG_CUDA_ARENA_BYTES.
  std::optional<size_t> cuda_arena_bytes;
  // CUDA: "patched" for the ring of a patched NCCL (patches/nccl), "stock", or
  // "auto": patched where there is one and the group spans machines.
  // FUSEDPG_NCCL.
  std::optional<std::string> nccl;
  // CUDA: "fp32", or "wire": in which type gradients of half types are added.
  // The same on all ranks. FUSEDPG_HALF_SUMS.
  std::optional<std::string> half_sums;
  // The carrier of messages between hosts: "tcp" is the only one.
  // FUSEDPG_TRANSPORT.
  std::optional<std::string> transport;
  // In which order contributions are added between hosts: "hosts", or "flat":
  // as on one machine. The same on all ranks. FUSEDPG_ORDER.
  std::optional<std::string> order;
  // Aggregators that add up for a group between hosts, "host:port,...". The
  // same on all ranks. FUSEDPG_AGGREGATORS.
  std::optional<std::string> aggregators;
  // Whether they are used: "auto", where that is faster, or "on". The same on
  // all ranks. FUSEDPG_AGGREGATE.
  std::optional<std::string> aggregate;
  // Gbit/s of a rank's link and of an aggregator's, "1,10"; unset: "auto"
  // measures. The same on all ranks. FUSEDPG_AGGREGATE_RATES.
  std::optional<std::string> aggregate_rates;
  // Bytes of the messages by which blocks go to aggregators and back, 4096 to
  // 253952; 0: chosen. The same on all ranks. FUSEDPG_AGGREGATE_MESSAGE_BYTES.
  std::optional<int64_t> aggregate_message_bytes;
};

enum class BlockSkip { kOff, kAuto, kOn };
const char* block_skip_name(BlockSkip mode);
enum class NcclChoice { kAuto, kPatched, kStock };

enum class Aggregate { kAuto, kOn };
const char* aggregate_name(Aggregate mode);

// Rates of links, in bytes a second.
struct LinkRates {
  double rank;
  double aggregator;
};

struct Settings {
  size_t arena_bytes;
  int threads; // 0: affinity mask / ranks on this host
  bool nan_check;
  BlockSkip block_skip;
  size_t block_size;
  // Empty: derived from the machine. FUSEDPG_HOST_ID.
  std::string host_id;
  // Kernel table by name, empty: the best. FUSEDPG_ISA.
  std::string isa;
  // Microseconds a wait spins before it sleeps; negative: by the number of
  // ranks and cores. FUSEDPG_SPIN_US.
  int64_t spin_us;
  // Ranks on this host as the launcher says, 0 if it does not.
  // LOCAL_WORLD_SIZE.
  int local_world_size;
  size_t cuda_chunk_bytes;
  size_t cuda_arena_bytes;
  NcclChoice nccl;
  bool wide_half_sums; // half_sums="fp32"
  // libfusedpg_cuda.so; empty: beside the engine. FUSEDPG_CUDA_LIB.
  std::string cuda_lib;
  // libnccl; empty: the one that torch has loaded. FUSEDPG_NCCL_LIB.
  std::string nccl_lib;
  bool flat_order;
  std::vector<std::string> aggregators; // "host:port"
  Aggregate aggregate;
  std::optional<LinkRates> aggregate_rates;
  size_t aggregate_message_bytes; // 0: chosen
  // Aggregators and their workers have the same. FUSEDPG_AGGREGATOR_KEY.
  std::string aggregator_key;
  // The interface that other hosts reach this one by; empty: by the way to the
  // store. FUSEDPG_SOCKET_IFNAME, else the first of GLOO_SOCKET_IFNAME.
  std::string socket_ifname;
  // Ports that this process may listen at, "40000-40099"; empty: any.
  // FUSEDPG_PORT_RANGE. Read when it listens: all ranks hear what is wrong.
  std::string port_range;
  // 0 warnings only, 1 one line per group and fallback. FUSEDPG_LOG=info.
  int log_level;
};

constexpr int64_t kMinBlockSize = 32;
constexpr int64_t kMaxBlockSize = 65536;
constexpr int64_t kBlockSize = 256; // the default
// Throws Error(kInvalid) if there are no such blocks.
void check_block_size(int64_t elements);

// The one place that reads the environment. Throws Error(kInvalid) naming the
// variable when a value cannot be parsed.
Settings resolve(const Options& options);

// The environment of a process that is an aggregator.
struct AggregatorSettings {
  std::string listen; // "host:port". FUSEDPG_AGGREGATOR_LISTEN
  std::string stats; // seconds. FUSEDPG_AGGREGATOR_STATS
  std::string key; // FUSEDPG_AGGREGATOR_KEY
};
AggregatorSettings aggregator_settings();

// Settings for compiling fused functions, read from the environment at each
// call.
struct FusionSettings {
  bool compiles = true;
  std::string cache_dir; // empty: there is none
  std::string compiler; // empty: the usual ones
  std::string nvrtc; // path of a libnvrtc; empty: of a wheel, or the system's
};
FusionSettings fusion_settings();
// How many operations the flight recorder keeps: torch's variables, and default.
size_t flight_recorder_entries();

bool fusion_compiles(); // that setting alone, which every call asks for

// Writes one line to stderr, "[fusedpg] ...".
void log_line(const std::string& text);

} // namespace fusedpg
