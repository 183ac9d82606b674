#include "aggregate/server.hpp"

#include <poll.h>
#include <pthread.h>

#include "aggregate/job.hpp"
#include "base/error.hpp"
#include "base/options.hpp"

namespace fusedpg::aggregate {
namespace {

constexpr size_t kMostJobs = 1024;

void add(Server::Stats& to, const Server::Stats& one) {
  to.jobs += one.jobs;
  to.active += one.active;
  to.refused += one.refused;
  to.failed += one.failed;
  to.operations += one.operations;
  to.segments += one.segments;
  to.bytes_received += one.bytes_received;
  to.bytes_sent += one.bytes_sent;
}

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

Server::Stats Server::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = ended_;
  for (const Running& one : jobs_) {
    add(stats, one.job->stats());
  }
  return stats;
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
        ++ended_.refused;
        continue; // its connection ends
      }
      try {
        jobs_.push_back(
            {std::make_unique<Job>(listener_, kernels_, std::move(socket)),
             {}});
        Job* job = jobs_.back().job.get();
        jobs_.back().thread = std::thread([job] { job->run(); });
      } catch (const std::exception& error) {
        jobs_.pop_back();
        ++ended_.refused;
        log_line(formatted("aggregator: no thread: {}", error.what()));
      }
    }
  }
}

void Server::reap() {
  for (auto one = jobs_.begin(); one != jobs_.end();) {
    if (one->job->ended()) {
      one->thread.join();
      add(ended_, one->job->stats());
      one = jobs_.erase(one);
    } else {
      ++one;
    }
  }
}

} // namespace fusedpg::aggregate
