#include "check.hpp"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>

namespace fusedpg::test {

namespace {

std::atomic<size_t> failures{0};

// Beyond this a loop of checks only drowns the first failure.
constexpr size_t kPrinted = 20;

} // namespace

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

void report_failure(const char* file, int line, const std::string& what) {
  static std::mutex mutex;
  const size_t before = failures.fetch_add(1);
  if (before < kPrinted) {
    std::lock_guard<std::mutex> lock(mutex);
    std::cerr << file << ":" << line << ": " << what << std::endl;
  } else if (before == kPrinted) {
    std::cerr << "further failures of this test are not shown" << std::endl;
  }
}

size_t failure_count() {
  return failures;
}

} // namespace fusedpg::test

namespace {

// Whether a test can find anything in this build: the thread sanitizer has
// nothing to see in pure kernels.
bool applies(const fusedpg::test::Case& test) {
  return !fusedpg::test::kOnlyThreads ||
      (std::strncmp(test.name, "kernels_", 8) != 0 &&
       std::strncmp(test.name, "cuda_tiles_", 11) != 0);
}

} // namespace

// Runs all tests, those whose names contain an argument, or with --exact the
// one of that name; --list prints the names.
int main(int argc, char** argv) {
  using namespace fusedpg::test;
  const bool exact = argc == 3 && std::strcmp(argv[1], "--exact") == 0;
  const bool list = argc == 2 && std::strcmp(argv[1], "--list") == 0;
  size_t passed = 0;
  size_t failed = 0;
  for (const Case& test : cases()) {
    bool wanted = argc < 2 || list;
    for (int i = 1; i < argc && !exact; ++i) {
      wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    }
    wanted = wanted || (exact && std::strcmp(test.name, argv[2]) == 0);
    if (!wanted || !applies(test)) {
      continue;
    }
    if (list) {
      std::cout << test.name << "\n";
      continue;
    }
    failures = 0;
    const auto begin = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& error) {
      report_failure(test.name, 0, std::string("uncaught: ") + error.what());
    }
    const bool ok = failures == 0;
    ++(ok ? passed : failed);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    std::cout << (ok ? "ok     " : "FAILED ") << test.name << " ("
              << std::lround(took.count() * 1e3) << " ms)" << std::endl;
  }
  if (list) {
    return 0;
  }
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? 0 : 1;
}
