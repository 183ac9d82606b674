#include "host/bootstrap.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <limits>

#include "base/ownership.hpp"
#include "base/stats.hpp"
#include "base/topology.hpp"
#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// Sets a variable for the life of the object.
class Env {
 public:
  Env(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    before_ = had_ ? before : "";
    setenv(name, value, 1);
  }
  ~Env() {
    if (had_) {
      setenv(name_, before_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }

 private:
  const char* name_;
  bool had_;
  std::string before_;
};

// What a rank says to another's socket.
struct Hello {
  uint64_t protocol;
  int32_t rank;
  char token[16];
};

// Null when the listener's queue is full.
Fd try_connect(const PeerInfo& peer, int type = SOCK_NONBLOCK) {
  Fd socket = Fd::opened([type] {
    return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | type, 0);
  });
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, peer.address.data(), peer.address.size());
  const auto length = static_cast<socklen_t>(
      offsetof(sockaddr_un, sun_path) + peer.address.size());
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    socket.reset();
  }
  return socket;
}

Fd connect_to(const PeerInfo& peer) {
  Fd socket = try_connect(peer, 0);
  CHECK(static_cast<bool>(socket));
  return socket;
}

void say(
    const Fd& socket,
    const Hello& hello,
    size_t bytes,
    const Fd* memory,
    size_t copies = 1) {
  iovec io{const_cast<Hello*>(&hello), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (memory != nullptr) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(copies * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(copies * sizeof(int));
    const int fd = memory->get();
    for (size_t i = 0; i < copies; ++i) {
      std::memcpy(CMSG_DATA(c) + i * sizeof fd, &fd, sizeof fd);
    }
  }
  CHECK_EQ(
      sendmsg(socket.get(), &message, MSG_NOSIGNAL),
      static_cast<ssize_t>(bytes));
}

std::string field(const std::string& text) {
  const auto n = static_cast<uint32_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&n), sizeof n) + text;
}

} // namespace

TEST(options_precedence) {
  const Settings defaults = resolve({});
  CHECK(defaults.arena_bytes > 0);
  CHECK_EQ(defaults.arena_bytes % (1 << 20), size_t{0});
  {
    const Env arena("FUSEDPG_ARENA_BYTES", "1000000");
    const Env threads("FUSEDPG_THREADS", "3");
    const Env nan("FUSEDPG_NAN_CHECK", "1");
    const Env host("FUSEDPG_HOST_ID", "box");
    const Env isa("FUSEDPG_ISA", "avx2");
    const Env spin("FUSEDPG_SPIN_US", "0");
    const Env log("FUSEDPG_LOG", "info");
    const Settings s = resolve({});
    CHECK_EQ(s.arena_bytes, size_t(1) << 20);
    CHECK_EQ(s.threads, 3);
    CHECK(s.nan_check);
    CHECK_EQ(s.host_id, std::string("box"));
    CHECK_EQ(s.isa, std::string("avx2"));
    CHECK_EQ(s.spin_us, int64_t{0});
    CHECK_EQ(s.log_level, 1);
    Options options;
    options.arena_bytes = 3 << 20;
    options.threads = 5;
    options.nan_check = false;
    const Settings given = resolve(options);
    CHECK_EQ(given.arena_bytes, size_t(3) << 20);
    CHECK_EQ(given.threads, 5);
    CHECK(!given.nan_check);
  }
  {
    // Empty is as good as unset.
    const Env arena("FUSEDPG_ARENA_BYTES", "");
    const Env threads("FUSEDPG_THREADS", "");
    const Env spin("FUSEDPG_SPIN_US", "");
    const Settings s = resolve({});
    CHECK_EQ(s.arena_bytes, defaults.arena_bytes);
    CHECK_EQ(s.threads, 0);
    CHECK_EQ(s.spin_us, int64_t{-1});
  }
}

TEST(options_say_that_ucx_is_gone) {
  const std::vector<std::string> words{
      "FUSEDPG_TRANSPORT", "\"ucx\" has been removed", "set it to tcp"};
  Options options;
  options.transport = "ucx";
  expect_error(ErrorKind::kInvalid, words, [&] { resolve(options); });
  const Env variable("FUSEDPG_TRANSPORT", "ucx");
  expect_error(ErrorKind::kInvalid, words, [] { resolve({}); });
  options.transport = "tcp";
  resolve(options);
  options.transport = "gloo";
  expect_error(ErrorKind::kInvalid, {"must be tcp, got gloo"}, [&] {
    resolve(options);
  });
}

