// The likeliest token of rows of logits, in every instruction set against one plain loop.

#include "core/cpu/likeliest.h"

#include <cmath>
#include <initializer_list>
#include <limits>

#include "tests/check_throws.h"
#include "tests/kernels/reference.h"

namespace kvledger::testing {
namespace {

using cpu::ConstMatrix;
using cpu::InstructionSet;
using cpu::kUnusableRow;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::int32_t expected(const float* row, std::int64_t columns) {
  std::int64_t best = 0;
  for (std::int64_t i = 0; i < columns; ++i) {
    if (std::isnan(row[i])) {
      return kUnusableRow;
    }
    best = row[i] > row[best] ? i : best;
  }
  return std::isfinite(row[best]) ? static_cast<std::int32_t>(best) : kUnusableRow;
}

std::int32_t found(InstructionSet set, const float* row, std::int64_t columns) {
  std::int32_t token = -2;
  cpu::likeliest(set, ConstMatrix{row, 1, columns, columns}, {&token, 1});
  return token;
}

// Puts each of `values` in many places of a row, one at a time, and looks each time.
template <class Look>
void put_in_places(std::vector<float>& row, std::initializer_list<float> values, Look look) {
  const std::size_t step = std::max<std::size_t>(1, row.size() / 300);
  for (std::size_t place = 0; place < row.size(); place += step) {
    CAPTURE(row.size());
    CAPTURE(place);
    const float before = row[place];
    for (const float value : values) {
      row[place] = value;
      look(static_cast<std::int32_t>(place));
    }
    row[place] = before;
  }
}

}  // namespace

// Widths around a register, four of them, and the parts that a row is looked at in.
constexpr std::int64_t kWidths[] = {1,  2,   15,   16,   17,   63,   64,   65,   79,
                                    80, 257, 1023, 1024, 1025, 1040, 2048, 2049, 49152};

// A place in a tail or at a border would be missed, or be off by a register.
TEST_CASE("the likeliest is found in every place") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const std::int64_t columns : kWidths) {
      Random random(5);
      std::vector<float> row = random_floats(random, columns, 3.0F);
      put_in_places(row, {7.0F},
                    [&](std::int32_t place) { REQUIRE(found(set, row.data(), columns) == place); });
      REQUIRE(found(set, row.data(), columns) == expected(row.data(), columns));
    }
  }
}

// Which of equal logits comes would depend on the machine.
TEST_CASE("of equals the first is the likeliest") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const std::int64_t columns : kWidths) {
      Random random(9);
      std::vector<float> row(static_cast<std::size_t>(columns));
      for (int round = 0; round < 20; ++round) {
        for (float& value : row) {
          value = static_cast<float>(random.below(3)) - 2.0F;  // many zeros, none above
          value = value == 0.0F && random.below(2) == 0 ? -0.0F : value;
        }
        CAPTURE(columns);
        REQUIRE(found(set, row.data(), columns) == expected(row.data(), columns));
      }
    }
  }
}

// A row of nonsense would be told as an answer, or a good row be refused.
TEST_CASE("a row is unusable if its largest is not finite or one is NaN") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const std::int64_t columns : kWidths) {
      const std::vector<float> lowest(static_cast<std::size_t>(columns), -kInfinity);
      CHECK(found(set, lowest.data(), columns) == kUnusableRow);
      Random random(6);
      std::vector<float> row = random_floats(random, columns, 3.0F);
      put_in_places(row, {kNan, -kNan, kInfinity, -kInfinity}, [&](std::int32_t) {
        REQUIRE(found(set, row.data(), columns) == expected(row.data(), columns));
      });
    }
  }
}

// The largest finite numbers are good logits; so is a single one among -infinity.
TEST_CASE("the ends of the range of floats are usable") {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    std::vector<float> row(100, -kInfinity);
    row[77] = -kMost;
    CHECK(found(set, row.data(), 100) == 77);
    row[99] = kMost;
    CHECK(found(set, row.data(), 100) == 99);
    row[50] = std::numeric_limits<float>::denorm_min();
    row[99] = 0.0F;
    CHECK(found(set, row.data(), 100) == 50);
  }
}

// Rows with something between them: a neighbour's floats or what lies between would be read.
TEST_CASE("rows are apart by their stride and nothing beyond them is read") {
  constexpr std::int64_t kRows = 5, kColumns = 37, kStride = 41;
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    Random random(7);
    std::vector<float> values(static_cast<std::size_t>(kRows * kStride), kNan);
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t i = 0; i < kColumns; ++i) {
        values[static_cast<std::size_t>(r * kStride + i)] = random.uniform();
      }
    }
    std::vector<std::int32_t> tokens(kRows, -2);
    cpu::likeliest(set, ConstMatrix{values.data(), kRows, kColumns, kStride}, tokens);
    for (std::int64_t r = 0; r < kRows; ++r) {
      CHECK(tokens[static_cast<std::size_t>(r)] == expected(values.data() + r * kStride, kColumns));
    }
    cpu::likeliest(set, ConstMatrix{nullptr, 0, kColumns, kStride}, {});
  }
}

}  // namespace kvledger::testing
