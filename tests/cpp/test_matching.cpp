// Which receive a message is for, without a mailbox: the rules that both of them have.

#include "messages/matching.hpp"

#include <memory>
#include <random>

#include "check.hpp"

namespace {

using namespace fusedpg;
using What = MessagePost::What;

constexpr int kAny = MessagePost::kAnySource;
constexpr std::chrono::hours kLong{1};

struct Offer {
  uint64_t id = 0;
  int tag = 0;
};
struct Send : PostedSend {};
struct Receive : PostedReceive<Offer> {};
using Matches = Matching<Send, Receive>;

MessagePost post(What what, int peer, int tag, size_t bytes = 8) {
  return {what, nullptr, bytes, peer, tag, Deadline(kLong), {}};
}

// Posts a receive; the message that it meets at once, if any.
std::optional<uint64_t> receive(Matches& messages, int peer, int tag) {
  std::vector<MessagePost> posts{post(What::kReceive, peer, tag)};
  Receive& added = *messages.add(posts);
  return messages.meet(added) ? std::optional(added.message.id) : std::nullopt;
}

// The number of the receive that a message is for, if it is posted.
std::optional<long> arrive(Matches& messages, int peer, Offer offer) {
  const auto receive = messages.arrive(peer, offer);
  if (!receive) {
    return std::nullopt;
  }
  CHECK_EQ((*receive)->from, peer);
  CHECK_EQ((*receive)->message.id, offer.id);
  return std::distance(messages.receives.begin(), *receive);
}

} // namespace

TEST(matching_receives_come_first) {
  Matches messages(4);
  for (const auto& [peer, tag] :
       {std::pair(2, 1), {1, 2}, {kAny, 1}, {1, 1}, {1, 1}}) {
    CHECK(!receive(messages, peer, tag));
  }
  CHECK(!arrive(messages, 1, {0, 9})); // of no receive's tag
  CHECK(!arrive(messages, 3, {0, 2})); // from another rank
  CHECK(arrive(messages, 1, {1, 1}) == 2); // the first that it may meet
  CHECK(arrive(messages, 1, {2, 1}) == 3); // no receive twice
  CHECK(arrive(messages, 2, {0, 1}) == 0);
  CHECK(arrive(messages, 1, {3, 1}) == 4);
  CHECK(!arrive(messages, 1, {4, 1}));
  CHECK(arrive(messages, 1, {5, 2}) == 1);
}

TEST(matching_messages_come_first) {
  Matches messages(4);
  for (const uint64_t id : {0, 1, 2}) {
    CHECK(!arrive(messages, 2, {10 + id, 1}));
    CHECK(!arrive(messages, 1, {20 + id, 1}));
  }
  CHECK(!arrive(messages, 1, {30, 2}));
  CHECK(!receive(messages, 3, 1));
  CHECK(!receive(messages, 1, 3));
  CHECK(receive(messages, 2, 1) == 10u);
  CHECK(receive(messages, kAny, 1) == 20u); // of the lowest rank
  CHECK(receive(messages, 1, 2) == 30u);
  CHECK(receive(messages, 1, 1) == 21u);
  CHECK(receive(messages, kAny, 1) == 22u);
  CHECK(receive(messages, kAny, 1) == 11u);
  CHECK(receive(messages, 2, 1) == 12u);
  CHECK(!receive(messages, 2, 1));
}

// Those of one sender and tag are received in their order, whoever comes first, and
// nothing waits while there is something for it.
TEST(matching_random) {
  constexpr int kRanks = 4;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    Matches messages(kRanks);
    struct Known {
      int peer, tag;
      bool matched;
    };
    std::vector<Known> receives; // as posted
    std::vector<Known> sent; // as they came; the index is the id
    const auto accepts = [](const Known& receive, const Known& message) {
      return !receive.matched && !message.matched &&
          receive.tag == message.tag &&
          (receive.peer == kAny || receive.peer == message.peer);
    };
    for (int i = 0; i < 200; ++i) {
      const int tag = static_cast<int>(random() % 3);
      const int peer = static_cast<int>(random() % kRanks);
      if (random() % 2 == 0) {
        Known message{peer, tag, false};
        std::optional<long> wanted;
        for (size_t r = 0; r < receives.size() && !wanted; ++r) {
          if (accepts(receives[r], message)) {
            wanted = static_cast<long>(r);
            receives[r].matched = message.matched = true;
          }
        }
        CHECK(arrive(messages, peer, {sent.size(), tag}) == wanted);
        sent.push_back(message);
      } else {
        Known one{random() % 3 == 0 ? kAny : peer, tag, false};
        std::optional<uint64_t> wanted;
        for (int p = 0; p < kRanks && !wanted; ++p) {
          for (size_t m = 0; m < sent.size() && !wanted; ++m) {
            if (sent[m].peer == p && accepts(one, sent[m])) {
              wanted = m;
              one.matched = sent[m].matched = true;
            }
          }
        }
        CHECK(receive(messages, one.peer, tag) == wanted);
        receives.push_back(one);
      }
    }
  }
}

