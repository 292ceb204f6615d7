#include "core/gguf.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "tests/check_throws.h"
#include "tests/gguf_writer.h"

using namespace kvledger::gguf;
using kvledger::testing::GgufWriter;

namespace {

// A result and the bytes it looks into, which lie in a buffer of exactly their size: with the
// address sanitizer, one byte read too many ends the test.
struct Parsed {
  std::unique_ptr<std::byte[]> bytes;
  Result result;

  explicit Parsed(std::span<const std::byte> source) : bytes(new std::byte[source.size()]) {
    std::copy(source.begin(), source.end(), bytes.get());
    result = read({bytes.get(), source.size()});
  }
  explicit Parsed(const GgufWriter& writer) : Parsed(std::span(writer.bytes())) {}

  const File& file() const {
    const Error* error = std::get_if<Error>(&result);
    REQUIRE_MESSAGE(error == nullptr, error->sentence);
    return std::get<File>(result);
  }
  template <class T>
  const T& value(std::string_view key) const {
    const Value* value = file().find(key);
    REQUIRE(value != nullptr);
    REQUIRE(std::holds_alternative<T>(*value));
    return std::get<T>(*value);
  }
};

Error refusal(const GgufWriter& writer) {
  const Parsed parsed(writer);
  REQUIRE(std::holds_alternative<Error>(parsed.result));
  return std::get<Error>(parsed.result);
}

void check_refused(const GgufWriter& writer, std::string_view sentence, std::uint64_t offset) {
  const Error error = refusal(writer);
  CHECK_EQ(error.sentence, sentence);
  CHECK_EQ(error.offset, offset);
}

// How sentences about the files below begin.
const std::string kEntryK = "GGUF metadata entry 0 \"k\": ";
const std::string kTensorT = "GGUF tensor 0 \"t\": ";
const std::string kAlignmentEntry = "GGUF metadata entry 0 \"general.alignment\": ";

// A file with one entry, up to its value. The value begins at byte 37.
GgufWriter entry_k(ValueType type) {
  return GgufWriter(0, 1).key("k", type);
}
GgufWriter array_k(ValueType type, std::uint64_t count) {
  return GgufWriter(0, 1).array("k", type, count);
}

// The value and the elements lie at odd addresses.
template <class T>
void check_number(ValueType type, T number) {
  CHECK_EQ(Parsed(entry_k(type).put(number)).value<T>("k"), number);
  const Parsed parsed(array_k(type, 2).put(T{}).put(number));
  const auto& array = parsed.value<Packed<T>>("k");
  REQUIRE_EQ(array.size(), 2);
  CHECK_EQ(array[0], T{});
  CHECK_EQ(array[1], number);
  CHECK_BREAKS(array[2]);
}

// A file with one tensor "t". Its description begins at byte 24.
GgufWriter tensor_t(std::initializer_list<std::uint64_t> dimensions, std::uint32_t type,
                    std::uint64_t offset = 0, std::size_t data = 4096) {
  return GgufWriter(1, 0).tensor("t", dimensions, type, offset).data(data);
}

// Entries of two types and two tensors; nothing follows the last tensor's bytes.
GgufWriter small_file() {
  return GgufWriter(2, 3)
      .entry("general.architecture", "llama")
      .entry("llama.block_count", ValueType::kU32, std::uint32_t{30})
      .array("tokens", ValueType::kString, 2)
      .text("a")
      .text("")
      .tensor("norm", {4, 2}, TensorType::kF32, 0)
      .tensor("embd", {32, 3}, TensorType::kQ4_1, 32)
      .data(32 + 60);
}

}  // namespace

// If this failed, the numbers and names that a model is built from would not be the file's.
TEST_CASE("a small file is read as it was written") {
  const GgufWriter writer = small_file();
  const Parsed parsed(writer);
  const File& file = parsed.file();
  CHECK_EQ(file.version, 3);
  CHECK_EQ(file.alignment, 32);
  REQUIRE_EQ(file.metadata.size(), 3);
  CHECK_EQ(file.metadata[0].key, "general.architecture");
  CHECK_EQ(parsed.value<std::string_view>("general.architecture"), "llama");
  CHECK_EQ(parsed.value<std::uint32_t>("llama.block_count"), 30);
  CHECK_EQ(parsed.value<Strings>("tokens"), Strings{"a", ""});
  CHECK_EQ(file.find("general"), nullptr);

  REQUIRE_EQ(file.tensors.size(), 2);
  const Tensor& norm = file.tensors[0];
  const Tensor& embd = file.tensors[1];
  CHECK_EQ(norm.name, "norm");
  CHECK_EQ(norm.dimension_count, 2);
  CHECK(norm.dimensions == std::array<std::uint64_t, 4>{4, 2, 1, 1});
  CHECK_EQ(norm.bytes, 32);
  CHECK_EQ(embd.name, "embd");
  CHECK_EQ(traits(embd.type).name, "Q4_1");
  CHECK_EQ(embd.bytes, 60);
  CHECK_EQ(embd.offset, norm.offset + 32);
  CHECK_EQ(embd.offset + embd.bytes, writer.bytes().size());
}

