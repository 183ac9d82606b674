#include "collectives/connect_hosts.hpp"

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>
#include <type_traits>

#include "base/error.hpp"
#include "net/exchange_words.hpp"

namespace fusedpg {
namespace {

// The same where waits must end: a store that is out of reach or stopped answers
// nothing, and its client then waits without a limit. So each request has a thread
// of its own, which stays behind if need be.
class BoundedRendezvous : public Rendezvous {
 public:
  // `check` throws when waiting is in vain.
  BoundedRendezvous(
      std::shared_ptr<Rendezvous> store,
      const Deadline& deadline,
      std::function<void()> check)
      : store_(std::move(store)),
        deadline_(deadline),
        check_(std::move(check)) {}
  void set(const std::string& key, const std::string& value) override {
    ask([=](Rendezvous& store) { store.set(key, value); }, deadline_);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return ask(
        [=](Rendezvous& store) { return store.get(key, deadline); }, deadline);
  }
  std::optional<std::vector<std::string>> get_all(
      const std::vector<std::string>& keys,
      std::chrono::milliseconds most) override {
    return ask(
        [=](Rendezvous& store) { return store.get_all(keys, most); },
        deadline_);
  }
  bool has(const std::string& key) override {
    return ask([=](Rendezvous& store) { return store.has(key); }, deadline_);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return ask(
        [=](Rendezvous& store) { return store.add(key, amount); }, deadline_);
  }

 private:
  template <typename Call>
  std::invoke_result_t<Call, Rendezvous&> ask(
      const Call& call,
      const Deadline& deadline) {
    constexpr std::chrono::milliseconds kLook{20};
    constexpr std::chrono::milliseconds kLast{100}; // for an answer under way
    using Answer = std::invoke_result_t<Call, Rendezvous&>;
    std::packaged_task<Answer()> task(
        [call, store = store_]() mutable { return call(*store); });
    std::future<Answer> answer = task.get_future();
    std::thread(std::move(task)).detach();
    while (answer.wait_for(kLook) != std::future_status::ready) {
      check_();
      if (deadline.expired() &&
          answer.wait_for(kLast) != std::future_status::ready) {
        fail(
            ErrorKind::kTimeout,
            "fused: timeout after {} ms: the store does not answer",
            deadline.timeout().count());
      }
    }
    return answer.get();
  }

  const std::shared_ptr<Rendezvous> store_;
  const Deadline deadline_;
  const std::function<void()> check_;
};

// A rank's word to the others: what they have to know of it, or why it cannot
// take part.
struct Offer {
  std::string word;
  std::string why_not;
  std::exception_ptr error{}; // of this rank

