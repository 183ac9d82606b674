#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/rendezvous.hpp"

namespace fusedpg {

// What every rank says, by rank, through a store: each sets its word once; of
// every 32 ranks one collects theirs, of every 32 of these one what they have,
// and so on, and rank 0 sets the whole, which all get. So what a rank asks of the
// store does not grow with their number but by a step for 32 times as many.
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
