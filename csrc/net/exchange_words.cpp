#include "net/exchange_words.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace fusedpg {
namespace {

constexpr int kChildren = 32;
// The rank looks around between two waits of this length.
constexpr std::chrono::milliseconds kStoreLook{250};

void append(std::string& all, const std::string& word) {
  const uint64_t bytes = word.size();
  all.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  all += word;
}

std::vector<std::string> words_of(const std::string& all) {
  std::vector<std::string> words;
  for (size_t at = 0; at < all.size();) {
    uint64_t bytes = 0;
    if (all.size() - at >= sizeof bytes) {
      std::memcpy(&bytes, all.data() + at, sizeof bytes);
    }
    if (all.size() - at < sizeof bytes ||
        all.size() - at - sizeof bytes < bytes) {
      fail(ErrorKind::kSystem, "fused: malformed words in the store");
    }
    words.push_back(all.substr(at + sizeof bytes, bytes));
    at += sizeof bytes + bytes;
  }
  return words;
}

// `missing` says at the deadline who has not come.
std::vector<std::string> await_words(
    Rendezvous& rendezvous,
    const std::vector<std::string>& keys,
    int rank,
    const Deadline& deadline,
    const std::function<void()>& check,
    const std::function<std::string()>& missing) {
  while (true) {
    auto values =
        rendezvous.get_all(keys, std::min(kStoreLook, deadline.left()));
    check();
    if (values) {
      return *std::move(values);
    }
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: timeout after {} ms on rank {} waiting for rank {}, which "
          "did not say where it listens",
          deadline.timeout().count(),
          rank,
          missing());
    }
  }
}

class Exchange {
 public:
  Exchange(
      Rendezvous& rendezvous,
      const std::string& prefix,
      int rank,
      int size,
      const Deadline& deadline,
      const std::function<void()>& check)
      : rendezvous_(rendezvous),
        prefix_(prefix),
        rank_(rank),
        size_(size),
        deadline_(deadline),
        check_(check) {}

  std::vector<std::string> run(const std::string& word) {
    std::string mine;
    append(mine, word);
    rendezvous_.set(key(0, rank_), mine);
    int level = 0;
    int64_t stride = 1; // ranks between two of this level
    for (; stride < size_; stride *= kChildren, ++level) {
      if (rank_ % (stride * kChildren) != 0) {
        break; // another one collects
      }
      std::vector<std::string> keys;
      for (int64_t child = 0; child < kChildren; ++child) {
        const int64_t first = rank_ + child * stride;
        if (first < size_) {
          keys.push_back(key(level, first));
        }
      }
      mine.clear();
      for (const std::string& part : get(keys)) {
        mine += part;
      }
      rendezvous_.set(
          stride * kChildren < size_ ? key(level + 1, rank_) : whole(), mine);
    }
    return words_of(rank_ == 0 ? mine : get({whole()}).front());
  }

 private:
  // Returns the key of the words of the ranks from `first` on, at a level of
  // the tree.
  std::string key(int level, int64_t first) const {
    return formatted("{}/{}/{}", prefix_, level, first);
  }
  std::string whole() const {
    return prefix_ + "/all";
  }

  std::vector<std::string> get(const std::vector<std::string>& keys) {
    return await_words(rendezvous_, keys, rank_, deadline_, check_, [this] {
      return missing();
    });
  }

  // Names the ranks that have said nothing; if there are none, one that has not
  // collected in time.
  std::string missing() {
    std::string text;
    for (int p = 0; p < size_; ++p) {
      if (!rendezvous_.has(key(0, p))) {
        text += formatted("{}{}", text.empty() ? "" : ", ", p);
      }
    }
    return text.empty() ? "0" : text;
  }

  Rendezvous& rendezvous_;
  const std::string& prefix_;
  const int rank_;
  const int size_;
  const Deadline& deadline_;
  const std::function<void()>& check_;
};

} // namespace

std::vector<std::string> exchange_words(
    Rendezvous& rendezvous,
    const std::string& prefix,
    int rank,
    int size,
    const std::string& word,
    const Deadline& deadline,
    const std::function<void()>& check) {
  if (size == 1) {
    return {word};
  }
  return Exchange(rendezvous, prefix, rank, size, deadline, check).run(word);
}

} // namespace fusedpg
