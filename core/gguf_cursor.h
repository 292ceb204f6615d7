// Takes numbers and strings off the front of bytes that nobody vouches for, and words the
// sentence where that is impossible. Only gguf.cc uses it.
//
// What can fail returns false, and error() says why; nothing may be taken after that. Lengths are
// compared with what is left, which cannot wrap, and never added to a position first.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/gguf.h"

namespace kvledger::gguf {

inline bool is_printable(std::string_view text) noexcept {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Bytes of the UTF-8 character that `first` begins; 0 if it begins none.
constexpr std::size_t utf8_character_bytes(unsigned char first) noexcept {
  if (first < 0x80) {
    return 1;
  }
  if (first < 0xc2 || first > 0xf4) {  // a later byte, a long form of ASCII, or past U+10FFFF
    return 0;
  }
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

// How many bytes at the beginning of `text` are UTF-8: all, or those before the first fault.
inline std::size_t utf8_bytes(std::string_view text) noexcept {
  constexpr std::array<std::uint32_t, 5> kCharacterMin = {0, 0, 0x80, 0x800, 0x10000};
  std::size_t i = 0;
  while (i < text.size()) {
    const auto first = static_cast<unsigned char>(text[i]);
    const std::size_t bytes = utf8_character_bytes(first);
    if (bytes == 0 || bytes > text.size() - i) {
      return i;
    }
    std::uint32_t character = bytes == 1 ? first : first & (0x7fU >> bytes);
    for (std::size_t k = 1; k < bytes; ++k) {
      const auto later = static_cast<unsigned char>(text[i + k]);
      if ((later & 0xc0U) != 0x80) {
        return i;
      }
      character = character << 6 | (later & 0x3fU);
    }
    const bool is_surrogate = character >= 0xd800 && character <= 0xdfff;
    if (character < kCharacterMin[bytes] || character > 0x10ffff || is_surrogate) {
      return i;
    }
    i += bytes;
  }
  return i;
}

class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  std::uint64_t position() const noexcept { return position_; }
  std::uint64_t left() const noexcept { return bytes_.size() - position_; }
  // Where the bytes of `text` lie, which string() returned.
  std::uint64_t position_of(std::string_view text) const noexcept {
    return static_cast<std::uint64_t>(text.data() - reinterpret_cast<const char*>(bytes_.data()));
  }

  // What the next sentence is about: "header", or an item and its number. Its name is known later
  // and is repeated if that is safe.
  void begin(std::string subject) noexcept {
    subject_ = std::move(subject);
    name_ = {};
  }
  void name(std::string_view name) noexcept { name_ = name; }

  // Whether `count` things of `bytes_each` or more can follow.
  bool fits(std::uint64_t count, std::uint64_t bytes_each, std::string_view things) {
    return count <= left() / bytes_each || fail(position_, "the file ends too early for ", count,
                                                " ", things, ", bytes left: ", left());
  }

  // The next `count` bytes, which fit.
  std::span<const std::byte> take(std::uint64_t count) {
    KVL_CHECK_LE(count, left());
    const std::span<const std::byte> taken = bytes_.subspan(position_, count);
    position_ += count;
    return taken;
  }

  template <class T>
  bool number(T& number) {
    static_assert(std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>);
    if (!fits(sizeof(T), 1, "bytes of a number")) {
      return false;
    }
    std::memcpy(&number, take(sizeof(T)).data(), sizeof(T));
    return true;
  }

  bool truth(bool& value) {
    const std::uint64_t at = position_;
    std::uint8_t byte = 0;
    if (!number(byte)) {
      return false;
    }
    value = byte != 0;
    return byte <= 1 || fail(at, "a bool is ", byte, ", neither 0 nor 1");
  }

  bool string(std::string_view& text, std::uint64_t bytes_max) {
    const std::uint64_t at = position_;
    std::uint64_t bytes = 0;
    if (!number(bytes)) {
      return false;
    }
    if (bytes > bytes_max) {
      return fail(at, "a string of ", bytes, " bytes is longer than the limit of ", bytes_max);
    }
    if (!fits(bytes, 1, "bytes of a string")) {
      return false;
    }
    text = {reinterpret_cast<const char*>(take(bytes).data()), bytes};
    const std::size_t valid = utf8_bytes(text);
    return valid == bytes || fail(position_of(text) + valid, "a string is not valid UTF-8");
  }

  // Calls visit.operator()<T>() with the type that holds such a value.
  template <class Visit>
  bool with_type(std::uint32_t type, std::uint64_t at, Visit visit) {
    switch (static_cast<ValueType>(type)) {
      case ValueType::kU8:
        return visit.template operator()<std::uint8_t>();
      case ValueType::kI8:
        return visit.template operator()<std::int8_t>();
      case ValueType::kU16:
        return visit.template operator()<std::uint16_t>();
      case ValueType::kI16:
        return visit.template operator()<std::int16_t>();
      case ValueType::kU32:
        return visit.template operator()<std::uint32_t>();
      case ValueType::kI32:
        return visit.template operator()<std::int32_t>();
      case ValueType::kF32:
        return visit.template operator()<float>();
      case ValueType::kBool:
        return visit.template operator()<bool>();
      case ValueType::kString:
        return visit.template operator()<std::string_view>();
      case ValueType::kArray:
        return fail(at, "an array of arrays cannot be read");
      case ValueType::kU64:
        return visit.template operator()<std::uint64_t>();
      case ValueType::kI64:
        return visit.template operator()<std::int64_t>();
      case ValueType::kF64:
        return visit.template operator()<double>();
    }
    return fail(at, "value type ", type, " is unknown");
  }

  // Words the sentence from text and numbers. Always false.
  template <class... Parts>
  bool fail(std::uint64_t at, const Parts&... parts) {
    error_.offset = at;
    error_.sentence = "GGUF " + subject_;
    if (!name_.empty() && name_.size() <= kQuotedBytesMax && is_printable(name_)) {
      error_.sentence.append(" \"").append(name_).append("\"");
    }
    error_.sentence.append(": ");
    (append(parts), ...);
    return false;
  }
  Error error() && noexcept { return std::move(error_); }

 private:
  template <class Part>
  void append(const Part& part) {
    if constexpr (std::is_integral_v<Part>) {
      error_.sentence.append(std::to_string(part));
    } else {
      error_.sentence.append(part);
    }
  }

  const std::span<const std::byte> bytes_;
  std::size_t position_ = 0;  // at most bytes_.size()
  std::string subject_;
  std::string_view name_;
  Error error_;
};

}  // namespace kvledger::gguf
