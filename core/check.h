// Invariant checks that stay on in release builds.
//
// A check states what must hold if this code is right. When it does not hold the books can no
// longer be trusted, so the failure handler prints the place and the numbers that disagree and
// ends the process: wrong receipts are worse than a restart. Input from clients never reaches a
// check; it is validated before it enters the core (see the three kinds of failure in
// docs/architecture.md). Checks may be used from any thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvledger {

// What a failed check reports.
struct CheckFailure {
  std::string_view file;
  int line;
  std::string_view condition;
  // The values compared, "left vs right"; empty for a plain condition.
  std::string values;

  std::string message() const;
};

using CheckHandler = void (*)(const CheckFailure&);

// Replaces what a failed check does and returns the handler it replaced. Tests install one that
// throws; a handler that returns is followed by abort().
CheckHandler set_check_handler(CheckHandler handler) noexcept;

namespace internal {

[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string values);

template <class T>
std::string check_value(const T& value) {
  if constexpr (requires { value.value(); }) {
    return std::to_string(value.value());
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<std::int64_t>(value));
  } else {
    return std::to_string(value);
  }
}

}  // namespace internal
}  // namespace kvledger

#define KVL_CHECK(condition)    \
  (static_cast<bool>(condition) \
       ? static_cast<void>(0)   \
       : ::kvledger::internal::check_failed(__FILE__, __LINE__, #condition, std::string()))

#define KVL_CHECK_COMPARE(left, op, right)                                                      \
  do {                                                                                          \
    const auto& kvl_left = (left);                                                              \
    const auto& kvl_right = (right);                                                            \
    if (!(kvl_left op kvl_right)) [[unlikely]] {                                                \
      ::kvledger::internal::check_failed(__FILE__, __LINE__, #left " " #op " " #right,          \
                                         ::kvledger::internal::check_value(kvl_left) + " vs " + \
                                             ::kvledger::internal::check_value(kvl_right));     \
    }                                                                                           \
  } while (false)

#define KVL_CHECK_EQ(left, right) KVL_CHECK_COMPARE(left, ==, right)
#define KVL_CHECK_NE(left, right) KVL_CHECK_COMPARE(left, !=, right)
#define KVL_CHECK_LT(left, right) KVL_CHECK_COMPARE(left, <, right)
#define KVL_CHECK_LE(left, right) KVL_CHECK_COMPARE(left, <=, right)
#define KVL_CHECK_GT(left, right) KVL_CHECK_COMPARE(left, >, right)
#define KVL_CHECK_GE(left, right) KVL_CHECK_COMPARE(left, >=, right)

namespace kvledger {

// Element `index` of a vector-like container, which must have it.
template <class Container>
constexpr auto& checked_at(Container& container, std::size_t index) {
  KVL_CHECK_LT(index, container.size());
  return container[index];
}

}  // namespace kvledger