// An error that comes while receives are matched is also that of later posts.
TEST(matching_knows_all_posts_first) {
  Matches messages(3);
  CHECK(!messages.pending());
  CHECK(!arrive(messages, 1, {0, 4}));
  CHECK(!messages.pending()); // what nobody receives is not
  std::vector<MessagePost> posts;
  posts.push_back(post(What::kReceive, 1, 4, 1));
  posts.push_back(post(What::kSend, 1, 4, 2));
  posts.push_back(post(What::kWithdraw, kAny, 4, 3));
  posts.push_back(post(What::kNotify, 2, 4, 4));
  posts.push_back(post(What::kReceive, kAny, 4, 5));
  posts.push_back(post(What::kSend, 1, 5, 6));
  const auto first = messages.add(posts);
  CHECK(first == messages.receives.begin());
  CHECK_EQ(messages.receives.size(), size_t{2});
  CHECK(messages.pending());
  CHECK_EQ(messages.receives.front().post.bytes, size_t{1});
  CHECK(!messages.receives.front().matched());
  // The messages to each rank are counted.
  CHECK_EQ(messages.sends[1].front().id, uint64_t{0});
  CHECK_EQ(messages.sends[1].back().id, uint64_t{1});
  CHECK_EQ(messages.sends[2].back().id, uint64_t{0});

  std::vector<size_t> ended;
  messages.clear([&](const MessagePost& p) { ended.push_back(p.bytes); });
  CHECK(ended == std::vector<size_t>({1, 5, 2, 6, 4}));
  CHECK(!messages.pending());
  CHECK(!receive(messages, 1, 4)); // the message is forgotten, too
}

TEST(matching_finds_what_is_pending) {
  Matches messages(3);
  std::vector<MessagePost> posts;
  posts.push_back(post(What::kSend, 1, 0, 10));
  posts.push_back(post(What::kSend, 1, 0, 11));
  posts.push_back(post(What::kSend, 2, 0, 20));
  messages.add(posts);
  CHECK_EQ((*messages.find_send(1, 1))->post.bytes, size_t{11});
  CHECK_EQ((*messages.find_send(2, 0))->post.bytes, size_t{20});
  CHECK(!messages.find_send(2, 1));
  messages.sends[1].erase(*messages.find_send(1, 0));
  CHECK(!messages.find_send(1, 0));

  receive(messages, kAny, 1);
  receive(messages, 2, 1);
  CHECK(!messages.find_receive(1, 0)); // no message yet
  CHECK(arrive(messages, 2, {0, 1}) == 0);
  CHECK(arrive(messages, 2, {1, 1}) == 1);
  CHECK((*messages.find_receive(2, 1))->post.peer == 2);
  CHECK((*messages.find_receive(2, 0))->post.peer == kAny);
  CHECK(!messages.find_receive(1, 0));
}

TEST(matching_queue_of_posts) {
  PostQueue queue;
  CHECK(queue.empty());
  queue.push(post(What::kSend, 1, 1, 5), 0);
  queue.push(post(What::kReceive, kAny, 1, 6), 0);
  CHECK(!queue.empty());
  std::vector<MessagePost> posts;
  queue.take(posts);
  CHECK(queue.empty());
  CHECK(posts.size() == 2 && posts[0].bytes == 5 && posts[1].bytes == 6);
  queue.take(posts);
  CHECK(posts.empty());

  queue.push(post(What::kSend, 1, 1, 7), 0);
  int calls = 0;
  queue.if_open([&] { ++calls; });
  queue.close(Error(ErrorKind::kAborted, "it is over"), posts);
  CHECK(posts.size() == 1 && posts[0].bytes == 7);
  queue.if_open([&] { ++calls; });
  CHECK_EQ(calls, 1);
  CHECK(queue.empty());
  CHECK_THROWS(
      queue.push(post(What::kSend, 1, 1, 8), 2),
      Error,
      "fused: send(8 bytes, tag 1, to rank 1) on rank 2: it is over");
  CHECK(queue.empty());
}

TEST(matching_errors_name_their_message) {
  const MessagePost any = post(What::kReceive, kAny, 4, 10);
  const MessagePost sent = post(What::kNotify, 3, -2, 0);
  CHECK_EQ(any.name(), "recv(10 bytes, tag 4, from any rank)");
  CHECK_EQ(sent.name(), "send(0 bytes, tag -2, to rank 3)");
  const auto text = [](const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      CHECK(e.kind() == ErrorKind::kPeerDead);
      return std::string(e.what());
    }
  };
  const auto of = [&](const std::string& why) {
    return text(error_of(Error(ErrorKind::kPeerDead, why), any, 1));
  };
  const std::string named =
      "fused: recv(10 bytes, tag 4, from any rank), failed on rank 1: ";
  CHECK_EQ(of("fused: gone"), named + "gone");
  CHECK_EQ(of("gone"), named + "gone");
  CHECK_EQ(of(named + "gone"), named + "gone");

  CHECK_EQ(
      std::string(receive_mismatch(any, 1, 2, 20).what()),
      "fused: recv(10 bytes, tag 4, from any rank) on rank 1: rank 2 sent 20 "
      "bytes, expected 10");
  CHECK_EQ(
      std::string(send_mismatch(sent, 1, 3, 20).what()),
      "fused: send(0 bytes, tag -2, to rank 3) from rank 1: rank 3 expects 20 "
      "bytes, sent 0");
  const std::string late =
      "fused: recv(10 bytes, tag 4, from any rank), failed on rank 1: timeout "
      "after 3600000 ms without the other side";
  CHECK_EQ(std::string(late_message(any, 1).what()), late);
  CHECK_EQ(
      std::string(late_message(any, 1, "it sleeps").what()),
      late + "; it sleeps");
}
