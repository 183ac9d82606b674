#pragma once

#include <utility>

namespace fusedpg {

// While one exists, no thread of this process forks.
class NoFork {
 public:
  NoFork();
  ~NoFork();
  NoFork(const NoFork&) = delete;
};

// An owned file descriptor. A forked child closes it before it does anything else,
// and finds the object empty: a peer sees that a connection has ended only when no
// process has it open any more.
class Fd {
 public:
  Fd() = default;
  // Owns the descriptor that `open` returns: a system call such as socket()
  // that does not block.
  template <typename Open>
  static Fd opened(const Open& open) {
    const NoFork hold;
    return Fd(open(), hold);
  }
  // Opened in the scope of that.
  Fd(int fd, const NoFork&);
  Fd(Fd&& other) noexcept {
    take(other);
  }
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  ~Fd() {
    reset();
  }

  int get() const {
    return fd_;
  }
  explicit operator bool() const {
    return fd_ >= 0;
  }
  void reset();

  // In a child.
  static void close_all() noexcept;

 private:
  void link();
  void unlink();
  void take(Fd& other) noexcept;

  static Fd* first_; // of all that are open
  int fd_ = -1;
  Fd* next_ = nullptr;
  Fd** link_ = nullptr; // what points to this one
};

} // namespace fusedpg
