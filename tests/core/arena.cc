#include "core/arena.h"

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "tests/check_throws.h"

namespace kvledger {
namespace {

// What the kernel says of the mapping in which an address lies: flags of two letters each.
std::string kernel_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line.substr(8) + " ";
    }
  }
  return "";
}

}  // namespace

// Blocks of an arena that is not aligned would straddle huge pages, and old bytes in it would be
// somebody's.
TEST_CASE("an arena is aligned to huge pages and zeroed") {
  const std::optional<Arena> arena = Arena::take(ByteCount{(std::int64_t{3} << 20) + 5});
  REQUIRE(arena.has_value());
  CHECK(arena->size().value() == (std::int64_t{3} << 20) + 5);
  CHECK(reinterpret_cast<std::uintptr_t>(arena->data()) % (std::uintptr_t{2} << 20) == 0);
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < arena->size().value(); ++i) {
    sum += static_cast<std::int64_t>(arena->data()[i]);
  }
  CHECK(sum == 0);
}

// What the system cannot give is expected, and must come back as a value.
TEST_CASE("more memory than there is gives no arena") {
  CHECK_FALSE(Arena::take(ByteCount{std::int64_t{1} << 60}).has_value());
  CHECK_BREAKS(Arena::take(ByteCount{0}));
}

// An arena that moved must not be given back twice.
TEST_CASE("an arena moves") {
  std::optional<Arena> first = Arena::take(ByteCount{4096});
  REQUIRE(first.has_value());
  std::byte* const data = first->data();
  Arena second = std::move(*first);
  first.reset();
  CHECK(second.data() == data);
  data[4095] = std::byte{7};
  Arena third = *Arena::take(ByteCount{8192});
  third = std::move(second);
  CHECK(third.data()[4095] == std::byte{7});
}

// Keys and values give back what was said, and who reads a core dump is not who said it (S11).
TEST_CASE("an arena is left out of core dumps, from its first byte to its last") {
  const std::optional<Arena> arena = Arena::take(ByteCount{(std::int64_t{5} << 20) + 1});
  REQUIRE(arena.has_value());
  const int other = 0;
  REQUIRE(kernel_flags(&other).find(" rd ") != std::string::npos);
  CHECK(kernel_flags(&other).find(" dd ") == std::string::npos);
  for (const std::int64_t offset : {std::int64_t{0}, arena->size().value() - 1}) {
    CHECK(kernel_flags(arena->data() + offset).find(" dd ") != std::string::npos);
  }
}

}  // namespace kvledger
