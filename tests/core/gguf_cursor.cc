#include "core/gguf_cursor.h"

#include <string>

#include "tests/check_throws.h"

using namespace kvledger::gguf;

namespace {

Cursor cursor_over(std::string_view bytes) {
  return Cursor(std::as_bytes(std::span(bytes)));
}

}  // namespace

// If this failed, a length in the file would move the cursor past its end.
TEST_CASE("nothing is taken beyond the end") {
  Cursor cursor = cursor_over("\x01\x02\x03\x04\x05\x06");
  std::uint32_t number = 0;
  CHECK(cursor.number(number));
  CHECK_EQ(number, 0x04030201);
  CHECK_EQ(cursor.position(), 4);
  CHECK_EQ(cursor.left(), 2);
  CHECK(cursor.fits(2, 1, "bytes"));
  CHECK(cursor.fits(1, 2, "pairs"));
  CHECK_FALSE(cursor.fits(2, 2, "pairs"));
  CHECK_FALSE(cursor.fits(~std::uint64_t{0}, 8, "numbers"));
  CHECK_FALSE(cursor.fits(std::uint64_t{1} << 61, 8, "numbers"));  // 2^64 bytes
  CHECK_BREAKS(cursor.take(3));
  cursor.begin("here");
  CHECK_FALSE(cursor.number(number));
  CHECK_EQ(cursor.position(), 4);
  const Error error = std::move(cursor).error();
  CHECK_EQ(error.offset, 4);
  CHECK_EQ(error.sentence,
           "GGUF here: the file ends too early for 4 bytes of a number, bytes left: 2");
}

// If this failed, a file without a byte would be the one that crashes.
TEST_CASE("nothing is taken from nothing") {
  Cursor cursor{{}};
  std::uint8_t number = 0;
  std::string_view text;
  CHECK(cursor.fits(0, 8, "numbers"));
  CHECK_EQ(cursor.take(0).size(), 0);
  CHECK_FALSE(cursor.number(number));
  CHECK_FALSE(cursor.string(text, 8));
}

// If this failed, text that is no text would travel to clients and logs.
TEST_CASE("UTF-8 ends at the first fault") {
  for (const std::string_view good :
       {"", "a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
        "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "\xc4\xa0the"}) {
    CHECK_EQ(utf8_bytes(good), good.size());
  }
  CHECK_EQ(utf8_bytes(std::string_view("\0b", 2)), 2);
  CHECK_EQ(utf8_bytes(std::string_view("ab\xc2\x80", 3)), 2);  // the rest lies beyond the end
  // Stray and missing later bytes, long forms, surrogates, beyond U+10FFFF.
  for (const std::string_view bad :
       {"\x80", "\xbf", "\xc0\xaf", "\xc1\xbf", "\xc2", "\xc2\x20", "\xc2\xc2", "\xe0\x9f\xbf",
        "\xe1\x80", "\xe1\x80\xc0", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf",
        "\xf0\x90\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    CHECK_EQ(utf8_bytes("ab" + std::string(bad)), 2);
    CHECK_EQ(utf8_bytes("ab" + std::string(bad) + "cdef"), 2);
  }
}

// If this failed, a file could write what it likes into the operator's log.
TEST_CASE("sentences repeat only short printable names") {
  const auto sentence = [](std::string_view name) {
    Cursor cursor{{}};
    cursor.begin("tensor 7");
    cursor.name(name);
    CHECK_FALSE(cursor.fail(0, "limit ", std::uint64_t{4}));
    return std::move(cursor).error().sentence;
  };
  const std::string longest(64, 'n');
  CHECK_EQ(sentence(""), "GGUF tensor 7: limit 4");
  CHECK_EQ(sentence("a b"), "GGUF tensor 7 \"a b\": limit 4");
  CHECK_EQ(sentence(longest), "GGUF tensor 7 \"" + longest + "\": limit 4");
  for (const std::string& name : {longest + "n", std::string("a\nb"), std::string("\xc2\xb5"),
                                  std::string("\x7f"), std::string("\x1b[2J")}) {
    CHECK_EQ(sentence(name), "GGUF tensor 7: limit 4");
  }
}