// If this failed, a setting of a model would be misread, or an array would lose its ends.
TEST_CASE("every type of value is read, alone and in arrays") {
  check_number(ValueType::kU8, std::uint8_t{255});
  check_number(ValueType::kI8, std::int8_t{-128});
  check_number(ValueType::kU16, std::uint16_t{65535});
  check_number(ValueType::kI16, std::int16_t{-32768});
  check_number(ValueType::kU32, std::uint32_t{4294967295});
  check_number(ValueType::kI32, std::int32_t{-7});
  check_number(ValueType::kF32, 1.5F);
  check_number(ValueType::kBool, true);
  check_number(ValueType::kU64, ~std::uint64_t{0});
  check_number(ValueType::kI64, std::int64_t{-1} << 63);
  check_number(ValueType::kF64, -0.25);
  CHECK_EQ(Parsed(entry_k(ValueType::kBool).put(false)).value<bool>("k"), false);
  CHECK_EQ(Parsed(array_k(ValueType::kF32, 0)).value<Packed<float>>("k").size(), 0);
  CHECK(Parsed(array_k(ValueType::kString, 0)).value<Strings>("k").empty());
}

// If this failed, a number stored as text would be served as some other number (B108).
TEST_CASE("a value keeps the type of the file") {
  const Parsed text(GgufWriter(0, 1).entry("llama.rope.freq_base", "100000"));
  const Value* value = text.file().find("llama.rope.freq_base");
  REQUIRE(value != nullptr);
  CHECK_EQ(std::get_if<float>(value), nullptr);
  CHECK_EQ(std::get<std::string_view>(*value), "100000");
  const Parsed integer(GgufWriter(0, 1).entry("llama.rope.freq_base", ValueType::kU32, 100000U));
  CHECK_EQ(std::get_if<float>(integer.file().find("llama.rope.freq_base")), nullptr);
}

// If this failed, a file cut short by a broken download would be served, or end the process.
TEST_CASE("a file cut anywhere is refused") {
  const std::vector<std::byte> bytes = small_file().bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    const Parsed cut{std::span(bytes).first(size)};
    const Error* error = std::get_if<Error>(&cut.result);
    REQUIRE_MESSAGE(error != nullptr, size);
    CHECK_LE(error->offset, size);
  }
}

// If this failed, one number in a file could crash the server or take all of its memory (B105,
// B110).
TEST_CASE("numbers chosen to wrap are refused at no cost") {
  const auto start = std::chrono::steady_clock::now();
  rusage before{};
  getrusage(RUSAGE_SELF, &before);
  constexpr std::uint64_t k62 = std::uint64_t{1} << 62;
  constexpr std::uint64_t k63 = std::uint64_t{1} << 63;

  check_refused(
      tensor_t({32}, 0, 0 - std::uint64_t{32}, 128),
      kTensorT +
          "128 bytes at offset 18446744073709551584 are not all among the 128 bytes of tensor data",
      24);
  check_refused(
      tensor_t({k62 - 8}, 0, 64),  // offset and bytes add up to 2^64 + 32
      kTensorT +
          "18446744073709551584 bytes at offset 64 are not all among the 4096 bytes of tensor data",
      24);
  check_refused(tensor_t({k62, 4}, 0), kTensorT + "its size is more than 64 bits can count", 24);
  check_refused(tensor_t({k62, 3}, 0),  // 3 x 2^62 elements fit, their bytes do not
                kTensorT + "its size is more than 64 bits can count", 24);
  check_refused(GgufWriter(1, 0).text("t").put(~std::uint32_t{0}).data(64),
                kTensorT + "4294967295 dimensions are not from 1 to 4", 24 + 9);
  check_refused(
      GgufWriter(0, k63).data(64),
      "GGUF header: 9223372036854775808 metadata entries are more than the limit of 65536", 16);
  check_refused(GgufWriter(k63, 0).data(64),
                "GGUF header: 9223372036854775808 tensors are more than the limit of 65536", 8);
  check_refused(
      GgufWriter(0, 1).entry("general.alignment", ValueType::kU32, 0x80000000U),
      kAlignmentEntry + "the alignment of 2147483648 is not a power of two from 1 to 65536", 24);
  check_refused(
      entry_k(ValueType::kString).put(k63).data(64),
      kEntryK + "a string of 9223372036854775808 bytes is longer than the limit of 67108864", 37);
  check_refused(
      array_k(ValueType::kF64, k63).data(64),
      kEntryK + "an array of 9223372036854775808 elements is longer than the limit of 16777216",
      41);

  rusage after{};
  getrusage(RUSAGE_SELF, &after);
  CHECK_LT(after.ru_maxrss - before.ru_maxrss, 100 * 1024);  // KiB
  CHECK_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
}