  std::string text() const {
    return word + "\n" + why_not;
  }
  static Offer of(const std::string& text) {
    const size_t first = text.find('\n');
    return {text.substr(0, first), text.substr(first + 1)};
  }
};

Offer offer_of(
    const GroupBase& group,
    const std::function<std::string()>& word) {
  try {
    return {word(), ""};
  } catch (const std::exception& error) {
    return {"", group.error_of(error).what(), std::current_exception()};
  }
}

std::vector<std::string> exchange(
    const GroupBase& group,
    const Offer& mine,
    Rendezvous& rendezvous,
    const Deadline& deadline,
    const std::function<void()>& check) {
  std::vector<std::string> words = exchange_words(
      rendezvous,
      "fusedpg-transport/offer",
      group.rank,
      group.size,
      mine.text(),
      deadline,
      check);
  if (mine.error) {
    std::rethrow_exception(mine.error);
  }
  for (int p = 0; p < group.size; ++p) {
    const Offer offer = Offer::of(words[p]);
    if (!offer.why_not.empty()) {
      const std::string prefix = "fused: ";
      fail(
          ErrorKind::kSystem,
          "fused: the hosts cannot be connected, because of rank {}: {}",
          p,
          offer.why_not.substr(
              offer.why_not.starts_with(prefix) ? prefix.size() : 0));
    }
    words[p] = offer.word;
  }
  return words;
}

// It listens at the address that is on the way to the store, if that has one. With
// room for `more` that are no ranks of the group.
std::unique_ptr<TcpEndpoint> open_endpoint(
    const GroupBase& group,
    const Rendezvous& store,
    int more = 0) {
  const auto [host, port] = store.address();
  return std::make_unique<TcpEndpoint>(
      TcpListener::at(
          local_address(group.settings.socket_ifname, host, port),
          PortRange::of(group.settings.port_range)),
      group.rank,
      group.size + more);
}

TcpTransport::Config tcp_config(const Settings& settings) {
  TcpTransport::Config config;
  if (settings.spin_us >= 0) {
    config.spin = std::chrono::microseconds(settings.spin_us);
  } else if (
      std::thread::hardware_concurrency() <=
      static_cast<unsigned>(std::max(settings.local_world_size, 1))) {
    config.spin = {}; // a peer may need the core
  }
  return config;
}

// --- words by the connections themselves, for what is agreed on later --------

constexpr uint32_t kWordTag = ~uint32_t(1); // no operation's
constexpr size_t kMostWordBytes = 2048; // each travels as so many

void say(
    Transport& transport,
    int to,
    const std::string& word,
    const Deadline& deadline) {
  const NetBuffer message(kMostWordBytes);
  std::memset(message.data(), 0, message.bytes());
  std::memcpy(
      message.data(), word.data(), std::min(word.size(), kMostWordBytes - 1));
  transport.send(to, kWordTag, message)->wait(deadline);
}

std::string hear(Transport& transport, int from, const Deadline& deadline) {
  const NetBuffer message(kMostWordBytes);
  transport.receive(from, kWordTag, message)->wait(deadline);
  message.data()[kMostWordBytes - 1] = 0;
  return message.data();
}

} // namespace

Connection connect_hosts(
    const GroupBase& group,
    const std::shared_ptr<Rendezvous>& store,
    const std::function<void()>& prepare,
    const Deadline& deadline,
    const std::function<void()>& check) {
  BoundedRendezvous rendezvous(store, deadline, check);
  Connection connection;
  std::unique_ptr<TcpEndpoint> endpoint;
  const Offer mine = offer_of(group, [&] {
    prepare();
    endpoint = open_endpoint(group, *store);
    connection.mail = open_endpoint(group, *store);
    connection.address = endpoint->socket_address().host();
    return endpoint->address() + "," + connection.mail->address();
  });
  std::vector<std::string> addresses =
      exchange(group, mine, rendezvous, deadline, check);
  for (std::string& both : addresses) {
    const size_t comma = both.find(',');
    connection.mail_addresses.push_back(both.substr(comma + 1));
    both.resize(comma);
  }
  connection.transport = std::make_unique<TcpTransport>(
      tcp_config(group.settings), std::move(endpoint), addresses);
  return connection;
}

std::unique_ptr<aggregate::Client> connect_aggregators(
    const GroupBase& group,
    const Rendezvous& store,
    Transport& transport,
    bool alone,
    const Deadline& deadline,
    const std::function<void()>& check) {
  const Settings& settings = group.settings;
  const std::vector<std::string>& places = settings.aggregators;
  if (places.empty()) {
    return nullptr;
  }
  if (!alone) {
    fail(
        ErrorKind::kInvalid,
        "fused: Options.aggregators (FUSEDPG_AGGREGATORS) add up in rank "
        "order: where ranks share hosts that is order=\"flat\" "
        "(FUSEDPG_ORDER)");
  }
  const Key128 key = aggregate::key_of(settings.aggregator_key);
  auto endpoint = open_endpoint(group, store, static_cast<int>(places.size()));
  // Rank 0 opens the jobs, and says where they are, or why there is none, before
  // the others have waited too long.
  std::vector<Offer> jobs;
  if (group.rank == 0) {
    std::vector<std::string> workers{endpoint->address()};
    for (int p = 1; p < group.size; ++p) {
      workers.push_back(hear(transport, p, deadline));
    }
    const Deadline patience(
        std::min(deadline.left() / 2, std::chrono::milliseconds(10'000)));
    for (size_t a = 0; a < places.size(); ++a) {
      jobs.push_back(offer_of(group, [&] {
        return aggregate::open_job(
            places[a], key, {workers, places.size(), a}, patience, check);
      }));
      for (int p = 1; p < group.size; ++p) {
        say(transport, p, jobs[a].text(), deadline);
      }
      if (jobs[a].error) {
        transport.flush(patience);
        check();
        fail(ErrorKind::kSystem, "{}", jobs[a].why_not);
      }
    }
  } else {
    say(transport, 0, endpoint->address(), deadline);
    for (size_t a = 0; a < places.size(); ++a) {
      jobs.push_back(Offer::of(hear(transport, 0, deadline)));
      if (!jobs[a].why_not.empty()) {
        fail(ErrorKind::kPeerFailed, "{}", jobs[a].why_not);
      }
    }
  }
  auto connections =
      std::make_unique<TcpTransport>(tcp_config(settings), std::move(endpoint));
  for (size_t a = 0; a < places.size(); ++a) {
    connections->connect(group.size + static_cast<int>(a), jobs[a].word);
  }
  return std::make_unique<aggregate::Client>(
      places, std::move(connections), group.size);
}

std::unique_ptr<TcpTransport> open_transport(
    const GroupBase& group,
    std::unique_ptr<TcpEndpoint> mail) {
  return std::make_unique<TcpTransport>(
      tcp_config(group.settings), std::move(mail));
}

} // namespace fusedpg