TEST(options_errors_name_the_variable) {
  for (const char* name :
       {"FUSEDPG_ARENA_BYTES",
        "FUSEDPG_THREADS",
        "FUSEDPG_NAN_CHECK",
        "FUSEDPG_SPIN_US"}) {
    for (const char* value : {"many", "12x", "1.5", "99999999999999999999"}) {
      const Env variable(name, value);
      expect_error(ErrorKind::kInvalid, {std::string(name) + "=" + value}, [] {
        resolve({});
      });
    }
  }
  // The last one is 1 modulo 2^32.
  for (const char* value : {"-1", "1025", "4294967297"}) {
    const Env threads("FUSEDPG_THREADS", value);
    expect_error(ErrorKind::kInvalid, {"threads must be"}, [] { resolve({}); });
  }
  Options options;
  options.threads = -2;
  expect_error(ErrorKind::kInvalid, {"threads must be", "-2"}, [&] {
    resolve(options);
  });
  const Env bytes("FUSEDPG_ARENA_BYTES", "-1");
  expect_error(
      ErrorKind::kInvalid, {"FUSEDPG_ARENA_BYTES", "-1"}, [] { resolve({}); });
  check_block_size(kMinBlockSize);
  check_block_size(kMaxBlockSize);
  for (const int64_t size : {kMinBlockSize - 1, kMaxBlockSize + 1}) {
    expect_error(
        ErrorKind::kInvalid, {"block_size", std::to_string(size)}, [&] {
          check_block_size(size);
        });
  }
}

TEST(stats_are_of_their_operation_until_they_are_cleared) {
  Stats stats;
  stats.add(OpCode::kAllReduce, DataPath::kDirect, {1, 2, 3, 4, 5, 6, {}});
  stats.add(
      OpCode::kAllReduce, DataPath::kStaged, {10, 20, 30, 40, 50, 60, {}});
  const OpStats s = stats.of(OpCode::kAllReduce);
  CHECK(
      s.bytes_sent == 11 && s.bytes_received == 22 && s.messages_sent == 33 &&
      s.blocks == 44 && s.blocks_present == 55 && s.blocks_union == 66);
  CHECK_EQ(s.calls[size_t(DataPath::kDirect)], uint64_t{1});
  CHECK_EQ(s.calls[size_t(DataPath::kStaged)], uint64_t{1});
  CHECK_EQ(stats.of(OpCode::kReduce).bytes_sent, uint64_t{0});
  stats.clear();
  const OpStats none = stats.of(OpCode::kAllReduce);
  CHECK(none.bytes_sent == 0 && none.blocks_union == 0);
  CHECK(none.calls == OpStats().calls);
}

TEST(topology_tells_hosts_apart) {
  CHECK_EQ(host_identity("mine"), std::string("mine"));
  CHECK(!host_identity("").empty());
  CHECK_EQ(host_identity(""), host_identity(""));
  // Ranks of one machine in other namespaces cannot share memory.
  for (const char* kind : {"net", "pid", "user"}) {
    char name[64] = {};
    const std::string path = std::string("/proc/self/ns/") + kind;
    CHECK(readlink(path.c_str(), name, sizeof name - 1) > 0);
    CHECK(host_identity("").find(name) != std::string::npos);
  }
  CHECK(available_cpus() >= 1);
}