// If this failed, counts within the limits would still take memory that no file stands behind.
TEST_CASE("counts are compared with the bytes that are left") {
  check_refused(GgufWriter(0, 65536).data(64),
                "GGUF header: the file ends too early for 65536 metadata entries, bytes left: 72",
                24);
  check_refused(GgufWriter(65536, 0).data(64),
                "GGUF header: the file ends too early for 65536 tensors, bytes left: 72", 24);
  check_refused(array_k(ValueType::kString, 1 << 24).put(std::uint64_t{0}),
                kEntryK + "the file ends too early for 16777216 strings, bytes left: 8", 49);
  check_refused(array_k(ValueType::kU16, 3).put(std::uint32_t{0}),
                kEntryK + "the file ends too early for 3 elements of an array, bytes left: 4", 49);
  check_refused(entry_k(ValueType::kString).put(std::uint64_t{5}).raw("four"),
                kEntryK + "the file ends too early for 5 bytes of a string, bytes left: 4", 45);
  check_refused(array_k(ValueType::kString, 2).text("a").put(std::uint32_t{0}).raw("123"),
                kEntryK + "the file ends too early for 8 bytes of a number, bytes left: 7", 58);
}

// If this failed, another kind of file would be taken for a model.
TEST_CASE("the header is checked") {
  const Parsed other{std::as_bytes(std::span("GGML and more bytes than the header"))};
  CHECK_EQ(std::get<Error>(other.result).sentence,
           "GGUF header: the file does not begin with the letters GGUF");
  CHECK_EQ(Parsed(GgufWriter(0, 0, 2)).file().version, 2);
  for (const std::uint32_t version : {0U, 1U, 4U, ~0U}) {
    check_refused(
        GgufWriter(0, 0, version),
        "GGUF header: version " + std::to_string(version) + " cannot be read, only 2 to 3", 4);
  }
  check_refused(GgufWriter(0, 0, 0x03000000),
                "GGUF header: the file is big endian and only little endian can be read", 4);
}

// If this failed, weights would be read from where they do not lie.
TEST_CASE("the alignment moves the data") {
  for (const std::uint32_t alignment : {1U, 2U, 64U, 65536U}) {
    GgufWriter writer(2, 1);
    writer.entry("general.alignment", ValueType::kU32, alignment)
        .tensor("a", {1}, TensorType::kF32, 0)
        .tensor("b", {1}, TensorType::kF32, std::max(alignment, 4U));
    const std::size_t described = writer.bytes().size();
    writer.data(std::max(alignment, 4U) + 4, alignment);
    const Parsed parsed(writer);
    const File& file = parsed.file();
    CHECK_EQ(file.alignment, alignment);
    CHECK_EQ(file.tensors[0].offset, (described + alignment - 1) / alignment * alignment);
    CHECK_EQ(file.tensors[1].offset, file.tensors[0].offset + std::max(alignment, 4U));
  }
  for (const std::uint32_t alignment : {0U, 3U, 48U, 131072U}) {
    check_refused(GgufWriter(0, 1).entry("general.alignment", ValueType::kU32, alignment),
                  kAlignmentEntry + "the alignment of " + std::to_string(alignment) +
                      " is not a power of two from 1 to 65536",
                  24);
  }
  check_refused(GgufWriter(0, 1).entry("general.alignment", ValueType::kU64, std::uint64_t{32}),
                kAlignmentEntry + "the alignment is not an unsigned number of 32 bits", 24);
}

