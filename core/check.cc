#include "core/check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace kvledger {
namespace {

void print_and_abort(const CheckFailure& failure) {
  std::fprintf(stderr, "%s\n", failure.message().c_str());
  std::fflush(stderr);
  std::abort();
}

std::atomic<CheckHandler> current_handler{&print_and_abort};

}  // namespace

std::string CheckFailure::message() const {
  std::string text = "kvledger: broken invariant at ";
  text.append(file).append(":").append(std::to_string(line)).append(": ").append(condition);
  if (!values.empty()) {
    text.append(" (").append(values).append(")");
  }
  return text;
}

CheckHandler set_check_handler(CheckHandler handler) noexcept {
  return current_handler.exchange(handler == nullptr ? &print_and_abort : handler);
}

namespace internal {

void check_failed(const char* file, int line, const char* condition, std::string values) {
  current_handler.load()(CheckFailure{file, line, condition, std::move(values)});
  std::abort();
}

}  // namespace internal
}  // namespace kvledger
