#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/function_ref.hpp"
#include "base/options.hpp"
#include "base/stats.hpp"
#include "host/executor.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

class Arena;
class Domain;
class Messages;
class Way;

// The kernel table that the settings name, or the best. Throws Error(kInvalid).
const kernels::Table& select_kernels(const Settings& settings);

// The part of a group that its engine uses: ranks, settings, the queue of the
// operations, and their counts. The group lives longer than the engine.
struct GroupBase {
  // Makes an Error of another exception, in one line, for other ranks. The kind
  // is kSystem unless the exception's type says more.
  using Describe = Error (*)(const std::exception&);

  GroupBase(
      int rank,
      int size,
      Settings settings,
      const kernels::Table& table,
      Describe describe)
      : rank(rank),
        size(size),
        settings(std::move(settings)),
        kernels(table),
        waits(size),
        executor_(std::make_shared<Executor>()),
        describe_(describe) {}
  GroupBase(const GroupBase&) = delete;

  // Makes an Error of any exception.
  Error error_of(const std::exception& thrown) const;

  Executor& executor() {
    return *executor_;
  }

  const int rank;
  const int size;
  const Settings settings;
  const kernels::Table& kernels;
  Stats stats;
  Waits waits;
  std::string exit; // how the interpreter ended, if before the group was closed

 protected:
  const std::shared_ptr<Executor> executor_; // with every WorkFused

 private:
  const Describe describe_;
};

// How a group stands; fusedpg.group_info() explains the fields.
struct GroupInfo {
  std::string engine;
  std::vector<int> local_ranks; // that share this host
  int threads = 1;
  std::string isa;
  size_t arena_reserved = 0;
  size_t arena_used = 0;
  uint64_t sequence_number = 0;
  bool failed = false;
  size_t cuda_arena = 0; // bytes that were asked for
  int nccl_version = 0; // of the CUDA engine; 0: none
  std::string transport; // between hosts, once it is connected
  std::vector<std::string> aggregators; // that add up, once connected
  std::string aggregate; // the latest choice of them, or not
  std::string address; // that other hosts reach this rank by, where it is ours
  std::string cuda_path; // of its last step; see path_of_last_step()
};

// Carries out the operations of a group on CPU tensors, and says what becomes of
// the group when one fails. ShmEngine does that where all ranks share a machine,
// HostsEngine where they do not. Thread-safe.
class Engine {
 public:
  explicit Engine(GroupBase& group) : group_(group) {}
  Engine(const Engine&) = delete;
  virtual ~Engine() = default;

  // Runs `op`, the work of one turn of the group's queue by perform(), on this
  // thread, which is the executor's at the moment; `title` and `ticket` name it in
  // errors; for `async_call` see OpDescriptor. Where it throws,
  //
  // - this rank refuses if it has told its peers nothing of the operation yet:
  //   they raise, too, and all ranks are in step;
  // - an Error of kind kInvalid or kMismatch is the same on all ranks, which are
  //   in step as well;
  // - after anything else the group has failed: so has it when an abort was the
  //   reason, and when peers cannot be told of a refusal.
  template <typename Operation>
  void execute(
      const Operation& op,
      const char* title,
      uint64_t ticket,
      std::chrono::milliseconds timeout,
      uint64_t async_call = 0) {
    Way& way = open_way(ticket, timeout);
    way.op().async_call = async_call;
    struct Close {
      Engine& engine;
      ~Close() {
        engine.close_way();
      }
    } close{*this};
    std::exception_ptr alike;
    try {
      try {
        begin(way);
        op(way);
      } catch (const std::exception& thrown) {
        if (!stays_in_step(way, thrown)) {
          throw;
        }
        alike = std::current_exception();
      }
      end(way);
    } catch (const std::exception& thrown) {
      // Foreseen or not (no memory, no thread): the peers are somewhere inside the
      // operation that this rank has left.
      fail_group(group_.error_of(thrown), title, ticket);
      throw;
    }
    if (alike) {
      std::rethrow_exception(alike);
    }
  }

  // Throws the failure of the group, if it has failed.
  virtual void check_failed() = 0;
  // Its kind.
  virtual std::optional<ErrorKind> failure() = 0;

  // For sends and receives. Throws where the group has failed, and what
  // `check_open` throws, which looks whether it has been shut down.
  std::shared_ptr<Messages> messages(FunctionRef<void()> check_open);
  // Throws what messages() throws, too.
  virtual void monitored_barrier(
      std::chrono::milliseconds timeout,
      bool wait_all_ranks,
      FunctionRef<void()> check_open) = 0;

  // The ranks on this host; null if this is the only one.
  virtual Domain* host() = 0;
  std::shared_ptr<Arena> arena();
  virtual bool spans_hosts() const = 0;
  // Throws when a rank of the group has failed or died, as far as shared memory
  // tells. `what` waits for it.
  virtual void check_peers(const std::string& /* what */) {}
  virtual void describe(GroupInfo& info);

  // Stops whatever runs and makes every later operation throw. Not from below an
  // operation, for which it waits.
  virtual void abort() = 0;
  // Makes what runs or waits end, and waits for nothing. `how`: "aborted", or
  // "interrupted by KeyboardInterrupt".
  virtual void interrupt(const std::string& how) = 0;
  virtual void shutdown() = 0;

 protected:
  // Opens the way that connects the ranks during a turn. Throws where the group
  // has failed.
  virtual Way& open_way(uint64_t ticket, std::chrono::milliseconds timeout) = 0;
  virtual void close_way() = 0;
  // Before an operation and after it, within the rule of execute().
  virtual void begin(Way& way) = 0;
  virtual void end(Way& way) = 0;
  // Ends the group. May throw something that says more.
  virtual void fail_group(
      const Error& error,
      const char* title,
      uint64_t ticket) = 0;

  // Called once, under mailbox_mutex_.
  virtual std::shared_ptr<Messages> open_messages() = 0;
  // Ends the messages, for good. A thread that waits for one may hold the mailbox
  // for longer than the engine lives.
  void stop_messages();

  GroupBase& group_;
  std::mutex mailbox_mutex_;
  std::shared_ptr<Messages> mailbox_; // made by the first message

 private:
  // Whether all ranks are still in step after this rank has thrown. Tells the
  // peers of the exception if they don't know it; throws if it cannot.
  bool stays_in_step(Way& way, const std::exception& thrown);
};

} // namespace fusedpg