// If this failed, a kernel would read past the end of a tensor or take bytes of another one.
TEST_CASE("tensors lie in the file, aligned and apart") {
  CHECK_EQ(Parsed(tensor_t({8}, 0, 32, 64)).file().tensors[0].bytes, 32);  // the last byte is used
  check_refused(tensor_t({8}, 0, 32, 63),
                kTensorT + "32 bytes at offset 32 are not all among the 63 bytes of tensor data",
                24);
  check_refused(tensor_t({1}, 0, 96, 64),
                kTensorT + "4 bytes at offset 96 are not all among the 64 bytes of tensor data",
                24);
  check_refused(tensor_t({1}, 0, 4, 64), kTensorT + "its offset of 4 is not a multiple of 32", 24);
  check_refused(GgufWriter(1, 0).tensor("t", {1}, TensorType::kF32, 0),
                "GGUF header: the file ends too early for 7 bytes of padding before the tensor "
                "data, bytes left: 0",
                57);

  const auto pair = [](std::uint64_t first, std::uint64_t second) {
    return GgufWriter(2, 0)
        .tensor("a", {16}, TensorType::kF32, first)
        .tensor("b", {16}, TensorType::kF32, second)
        .data(256);
  };
  CHECK_EQ(Parsed(pair(0, 64)).file().tensors.size(), 2);
  CHECK_EQ(Parsed(pair(192, 0)).file().tensors.size(), 2);  // any order
  check_refused(pair(0, 32), "GGUF tensor 1 \"b\": it overlaps tensor 0", 57);
  check_refused(pair(96, 64), "GGUF tensor 0 \"a\": it overlaps tensor 1", 24);
  GgufWriter bytewise(2, 1);
  bytewise.entry("general.alignment", ValueType::kU32, 1U);
  bytewise.tensor("a", {1}, TensorType::kF32, 0).tensor("b", {1}, TensorType::kF32, 3).data(64);
  check_refused(bytewise, "GGUF tensor 1 \"b\": it overlaps tensor 0", 90);  // by one byte
  check_refused(pair(64, 64), "GGUF tensor 1 \"b\": it overlaps tensor 0", 57);
}

// If this failed, the bytes of a quantized tensor would be counted wrongly.
TEST_CASE("the size of a tensor follows from its groups") {
  struct Row {
    TensorType type;
    std::uint64_t elements;
    std::uint64_t bytes;
  };
  // Three elements or three groups, counted by hand: 32 x 4 bits and two numbers of 16 bits are
  // 20 bytes in Q4_1, and so on.
  for (const Row& row : {Row{TensorType::kF32, 3, 12}, Row{TensorType::kF16, 3, 6},
                         Row{TensorType::kBF16, 3, 6}, Row{TensorType::kQ4_0, 96, 54},
                         Row{TensorType::kQ4_1, 96, 60}, Row{TensorType::kQ5_0, 96, 66},
                         Row{TensorType::kQ5_1, 96, 72}, Row{TensorType::kQ8_0, 96, 102},
                         Row{TensorType::kQ2_K, 768, 252}, Row{TensorType::kQ3_K, 768, 330},
                         Row{TensorType::kQ4_K, 768, 432}, Row{TensorType::kQ5_K, 768, 528},
                         Row{TensorType::kQ6_K, 768, 630}, Row{TensorType::kQ8_K, 768, 876}}) {
    const Parsed parsed(tensor_t({row.elements, 2}, static_cast<std::uint32_t>(row.type)));
    CHECK_EQ(parsed.file().tensors[0].type, row.type);
    CHECK_EQ(parsed.file().tensors[0].bytes, 2 * row.bytes);
  }
  CHECK_EQ(kTensorTypes.size(), 14);
  check_refused(tensor_t({33, 32}, 3),
                kTensorT + "a row of 33 elements is not a whole number of Q4_1 groups of 32", 24);
  for (const std::uint32_t unknown : {4U, 9U, 29U, 1000U, ~0U}) {
    check_refused(tensor_t({32}, unknown),
                  kTensorT + "tensor type " + std::to_string(unknown) + " cannot be read",
                  24 + 9 + 4 + 8);
  }
}