TEST(ownership_covers_every_element_once) {
  for (int64_t numel :
       {int64_t{0},
        int64_t{1},
        int64_t{31},
        int64_t{32},
        int64_t{33},
        int64_t{64},
        int64_t{65},
        int64_t{1000},
        int64_t{4096},
        int64_t{123457},
        (int64_t{1} << 40) + 7}) {
    for (int64_t size = 1; size <= 70; ++size) {
      int64_t next = 0;
      for (int64_t rank = 0; rank < size; ++rank) {
        const ShardRange r = shard_range(numel, size, rank);
        CHECK_EQ(r.offset, next);
        CHECK(r.length >= 0);
        CHECK(r.offset % 32 == 0 || r.offset == numel);
        CHECK(r.length <= shard_range(numel, size, 0).length);
        next += r.length;
      }
      CHECK_EQ(next, numel);
      // No longer than alignment asks.
      CHECK(shard_range(numel, size, 0).length < numel / size + 33);
    }
  }
  // Checkpoints rely on these for ever.
  CHECK_EQ(shard_range(100, 3, 0).length, 64);
  CHECK_EQ(shard_range(100, 3, 1).offset, 64);
  CHECK_EQ(shard_range(100, 3, 1).length, 36);
  CHECK_EQ(shard_range(100, 3, 2).offset, 100);
  CHECK_EQ(shard_range(100, 3, 2).length, 0);
}

TEST(bootstrap_groups_by_host) {
  on_threads(3, [](int rank, Store& store) {
    Settings s = test_settings();
    s.host_id = rank == 2 ? "other" : "one";
    const Bootstrap b = met(rank, 3, store, s);
    CHECK(!b.single_host());
    CHECK_EQ(b.host_ranks().size(), rank == 2 ? size_t{1} : size_t{2});
    CHECK_EQ(b.peers()[2].host_id, std::string("other"));
    CHECK_EQ(b.local_cpus(), available_cpus());
    CHECK_EQ(b.peers()[1].pid, static_cast<int>(getpid()));
  });
}

TEST(bootstrap_twice_under_one_store) {
  on_threads(3, [](int rank, Store& store) {
    Settings s = test_settings();
    s.arena_bytes = 1 << 20;
    OpDescriptor d;
    Member first(rank, 3, store, s);
    {
      // While the first lives, and once more after.
      Member second(rank, 3, store, s);
      CHECK(second.domain.arena() != first.domain.arena());
      second.domain.barrier(d, Deadline(kLong));
      first.domain.barrier(d, Deadline(kLong));
      second.domain.barrier(d, Deadline(kLong));
    }
    Member third(rank, 3, store, s);
    third.domain.barrier(d, Deadline(kLong));
    first.domain.barrier(d, Deadline(kLong));
  });
}

TEST(bootstrap_ignores_strangers) {
  on_threads(2, [](int rank, Store& store) {
    Bootstrap b = met(rank, 2, store, test_settings());
    Fd memory = create_memory_file("test", 4096);
    const char mark = static_cast<char>('A' + rank);
    CHECK_EQ(pwrite(memory.get(), &mark, 1, 0), ssize_t{1});
    std::vector<Fd> open;
    if (rank == 1) {
      const PeerInfo& zero = b.peers()[0];
      const Fd wrong = create_memory_file("wrong", 4096);
      Hello right{kProtocol, 1, {}};
      std::memcpy(right.token, zero.token.data(), sizeof right.token);
      const auto stranger =
          [&](Hello hello, size_t bytes, const Fd* fd, bool closes) {
            Fd socket = connect_to(zero);
            if (bytes != 0) {
              say(socket, hello, bytes, fd);
            }
            if (!closes) {
              open.push_back(std::move(socket));
            }
          };
      Hello other = right;
      other.token[7] ^= 1;
      stranger(other, sizeof other, &wrong, false);
      for (int claimed : {0, 2, -1, 1000000}) {
        other = right;
        other.rank = claimed;
        stranger(other, sizeof other, &wrong, false);
      }
      other = right;
      other.protocol = 77;
      stranger(other, sizeof other, &wrong, true);
      stranger(right, sizeof right, nullptr, false); // brings no memory
      stranger(right, 5, &wrong, true); // ends in the middle
      stranger(right, 0, nullptr, true); // says nothing
      stranger(right, 0, nullptr, false); // the same, and stays
      stranger(right, 5, nullptr, false); // stays in the middle
    }
    store.meet("strangers came first", 2);
    const auto peers = b.exchange_memory(memory.get(), Deadline(kLong));
    char got = 0;
    CHECK_EQ(pread(peers[1 - rank].memory.get(), &got, 1, 0), ssize_t{1});
    CHECK_EQ(got, static_cast<char>('B' - rank));
    CHECK_EQ(peers[1 - rank].pid, static_cast<int>(getpid()));
    CHECK(!peers[rank].memory);
  });
}

