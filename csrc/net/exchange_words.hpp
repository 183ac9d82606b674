#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/rendezvous.hpp"

namespace fusedpg {

// Returns every rank's word, by rank. They go through a store: each rank sets
// its word once; one of every 32 ranks collects theirs, one of every 32 of
// these collects what they have, and so on; rank 0 sets the whole, which all
// get. So a rank asks the store one question more for 32 times as many ranks.
//
// Collective, once under a prefix. `check` throws when waiting is in vain; at the
// deadline it says which ranks have not come.
std::vector<std::string> exchange_words(
    Rendezvous& rendezvous,
    const std::string& prefix,
    int rank,
    int size,
    const std::string& word,
    const Deadline& deadline,
    const std::function<void()>& check);

} // namespace fusedpg
