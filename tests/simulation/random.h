// The only source of chance in the simulation, and how it fails.
//
// std:: distributions give other numbers with other standard libraries, so a seed would not replay
// elsewhere: everything is drawn from one splitmix64 by integer arithmetic.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvledger::simulation {

constexpr std::uint64_t mix(std::uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(mix(seed)) {}

  std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15;
    return mix(state_);
  }
  // From `low` to `high`, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
    const auto span = static_cast<std::uint64_t>(high - low) + 1;
    return low + static_cast<std::int64_t>(next() % span);
  }
  // True `parts` times in a thousand.
  bool chance(std::int64_t parts) noexcept { return between(0, 999) < parts; }

 private:
  std::uint64_t state_;
};

// What the engine did and what the model says do not agree.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void expect(bool condition, const char* what) {
  if (!condition) {
    throw Violation(what);
  }
}

// For integers; the text is built only when they differ.
template <class A, class B>
void expect_equal(const char* what, A engine, B model) {
  if (!(engine == static_cast<A>(model))) {
    throw Violation(std::string(what) + ": engine " +
                    std::to_string(static_cast<std::int64_t>(engine)) + ", model " +
                    std::to_string(static_cast<std::int64_t>(model)));
  }
}

}  // namespace kvledger::simulation