// Idle callers fill the queue of a listener, more come than are kept, and some
// bring files.
TEST(bootstrap_stands_a_flood) {
  on_threads(3, [](int rank, Store& store) {
    Bootstrap b = met(rank, 3, store, test_settings());
    const Fd memory = create_memory_file("test", 4096);
    std::vector<Fd> open;
    store.meet("before", 3);
    const size_t before = rank == 2 ? open_files() : 0;
    if (rank == 2) {
      const Fd file = create_memory_file("stranger", 4096);
      Hello right{kProtocol, 1, {}};
      std::memcpy(right.token, b.peers()[0].token.data(), sizeof right.token);
      for (int i = 0; i < 8; ++i) {
        open.push_back(connect_to(b.peers()[0]));
        say(open.back(), right, sizeof right, &file, 2 + i); // too many
      }
      while (Fd idle = try_connect(b.peers()[0])) {
        open.push_back(std::move(idle));
      }
      CHECK(open.size() > 100);
    }
    store.meet("flooded", 3);
    std::atomic<bool> over{false};
    std::thread more;
    if (rank == 2) {
      more = std::thread([&] {
        for (int i = 0; i < 200 && !over; ++i) {
          if (Fd idle = try_connect(b.peers()[0])) {
            open.push_back(std::move(idle));
          }
          std::this_thread::sleep_for(std::chrono::microseconds(500));
        }
      });
    }
    const auto start = Clock::now();
    const auto peers = b.exchange_memory(memory.get(), Deadline(kLong));
    CHECK(seconds_since(start) < 5);
    for (int p = 0; p < 3; ++p) {
      CHECK_EQ(static_cast<bool>(peers[p].memory), p != rank);
    }
    store.meet("created", 3);
    if (rank == 2) {
      over = true;
      more.join();
      open.clear();
      // Of the three ranks: 6 files, 6 ends of connections, a pidfd they share; no
      // listeners any more.
      CHECK_EQ(open_files(), before + 6 + 6 + 1 - 3);
    }
    store.meet("done", 3);
  });
}

TEST(bootstrap_tells_why_a_rank_gave_up) {
  on_threads(2, [](int rank, Store& store) {
    {
      Bootstrap b = met(rank, 2, store, test_settings());
      if (rank == 1) {
        b.withdraw("fused: no such luck");
        Bootstrap(std::move(b)); // closes the socket
        store.meet("gone", 2);
      } else {
        store.meet("gone", 2);
        const Fd memory = create_memory_file("test", 4096);
        expect_error(
            ErrorKind::kPeerFailed,
            {"rank 1 failed while the group was being created: fused: no such "
             "luck"},
            [&] { b.exchange_memory(memory.get(), Deadline(kLong)); });
      }
      store.meet("heard", 2);
    }
    Settings small = test_settings();
    small.arena_bytes = 1 << 20;
    Member again(rank, 2, store, small);
    again.domain.barrier(OpDescriptor{}, Deadline(kLong));
  });
}

// A rank has room for a few descriptors only. Wherever it runs out of them, it
// says so at once, its peer says the same, and another attempt works.
TEST(bootstrap_without_descriptors) {
  if (kSanitized) {
    return; // sanitizers open files of their own
  }
  on_processes(2, [](int rank, Store& store) {
    Settings s = test_settings();
    s.arena_bytes = 1 << 20;
    bool worked = false;
    int failed = 0;
    const auto start = Clock::now();
    for (int room = 0; room < 12 && !worked; ++room) {
      store.meet(formatted("room for {}", room), 2);
      rlimit before{};
      getrlimit(RLIMIT_NOFILE, &before);
      std::vector<Fd> filled;
      if (rank == 1) {
        const rlimit low{64, before.rlim_max};
        setrlimit(RLIMIT_NOFILE, &low);
        while (Fd fd = Fd::opened([] { return dup(0); })) {
          filled.push_back(std::move(fd));
        }
        filled.resize(filled.size() - room);
      }
      try {
        Member member(rank, 2, store, s);
        member.domain.barrier(OpDescriptor{}, Deadline(kLong));
        worked = true;
      } catch (const Error& error) {
        const std::string text = error.what();
        ++failed;
        if (text.find("RLIMIT_NOFILE, 64") == std::string::npos) {
          report_failure("rank", rank, formatted("{}: {}", room, text));
        }
        CHECK_EQ(
            error.kind(),
            rank == 1 ? ErrorKind::kSystem : ErrorKind::kPeerFailed);
      }
      filled.clear();
      setrlimit(RLIMIT_NOFILE, &before);
    }
    CHECK(worked);
    CHECK(failed >= 4);
    CHECK(seconds_since(start) < 15);
  });
}

