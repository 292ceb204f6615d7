// doctest, with KVL_CHECK failures turned into exceptions that a test can expect.

#pragma once

#include <doctest/doctest.h>

#include <stdexcept>

#include "core/check.h"

namespace kvledger::testing {

struct BrokenInvariant : std::logic_error {
  using std::logic_error::logic_error;
};

inline void throw_check_failure(const CheckFailure& failure) {
  throw BrokenInvariant(failure.message());
}

}  // namespace kvledger::testing

// Passes if `expression` breaks an invariant.
#define CHECK_BREAKS(expression) \
  CHECK_THROWS_AS(static_cast<void>(expression), ::kvledger::testing::BrokenInvariant)
