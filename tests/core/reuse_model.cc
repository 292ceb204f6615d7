#include "core/reuse_model.h"

#include <cmath>
#include <random>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// Blocks that come back `pause` uses after their last one with probability `chance`, or never.
void teach(ReuseModel& model, std::int64_t uses, std::uint64_t pause, double chance, int times) {
  std::mt19937_64 random(1);
  for (int i = 0; i < times; ++i) {
    const bool again = static_cast<double>(random() % 1000) < 1000 * chance;
    const std::uint64_t age = again ? pause + random() % (pause / 4 + 1) : 40 * pause;
    model.observe(uses, age, again);
  }
}

}  // namespace

TEST_CASE("before anything was seen, older is worth less and used often worth more") {
  // If this fails, an empty cache drops what it should keep before it has learnt anything.
  const ReuseModel model(100);
  for (const std::int64_t uses : {1, 2, 3, 6, 50}) {
    for (std::uint64_t age = 1; age < 1'000'000; age *= 4) {
      CHECK(model.value(uses, age) > model.value(uses, 4 * age));
    }
  }
  CHECK(model.value(2, 1000) > model.value(1, 1000));
  CHECK(model.value(9, 1000) > model.value(8, 1000));
}

TEST_CASE("a block gains value until the pause after which blocks come back, and loses it then") {
  // If this fails, conversations are dropped just before their next turn.
  ReuseModel model(100);
  teach(model, 1, 1000, 0.5, 5000);
  CHECK(model.value(1, 1030) > 1.5 * model.value(1, 100));
  CHECK(model.value(1, 1030) > 5 * model.value(1, 5000));
}

TEST_CASE("the value is the chance of use over the time that it takes") {
  // If this fails, values of different classes do not compare.
  ReuseModel model(100);
  std::mt19937_64 random(3);
  std::exponential_distribution<double> wait(0.002);
  for (int i = 0; i < 20000; ++i) {
    model.observe(1, static_cast<std::uint64_t>(wait(random)), true);
  }
  for (const std::uint64_t age : {20, 100, 400, 800}) {
    CHECK(model.value(1, age) == doctest::Approx(0.002).epsilon(0.2));
  }
}

TEST_CASE("time without a use counts the same in parts as at once") {
  // If this fails, blocks that were looked at more often seem to be used more seldom.
  ReuseModel whole(100);
  ReuseModel parts(100);
  for (std::uint64_t age = 10; age < 20000; age += 37) {
    whole.observe(1, age, age % 2 == 0);
    parts.pass(1, 0, age / 3);
    parts.pass(1, age / 3, age / 3);
    parts.pass(1, age / 3, age / 2);
    parts.observe(1, age, age % 2 == 0, age / 2);
  }
  for (std::uint64_t age = 1; age < 50000; age += 99) {
    CHECK(parts.value(1, age) == doctest::Approx(whole.value(1, age)));
  }
}

TEST_CASE("what stays away counts before it is given up") {
  // If this fails, only what returns is ever seen, and everything seems to return.
  ReuseModel model(100);
  teach(model, 1, 1000, 1.0, 200);
  const double before = model.value(1, 900);
  for (int i = 0; i < 2000; ++i) {
    model.pass(1, 0, 10000);
  }
  teach(model, 1, 1000, 1.0, 200);
  CHECK(model.value(1, 900) < before / 2);
}

TEST_CASE("values do not jump with age") {
  // If this fails, blocks of nearly the same age are kept or dropped by where a table is cut.
  ReuseModel model(100);
  teach(model, 1, 1000, 0.5, 5000);
  for (std::uint64_t age = 64; age < 8000; ++age) {
    const double change = model.value(1, age + 1) - model.value(1, age);
    CHECK(std::abs(change) < 0.02 * model.value(1, 1000));
  }
}

TEST_CASE("what is new replaces what was") {
  // If this fails, yesterday's traffic decides what is kept today.
  ReuseModel model(100);
  teach(model, 1, 1000, 0.9, 5000);
  const double before = model.value(1, 900);
  teach(model, 1, 1000, 0.02, 20000);
  CHECK(model.value(1, 900) < before / 5);
}

TEST_CASE("classes are by uses") {
  // If this fails, blocks that are used in every prompt go with those that came twice.
  CHECK(ReuseModel::class_of(1) == 0);
  CHECK(ReuseModel::class_of(2) == 1);
  CHECK(ReuseModel::class_of(3) == 2);
  CHECK(ReuseModel::class_of(4) == 2);
  CHECK(ReuseModel::class_of(5) == 3);
  CHECK(ReuseModel::class_of(8) == 3);
  CHECK(ReuseModel::class_of(9) == 4);
  CHECK(ReuseModel::class_of(1'000'000'000'000) == 4);
  ReuseModel model(100);
  const double others = model.value(9, 900);
  teach(model, 1, 1000, 0.9, 1000);
  CHECK(model.value(9, 900) == others);
}

TEST_CASE("ages and numbers of any size are taken") {
  // If this fails, a server that runs for years reads beyond the end of a table.
  ReuseModel model(1);
  for (const std::uint64_t age :
       {std::uint64_t{0}, std::uint64_t{1} << 40, ~std::uint64_t{0} - 1}) {
    model.observe(1, age, true);
    model.observe(1LL << 62, age, false);
    CHECK(model.value(1, age) > 0.0);
    CHECK(model.value(1LL << 62, age) > 0.0);
  }
  CHECK_BREAKS(ReuseModel(0));
}
