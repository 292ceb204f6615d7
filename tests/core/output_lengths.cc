#include "core/output_lengths.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// The estimate as its paper has it, of single lengths and with nothing to lean on: what part of
// those that were there to end at each length did not.
double kaplan_meier(const std::vector<std::int64_t>& ended, const std::vector<std::int64_t>& cut,
                    std::int64_t tokens) {
  double reaching = 1.0;
  for (std::int64_t length = 1; length < tokens; ++length) {
    const auto longer = [length](std::int64_t other) { return other > length; };
    const auto ends = static_cast<double>(std::count(ended.begin(), ended.end(), length));
    const auto there =
        ends + static_cast<double>(std::count_if(ended.begin(), ended.end(), longer) +
                                   std::count_if(cut.begin(), cut.end(), longer));
    reaching *= there > 0 ? 1 - ends / there : 1;
  }
  return reaching;
}

}  // namespace

TEST_CASE("classes follow each other without a gap, each a quarter of a doubling or less") {
  // If this fails, lengths are counted where nobody looks for them.
  for (std::size_t i = 0; i < OutputLengths::kClasses; ++i) {
    const std::int64_t least = OutputLengths::least_of(i);
    CHECK(OutputLengths::class_of(least) == i);
    if (i > 0) {
      CHECK(OutputLengths::class_of(least - 1) == i - 1);
      CHECK(4 * (least - OutputLengths::least_of(i - 1)) <= std::max<std::int64_t>(4, least));
    }
  }
  CHECK(OutputLengths::class_of(std::int64_t{1} << 50) == OutputLengths::kClasses - 1);
  CHECK(OutputLengths::class_of(-1) == 0);
}

TEST_CASE("who knows nothing expects that half of all end in each doubling from 64") {
  // If this fails, a server that starts lets in nobody, or everybody.
  const OutputLengths lengths;
  CHECK(lengths.reaching(64) == doctest::Approx(1.0));
  CHECK(lengths.reaching(128) == doctest::Approx(0.5).epsilon(0.001));
  CHECK(lengths.reaching(4096) == doctest::Approx(1.0 / 64).epsilon(0.001));
  CHECK(lengths.reaching(std::int64_t{1} << 22) / lengths.reaching(std::int64_t{1} << 21) ==
        doctest::Approx(0.5));
}

TEST_CASE("with many outputs the answer is that of the estimate, cut ones included") {
  // If this fails, what was cut counts as short, and too many are let in.
  OutputLengths lengths;
  std::vector<std::int64_t> ended;
  std::vector<std::int64_t> cut;
  std::uint64_t state = 1;
  for (int i = 0; i < 400; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto length = static_cast<std::int64_t>(1 + (state >> 40) % 300);
    if (length > 180 && i % 2 == 0) {
      cut.push_back(180);
      lengths.note_cut(180);
    } else {
      ended.push_back(length);
      lengths.note_end(length);
    }
  }
  for (const std::int64_t tokens : {2, 16, 64, 96, 128, 192, 224, 256}) {
    CAPTURE(tokens);
    CHECK(std::abs(lengths.reaching(tokens) - kaplan_meier(ended, cut, tokens)) < 0.05);
  }
  for (std::int64_t tokens = 1; tokens < 2000; ++tokens) {
    REQUIRE(lengths.reaching(tokens + 1) <= lengths.reaching(tokens));
  }
}

TEST_CASE("a tenant's own outputs prevail over everybody's, which it begins with") {
  // If this fails, a tenant with long answers is let in as if they were short, for as long as there
  // is a large one with short answers; or a new tenant is let in blindly.
  OutputLengths everybody;
  OutputLengths own(&everybody);
  for (int i = 0; i < 320; ++i) {
    everybody.note_end(20);
  }
  CHECK(own.reaching(40) < 0.05);
  for (int i = 0; i < 100; ++i) {
    own.note_end(1000);
  }
  CHECK(own.reaching(900) > 0.8);
  CHECK(own.reaching(2000) < 0.1);
}

TEST_CASE("a tenant learns of others with each sixteenth of their outputs, and not between") {
  // If this fails, a tenant can watch each single answer of another become longer or shorter.
  OutputLengths everybody;
  OutputLengths own(&everybody);
  for (int i = 0; i < 32; ++i) {
    everybody.note_end(100);
  }
  const double before = own.reaching(200);
  for (int i = 0; i < 15; ++i) {
    everybody.note_end(1000);
    REQUIRE(own.reaching(200) == before);
  }
  everybody.note_end(1000);
  CHECK(own.reaching(200) > before);
}

TEST_CASE("who changes is learnt anew, and questions change no answer") {
  // If this fails, a server remembers last month's answers, or is no replay of itself.
  OutputLengths asked;
  OutputLengths unasked;
  for (int i = 0; i < 5000; ++i) {
    const std::int64_t tokens = i < 4000 ? 50 : 800;
    asked.note_end(tokens);
    unasked.note_end(tokens);
    REQUIRE(asked.reaching(100) >= 0.0);
    REQUIRE(asked.known() <= OutputLengths::kKept);
  }
  CHECK(asked.reaching(700) == unasked.reaching(700));
  CHECK(asked.reaching(700) > 0.6);
}

TEST_CASE("an output has a token at least") {
  // If this fails, who never ran says that outputs are short.
  OutputLengths lengths;
  CHECK_BREAKS(lengths.note_end(0));
  CHECK_BREAKS(lengths.note_cut(0));
}
