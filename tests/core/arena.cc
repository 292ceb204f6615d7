#include "core/arena.h"

#include <cstdint>
#include <utility>

#include "tests/check_throws.h"

namespace kvledger {

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

}  // namespace kvledger
