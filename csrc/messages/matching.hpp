#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "messages/messages.hpp"

namespace fusedpg {

struct PostedSend {
  MessagePost post;
  uint64_t id; // counts the messages to this receiver
};

// `Note`: what the sender says of a message before its bytes; it has a tag and the id.
template <typename Note>
struct PostedReceive {
  MessagePost post;
  int from = MessagePost::kAnySource; // once a message has been found for it
  Note message{}; // that one

  bool matched() const {
    return from != MessagePost::kAnySource;
  }
  bool takes(int peer, int tag) const {
    return !matched() && post.tag == tag && post.may_come_from(peer);
  }
};

// Finds the receive that each message is for, and keeps the pending sends and
// receives. It neither reads nor writes, and belongs to the thread that moves
// messages. `Send` and `Receive` are a PostedSend and a PostedReceive with what
// a mailbox keeps beside them.
template <typename Send, typename Receive>
class Matching {
 public:
  using Note = decltype(Receive::message);
  using Sends = std::list<Send>;
  using Receives = std::list<Receive>;
  using SendAt = typename Sends::iterator;
  using ReceiveAt = typename Receives::iterator;

  explicit Matching(int size) : sends(size), waiting_(size), next_ids_(size) {}

  std::vector<Sends> sends; // by receiver, in the order of their posts
  Receives receives; // so, each until its message has come as a whole

  bool pending() const {
    return !receives.empty() ||
        std::any_of(sends.begin(), sends.end(), [](const Sends& to) {
          return !to.empty();
        });
  }

  // Knows all these posts from now on, and returns the first of the receives: meet()
  // is to be called for each from there on. It may come upon an error, which is every
  // post's.
  ReceiveAt add(std::vector<MessagePost>& posts) {
    auto first = receives.end();
    for (MessagePost& post : posts) {
      const int peer = post.peer;
      if (post.sends()) {
        sends[peer].push_back(Send{{std::move(post), next_ids_[peer]++}});
      } else if (post.what == MessagePost::What::kReceive) {
        receives.push_back(Receive{{std::move(post)}});
        first = first == receives.end() ? std::prev(first) : first;
      }
    }
    return first;
  }

  // Finds the first message for a receive among those that nobody has received.
  bool meet(Receive& receive) {
    for (int p = 0; p < static_cast<int>(waiting_.size()); ++p) {
      auto& waiting = waiting_[p];
      const auto note =
          std::find_if(waiting.begin(), waiting.end(), [&](const Note& n) {
            return receive.takes(p, n.tag);
          });
      if (note != waiting.end()) {
        receive.from = p;
        receive.message = *note;
        waiting.erase(note);
        return true;
      }
    }
    return false;
  }

  // Finds the receive for a message that has come. If there is none the message waits.
  std::optional<ReceiveAt> arrive(int peer, const Note& note) {
    const auto receive = found(
        receives, [&](const Receive& r) { return r.takes(peer, note.tag); });
    if (!receive) {
      waiting_[peer].push_back(note);
    } else {
      (*receive)->from = peer;
      (*receive)->message = note;
    }
    return receive;
  }

  // The send or the receive of a message, which may have failed here meanwhile.
  std::optional<SendAt> find_send(int to, uint64_t id) {
    return found(sends[to], [&](const Send& s) { return s.id == id; });
  }
  std::optional<ReceiveAt> find_receive(int from, uint64_t id) {
    return found(receives, [&](const Receive& r) {
      return r.from == from && r.message.id == id;
    });
  }

  // Forgets everything: ended(post) is called for all sends and receives.
  template <typename F>
  void clear(const F& ended) {
    for (Receive& receive : std::exchange(receives, {})) {
      ended(receive.post);
    }
    for (Sends& to : sends) {
      for (Send& send : std::exchange(to, {})) {
        ended(send.post);
      }
    }
    waiting_.assign(waiting_.size(), {});
  }

 private:
  template <typename List, typename F>
  static std::optional<typename List::iterator> found(List& list, const F& is) {
    const auto one = std::find_if(list.begin(), list.end(), is);
    return one != list.end() ? std::optional(one) : std::nullopt;
  }

  std::vector<std::deque<Note>>
      waiting_; // messages without a receive, by sender
  std::vector<uint64_t> next_ids_; // by receiver
};

} // namespace fusedpg
