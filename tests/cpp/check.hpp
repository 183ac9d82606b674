#pragma once

#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

// A test harness small enough to need no dependency:
//   TEST(ring_wraps) { CHECK(x > 0); CHECK_EQ(a, b); }
// A failed check is counted and printed and the test goes on; main.cpp runs the
// tests whose name contains an argument (all without arguments). Checks may be
// made from several threads, not from forked children (their counts are lost:
// pass on an exit status).
namespace fusedpg::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// TSan looks at threads of one process, and makes everything many times slower:
// no pure kernels, no groups of processes, few types.
#if defined(__SANITIZE_THREAD__)
constexpr bool kOnlyThreads = true;
#else
constexpr bool kOnlyThreads = false;
#endif

struct Case {
  const char* name;
  void (*body)();
};

std::vector<Case>& cases();
void report_failure(const char* file, int line, const std::string& what);
// Of the running test, in this process.
size_t failure_count();

struct Registration {
  Registration(const char* name, void (*body)()) {
    cases().push_back({name, body});
  }
};

template <typename T>
std::string shown(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out << std::boolalpha << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<int64_t>(value);
  } else {
    out << "<value>";
  }
  return out.str();
}

template <typename A, typename B>
bool check_equal(
    const char* file,
    int line,
    const char* text,
    const A& a,
    const B& b) {
  if (a == b) {
    return true;
  }
  report_failure(
      file, line, std::string(text) + ": " + shown(a) + " != " + shown(b));
  return false;
}

} // namespace fusedpg::test

#define TEST(name)                                            \
  static void test_##name();                                  \
  static const ::fusedpg::test::Registration register_##name( \
      #name, test_##name);                                    \
  static void test_##name()

// Both are expressions of type bool, so a test can stop at the first failure:
// if (!CHECK(...)) return;
#define CHECK(condition)                                                   \
  ((condition)                                                             \
       ? true                                                              \
       : (::fusedpg::test::report_failure(__FILE__, __LINE__, #condition), \
          false))

#define CHECK_EQ(a, b) \
  ::fusedpg::test::check_equal(__FILE__, __LINE__, #a " == " #b, a, b)

// The expression throws `type` with a message that contains `part`.
#define CHECK_THROWS(expression, type, part)                            \
  do {                                                                  \
    bool thrown_ = false;                                               \
    try {                                                               \
      (void)(expression);                                               \
    } catch (const type& error_) {                                      \
      thrown_ = true;                                                   \
      if (std::string(error_.what()).find(part) == std::string::npos) { \
        ::fusedpg::test::report_failure(                                \
            __FILE__,                                                   \
            __LINE__,                                                   \
            std::string(#expression " threw: ") + error_.what());       \
      }                                                                 \
    }                                                                   \
    if (!thrown_) {                                                     \
      ::fusedpg::test::report_failure(                                  \
          __FILE__, __LINE__, #expression " did not throw " #type);     \
    }                                                                   \
  } while (false)