TEST(process_ends_as_a_zombie) {
  for (bool pidfd : {true, false}) {
    int pipe[2];
    CHECK_EQ(::pipe(pipe), 0);
    const pid_t child = fork();
    if (child == 0) {
      char c;
      (void)!read(pipe[0], &c, 1);
      _exit(0);
    }
    const auto process = pidfd ? Process::watch(child)
                               : std::make_shared<const Process>(child, Fd());
    CHECK(!process->ended());
    if (pidfd) {
      CHECK(Process::watch(child) == process); // and no further descriptor
    }
    CHECK_EQ(write(pipe[1], "x", 1), ssize_t{1});
    const auto start = Clock::now();
    while (!process->ended() && seconds_since(start) < 10) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    CHECK(process->ended()); // nobody has waited for it: its pid is taken
    CHECK_EQ(kill(child, 0), 0);
    CHECK_EQ(waitpid(child, nullptr, 0), child);
    CHECK(process->ended());
    CHECK(Process::watch(child) == nullptr);
    close(pipe[0]);
    close(pipe[1]);
  }
}

TEST(bootstrap_times_out) {
  Store empty;
  CHECK_THROWS(
      Bootstrap(0, 2, test_settings()).meet(empty, Deadline(milliseconds(50))),
      Error,
      "50 ms on rank 0: 1 of 2 ranks have not come: rank 1; 1 have: rank 0 "
      "(host ");
  Store other;
  CHECK_THROWS(
      Bootstrap(1, 2, test_settings()).meet(other, Deadline(milliseconds(50))),
      Error,
      "50 ms on rank 1: rank 0 did not answer in the store");
  // The peer never comes to the socket; in another group it comes and says
  // nothing.
  for (bool comes : {false, true}) {
    on_threads(2, [&](int rank, Store& store) {
      Bootstrap b = met(rank, 2, store, test_settings());
      Fd socket;
      if (rank == 1 && comes) {
        socket = connect_to(b.peers()[0]);
      }
      store.meet("speechless", 2);
      if (rank == 0) {
        const Fd memory = create_memory_file("test", 4096);
        const auto start = Clock::now();
        expect_error(
            ErrorKind::kTimeout,
            {"200 ms on rank 0", "nothing was heard", "from rank 1"},
            [&] {
              b.exchange_memory(memory.get(), Deadline(milliseconds(200)));
            });
        CHECK(seconds_since(start) < 2);
      }
      store.meet("done", 2);
    });
  }
}

TEST(bootstrap_names_a_dead_peer) {
  on_threads(2, [](int rank, Store& store) {
    Bootstrap b = met(rank, 2, store, test_settings());
    if (rank == 1) {
      Bootstrap(std::move(b)); // closes the socket
      store.meet("gone", 2);
      return;
    }
    store.meet("gone", 2);
    const Fd memory = create_memory_file("test", 4096);
    expect_error(
        ErrorKind::kPeerDead,
        {"rank 1 (pid " + std::to_string(getpid()),
         "cannot reach it",
         "FUSEDPG_HOST_ID"},
        [&] { b.exchange_memory(memory.get(), Deadline(kLong)); });
  });
}

TEST(bootstrap_refuses_other_versions) {
  {
    Store store;
    store.set("fusedpg/2/1", field("99") + field("host"));
    expect_error(ErrorKind::kMismatch, {"rank 1 runs another version"}, [&] {
      met(0, 2, store, test_settings());
    });
  }
  {
    Store store;
    store.set("fusedpg/2/1", "nonsense");
    expect_error(ErrorKind::kSystem, {"malformed"}, [&] {
      met(0, 2, store, test_settings());
    });
  }
}
