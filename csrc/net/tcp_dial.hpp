#pragma once

#include <functional>
#include <string>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "net/tcp_listener.hpp"

// A conversation of two, for those who wait for each word of it.
namespace fusedpg::tcp {

// Throws when waiting is in vain; called every 20 ms.
using Check = std::function<void()>;

// A connection to an endpoint, when both sides have proved that they have its
// key. Knocks again while nobody listens. Throws Error: kTimeout; kPeerFailed
// where whoever listens there has no such endpoint or not the key; and what
// `check` throws.
Fd dial(
    const TcpAddress& address,
    int from,
    int to,
    const Deadline& deadline,
    const Check& check);

// One word of at most `most` bytes. Throws Error: kTimeout; kPeerFailed where
// the connection ends or a word is longer; and what `check` throws.
void say(
    const Fd& socket,
    const std::string& word,
    const Deadline& deadline,
    const Check& check);
std::string hear(
    const Fd& socket,
    size_t most,
    const Deadline& deadline,
    const Check& check);

} // namespace fusedpg::tcp
