#include "host/bootstrap.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdlib>
#include <limits>

#include "base/ownership.hpp"
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

Fd connect_to(const PeerInfo& peer) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, peer.address.data(), peer.address.size());
  const auto length = static_cast<socklen_t>(
      offsetof(sockaddr_un, sun_path) + peer.address.size());
  CHECK_EQ(
      connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  return socket;
}

void say(const Fd& socket, const Hello& hello, size_t bytes, const Fd* memory) {
  iovec io{const_cast<Hello*>(&hello), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (memory != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = memory->get();
    std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
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
}

TEST(topology_tells_hosts_apart) {
  CHECK_EQ(host_identity("mine"), std::string("mine"));
  CHECK(!host_identity("").empty());
  CHECK_EQ(host_identity(""), host_identity(""));
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
    CHECK_EQ(b.local_world_size(), rank == 2 ? 1 : 2);
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
      Hello right{1, 1, {}};
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

TEST(bootstrap_times_out) {
  Store empty;
  CHECK_THROWS(
      Bootstrap(0, 2, test_settings()).meet(empty, Deadline(milliseconds(50))),
      Error,
      "no fusedpg/1/1 in the store");
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
            {"200 ms",
             comes ? "waiting for a peer's arena" : "waiting for peers"},
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
        {"cannot reach rank 1", std::to_string(getpid()), "FUSEDPG_HOST_ID"},
        [&] { b.exchange_memory(memory.get(), Deadline(kLong)); });
  });
}

TEST(bootstrap_refuses_other_versions) {
  {
    Store store;
    store.set("fusedpg/1/1", field("99") + field("host"));
    expect_error(ErrorKind::kMismatch, {"rank 1 runs another version"}, [&] {
      met(0, 2, store, test_settings());
    });
  }
  {
    Store store;
    store.set("fusedpg/1/1", "nonsense");
    expect_error(ErrorKind::kSystem, {"malformed"}, [&] {
      met(0, 2, store, test_settings());
    });
  }
}
