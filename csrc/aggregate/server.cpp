#include "aggregate/server.hpp"

#include <poll.h>
#include <pthread.h>

#include "aggregate/job.hpp"
#include "base/error.hpp"
#include "base/options.hpp"

namespace fusedpg::aggregate {
namespace {

constexpr size_t kMostJobs = 1024;

} // namespace

Server::Server(const TcpAddress& door, const kernels::Table& kernels)
    : kernels_(kernels),
      listener_(std::make_shared<TcpListener>(door.socket)),
      door_(
          std::make_unique<TcpEndpoint>(
              listener_,
              0,
              1,
              door.key,
              door.endpoint)),
      thread_([this] { take_in(); }) {}

Server::~Server() {
  ending_ = true;
  signal_.set();
  thread_.join();
  for (Running& one : jobs_) {
    one.job->end();
  }
  for (Running& one : jobs_) {
    one.thread.join();
  }
}

void Server::drain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  door_.reset();
}

Server::Stats Server::stats() const {
  const Counters& c = counters_;
  return {
      c.jobs,
      c.active,
      c.refused,
      c.failed,
      c.operations,
      c.segments,
      c.bytes_received,
      c.bytes_sent};
}

void Server::take_in() {
  pthread_setname_np(pthread_self(), "fusedpg-door");
  constexpr int kLook = 50; // ms; for jobs that have ended
  while (!ending_) {
    pollfd one{.fd = signal_.fd(), .events = POLLIN, .revents = 0};
    poll(&one, 1, kLook);
    const std::lock_guard<std::mutex> lock(mutex_);
    reap();
    if (!door_ || ending_) {
      continue;
    }
    for (auto& [from, socket] : door_->take()) {
      if (jobs_.size() >= kMostJobs) {
        ++counters_.refused;
        continue; // its connection ends
      }
      ++counters_.active; // the job ends this
      Running& running = jobs_.emplace_back();
      try {
        running.job = std::make_unique<Job>(
            listener_, kernels_, counters_, std::move(socket));
        running.thread = std::thread([job = running.job.get()] { job->run(); });
      } catch (const std::exception& error) {
        jobs_.pop_back();
        --counters_.active;
        ++counters_.refused;
        log_line(formatted("aggregator: no thread: {}", error.what()));
      }
    }
  }
}

void Server::reap() {
  for (auto one = jobs_.begin(); one != jobs_.end();) {
    if (one->job->ended()) {
      one->thread.join();
      one = jobs_.erase(one);
    } else {
      ++one;
    }
  }
}

} // namespace fusedpg::aggregate
