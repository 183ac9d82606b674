#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/rendezvous.hpp"
#include "base/stats.hpp"

namespace fusedpg {

// Bytes that stay as long as any request needs them: one that failed may still
// be known to the network.
class NetBuffer {
 public:
  NetBuffer() = default;
  explicit NetBuffer(size_t bytes) : data_(new char[bytes]), bytes_(bytes) {}

  // Somebody else's, which outlives every use: nothing is read from or written
  // to it any more once a wait has thrown.
  static NetBuffer borrowed(char* data, size_t bytes) {
    NetBuffer buffer;
    buffer.data_ = std::shared_ptr<char[]>(std::shared_ptr<char[]>(), data);
    buffer.bytes_ = bytes;
    return buffer;
  }

  char* data() const {
    return data_.get();
  }
  size_t bytes() const {
    return bytes_;
  }
  // Keeps all of it.
  NetBuffer part(size_t begin, size_t bytes) const {
    NetBuffer part;
    part.data_ = std::shared_ptr<char[]>(data_, data_.get() + begin);
    part.bytes_ = bytes;
    return part;
  }

 private:
  std::shared_ptr<char[]> data_;
  size_t bytes_ = 0;
};

// Memory for messages that operations use one after the other: new pages for
// each of them would cost as much as their way through a fast link.
class NetBuffers {
 public:
  // Returns a buffer of at least so many bytes.
  NetBuffer take(size_t bytes);
  // Takes back a buffer that nobody uses any more.
  void give(NetBuffer buffer);

 private:
  static constexpr size_t kMost = size_t(16) << 20; // bytes that stay
  std::vector<NetBuffer> free_;
  size_t bytes_ = 0; // of these
};

// Point to point between the ranks of a group, wherever they are. A message of
// n bytes meets a receive of n bytes; those of one peer and tag, in order. One
// thread at a time.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  class Request {
   public:
    virtual ~Request() = default;
    // Throws Error: kTimeout, kPeerFailed or kAborted. The transport can be
    // used no more then, and no borrowed buffer is read or written.
    virtual void wait(const Deadline& deadline) = 0;
  };
  using RequestPtr = std::unique_ptr<Request>;
  virtual RequestPtr send(int to, uint32_t tag, const NetBuffer& message) = 0;
  virtual RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) = 0;

  // Returns when what was sent is on its way even if this rank does nothing
  // more; or at the deadline.
  virtual void flush(const Deadline& /* deadline */) {}

  // For a thread that has other things to do too: some of what is under way goes
  // on. Whether anything did; if so there may be more.
  virtual bool progress() {
    return false;
  }

  // Counts from now on whom waits of requests are for. It lives as long.
  void set_waits(Waits* waits) {
    waits_ = waits;
  }

  // Called now and then by waits; what it throws ends them.
  virtual void set_watch(std::function<void()> /* watch */) {}

  // From any thread: makes waits throw Error(kAborted), now and later.
  virtual void abort() = 0;
  // From the one that uses it: closes all connections, so that peers hear of a
  // failure that they have no part in.
  virtual void end() noexcept {}

 protected:
  Waits* waits_ = nullptr;
};

} // namespace fusedpg