// If this failed, a tensor without elements would reach arithmetic that divides by its shape.
TEST_CASE("a shape has one to four dimensions and none is zero") {
  CHECK_EQ(Parsed(tensor_t({2, 3, 4, 5}, 0)).file().tensors[0].bytes, 480);
  CHECK_EQ(Parsed(tensor_t({7}, 0)).file().tensors[0].dimensions[3], 1);
  check_refused(tensor_t({}, 0), kTensorT + "0 dimensions are not from 1 to 4", 33);
  check_refused(tensor_t({1, 1, 1, 1, 1}, 0), kTensorT + "5 dimensions are not from 1 to 4", 33);
  check_refused(tensor_t({0}, 0), kTensorT + "dimension 0 is 0", 37);
  check_refused(tensor_t({4, 0, 4}, 0), kTensorT + "dimension 1 is 0", 45);
}

// If this failed, which of two values is served would depend on who looks them up.
TEST_CASE("no key and no tensor name occurs twice") {
  check_refused(GgufWriter(0, 3).entry("k", "1").entry("j", "2").entry("k", "3"),
                "GGUF metadata entry 2 \"k\": an earlier entry has the same key", 24 + 2 * 22);
  check_refused(GgufWriter(2, 0)
                    .tensor("t", {1}, TensorType::kF32, 0)
                    .tensor("t", {1}, TensorType::kF32, 32)
                    .data(64),
                "GGUF tensor 1 \"t\": an earlier tensor has the same name", 57);
}

// If this failed, text that is no text would travel to clients and logs.
TEST_CASE("strings are UTF-8") {
  CHECK_EQ(Parsed(GgufWriter(0, 1).entry("k", "\xc4\xa0the")).value<std::string_view>("k"),
           "\xc4\xa0the");
  check_refused(GgufWriter(0, 1).entry("k", "ab\xed\xa0\x80"),
                kEntryK + "a string is not valid UTF-8", 45 + 2);
  check_refused(array_k(ValueType::kString, 1).text("ab\xff"),
                kEntryK + "a string is not valid UTF-8", 57 + 2);
  check_refused(GgufWriter(1, 0).tensor("\xff", {1}, TensorType::kF32, 0).data(64),
                "GGUF tensor 0: a string is not valid UTF-8", 32);
}

// If this failed, a value that means nothing would be read as one that does.
TEST_CASE("types and values outside the format are refused") {
  check_refused(entry_k(static_cast<ValueType>(13)).put(0), kEntryK + "value type 13 is unknown",
                33);
  check_refused(array_k(static_cast<ValueType>(0x80000000U), 0),
                kEntryK + "value type 2147483648 is unknown", 37);
  check_refused(array_k(ValueType::kArray, 1).put(ValueType::kU8).put(std::uint64_t{0}),
                kEntryK + "an array of arrays cannot be read", 37);
  check_refused(entry_k(ValueType::kBool).put(std::uint8_t{2}),
                kEntryK + "a bool is 2, neither 0 nor 1", 37);
  check_refused(array_k(ValueType::kBool, 2).put(std::uint8_t{1}).put(std::uint8_t{255}),
                kEntryK + "a bool is 255, neither 0 nor 1", 50);
}

// If this failed, names that nothing can ask for, or that break a log line, would be accepted.
TEST_CASE("names have a length and keys are printable") {
  for (const std::string_view key : {"", "a\nb", "\xc2\xb5"}) {
    check_refused(GgufWriter(0, 1).entry(key, ""),
                  "GGUF metadata entry 0: a key must be printable ASCII and not empty", 24);
  }
  const std::string longest(65535, 'k');
  CHECK_EQ(Parsed(GgufWriter(0, 1).entry(longest, "v")).value<std::string_view>(longest), "v");
  check_refused(GgufWriter(0, 1).entry(longest + "k", "v"),
                "GGUF metadata entry 0: a string of 65536 bytes is longer than the limit of 65535",
                24);
  const auto named = [](std::string_view name) {
    return GgufWriter(1, 0).tensor(name, {1}, TensorType::kF32, 0).data(4);
  };
  CHECK_EQ(Parsed(named(std::string(64, 't'))).file().tensors[0].name.size(), 64);
  check_refused(named(std::string(65, 't')),
                "GGUF tensor 0: a string of 65 bytes is longer than the limit of 64", 24);
  check_refused(named(""), "GGUF tensor 0: a tensor must have a name", 24);
}
