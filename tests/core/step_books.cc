#include "core/step_books.h"

#include <array>
#include <cstdint>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

std::int64_t sum(const StepBooks::Durations& durations) {
  std::int64_t total = 0;
  for (const auto& count : durations) {
    total += count.load();
  }
  return total;
}

}  // namespace

TEST_CASE("durations fall into buckets that grow by a quarter of an octave") {
  // If this fails, quantiles of step times are off by more than a fifth.
  CHECK(StepBooks::bound_of(0) == 1 << 16);
  CHECK(StepBooks::bound_of(4) == 1 << 17);
  CHECK(StepBooks::bound_of(80) == std::int64_t{1} << 36);
  for (std::size_t i = 0; i + 2 < StepBooks::kBuckets; ++i) {
    const double ratio = static_cast<double>(StepBooks::bound_of(i + 1)) /
                         static_cast<double>(StepBooks::bound_of(i));
    CHECK(ratio == doctest::Approx(1.189207).epsilon(1e-4));
    CHECK(StepBooks::bucket_of(StepBooks::bound_of(i)) == i);
    CHECK(StepBooks::bucket_of(StepBooks::bound_of(i) + 1) == i + 1);
  }
  CHECK(StepBooks::bucket_of(0) == 0);
  CHECK(StepBooks::bucket_of(std::int64_t{1} << 62) == StepBooks::kBuckets - 1);
}

TEST_CASE("batches are told apart by doublings") {
  // If this fails, batch size cannot be held against throughput.
  const std::int64_t sizes[] = {1, 2, 3, 4, 5, 8, 9, 2048, 2049, 1 << 20};
  const std::size_t classes[] = {0, 1, 2, 2, 3, 3, 4, 11, 12, 12};
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    CHECK(StepBooks::batch_of(sizes[i]) == classes[i]);
  }
}

TEST_CASE("a step of both phases is divided between them, and nothing is lost") {
  // If this fails, the bottleneck is looked for in the wrong phase.
  StepBooks books;
  books.observe({4, 400, 0, 0}, 4, 0, 1'000'000, 900'000, 900'000);
  books.observe({4, 404, 32, 528}, 4, 1, 5'000'000, 1'000'000, 4'000'000);
  books.observe({0, 0, 64, 2080}, 0, 2, 8'000'000, 0, 0);
  books.observe({1, 9, 1, 1}, 1, 1, 1'000, 5'000, 5'000);  // quicker than decoding alone should be
  const auto& decode = books.phase(StepBooks::kDecode);
  const auto& prefill = books.phase(StepBooks::kPrefill);
  CHECK(decode.steps == 3);
  CHECK(decode.tokens == 9);
  CHECK(decode.keys == 813);
  CHECK(decode.sequences == 9);
  CHECK(decode.nanoseconds == 1'000'000 + 1'000'000 + 1'000);
  CHECK(prefill.steps == 3);
  CHECK(prefill.tokens == 97);
  CHECK(prefill.keys == 2609);
  CHECK(prefill.sequences == 4);
  CHECK(prefill.nanoseconds == 4'000'000 + 8'000'000);
  std::int64_t elapsed = 0;
  std::int64_t steps = 0;
  for (std::size_t i = 0; i < StepBooks::kMixtures; ++i) {
    const auto& counts = books.mixture(static_cast<StepBooks::Mixture>(i));
    elapsed += counts.nanoseconds;
    steps += sum(counts.durations);
  }
  CHECK(elapsed == decode.nanoseconds + prefill.nanoseconds);
  CHECK(steps == 4);
  // A batch's figures have no time of prompts in them.
  CHECK(books.batch(2).steps == 1);
  CHECK(books.batch(2).nanoseconds == 1'000'000);
  CHECK(books.batch(2).tokens == 4);
  CHECK(sum(books.batch(2).durations) == 1);
  CHECK(books.batch(0).steps == 0);
  CHECK(books.batch(0).tokens == 0);
  CHECK(books.forecast().steps == 3);
  CHECK(books.forecast().expected == 4'905'000);
  CHECK(books.forecast().taken == 6'001'000);
  CHECK(books.forecast().off == 100'000 + 1'000'000 + 4'000);
}

TEST_CASE("the engine books every step that it commits") {
  // If this fails, metrics and diagnosis show another server than the one that runs.
  EngineDriver driver(small_engine(40));
  driver.accept(1, 8, 4);
  driver.accept(2, 3, 4);
  driver.run_out(100, 2'000'000);
  const StepBooks& books = driver.engine.step_books();
  const auto& prefill = books.phase(StepBooks::kPrefill);
  const auto& decode = books.phase(StepBooks::kDecode);
  CHECK(prefill.tokens == 11);
  CHECK(decode.tokens == 6);  // the first token of each comes with its prompt
  CHECK(prefill.nanoseconds + decode.nanoseconds == driver.now);
}

TEST_CASE("a preemption is booked with its reason") {
  // If this fails, nobody can tell a pool that is too small from readers that are too slow.
  EngineDriver driver(small_engine(6));
  driver.accept(1, 8, 20);
  driver.accept(2, 8, 20);
  driver.run_out(200, 1'000);
  const StepBooks& books = driver.engine.step_books();
  const auto all = static_cast<std::int64_t>(driver.preempted.size());
  CHECK(all > 0);
  CHECK(books.preemptions(StepBooks::kForAnother) + books.preemptions(StepBooks::kForItself) ==
        all);
  CHECK(books.preemptions(StepBooks::kPaused) == 0);
}

TEST_CASE("a receipt says how long its request waited for the prompts of others") {
  // If this fails, somebody looks for a slow model where a neighbour's prompt was in the way.
  EngineDriver driver(small_engine(40));
  driver.accept(1, 3, 10);
  driver.steps(3, 1'000'000);
  driver.accept(2, 21, 1);
  driver.steps(3, 5'000'000);  // seven prompt tokens in each
  driver.run_out(100, 1'000'000);
  const Receipt& first = driver.receipt(1);
  CHECK(first.decode == 6'000'000 + 3 * 5'000'000);
  CHECK(first.decode_delayed == doctest::Approx(3 * 4'000'000).epsilon(0.05));
  CHECK(first.prefill_delayed == 0);
  const Receipt& second = driver.receipt(2);
  CHECK(second.prefill == 15'000'000);
  CHECK(second.prefill_delayed == 0);
}

TEST_CASE("a prompt waits for those that are computed before it") {
  // If this fails, the wait for one's turn looks like one's own prompt.
  EngineDriver driver(small_engine(40));
  driver.accept(1, 32, 1);
  driver.accept(2, 32, 1);
  driver.run_out(100, 1'000'000);
  for (const std::uint64_t id : {1, 2}) {
    const Receipt& receipt = driver.receipt(id);
    CHECK(receipt.prefill_delayed > 0);
    CHECK(receipt.prefill_delayed < receipt.prefill);
    CHECK(receipt.prefill - receipt.prefill_delayed >= 4'000'000);
  }
}

TEST_CASE("the time of a phase's steps can be fitted from its sums") {
  // If this fails, predictions of other batches and chunks are made of something else.
  StepBooks books;
  const auto decode = [](std::int64_t tokens, std::int64_t keys) {
    return 5'000'000 + 300'000 * tokens + 50 * keys;
  };
  const auto prefill = [](std::int64_t tokens, std::int64_t keys) {
    return 2'000'000 + 100'000 * tokens + 20 * keys;
  };
  for (std::int64_t i = 1; i <= 40; ++i) {
    const std::int64_t tokens = 1 + i * 7 % 11;
    const std::int64_t keys = tokens * (100 + i * 37 % 500);
    const Nanoseconds alone = decode(tokens, keys);
    books.observe({tokens, keys, 0, 0}, tokens, 0, alone, alone, alone);
    const std::int64_t chunk = 16 + i * 13 % 70;
    const std::int64_t read = keys_of_chunk(i * 29 % 300, chunk);
    const Nanoseconds both = alone + prefill(chunk, read);
    books.observe({tokens, keys, chunk, read}, tokens, 1, both, alone, both);
  }
  const auto check = [&](StepBooks::Phase phase, std::array<double, 3> weights) {
    // The equations hold where the weights are those that made the times.
    const auto& sums = books.fit(phase);
    const std::size_t place[3][3] = {{0, 1, 2}, {1, 3, 4}, {2, 4, 5}};
    for (std::size_t i = 0; i < 3; ++i) {
      double value = 0.0;
      for (std::size_t j = 0; j < 3; ++j) {
        value += sums.products[place[i][j]].load() * weights[j];
      }
      CHECK(sums.values[i].load() == doctest::Approx(value).epsilon(1e-9));
    }
  };
  check(StepBooks::kDecode, {5e6, 3e5, 50});
  check(StepBooks::kPrefill, {2e6, 1e5, 20});
}

TEST_CASE("a step that was interrupted is no measure of what it computed") {
  // If this fails, one pause of the machine spoils an interval's predictions.
  StepBooks books;
  books.observe({1, 10, 0, 0}, 1, 0, 1'000'000, 1'000'000, 1'000'000);
  const double once = books.fit(StepBooks::kDecode).values[0].load();
  books.observe({1, 10, 0, 0}, 1, 0, 900'000'000, 1'000'000, 1'000'000);
  CHECK(books.fit(StepBooks::kDecode).values[0].load() == doctest::Approx(4 * once));
}

TEST_CASE("samples of a request have not waited for its own prompt") {
  // If this fails, a request with several samples is said to be held up by others that are not
  // there.
  EngineDriver driver(small_engine(40));
  driver.manner.samples = 3;
  driver.accept(1, 8, 4);
  driver.run_out(100, 1'000'000);
  CHECK(driver.receipt(1).prefill_delayed + driver.receipt(1).decode_delayed == 0);
}

TEST_CASE("what somebody waits for is booked with the time of the step") {
  // If this fails, memory is bought where places are short, or the other way round.
  const auto waited = [](EngineSettings settings, std::int64_t requests, std::int64_t prompt) {
    EngineDriver driver(settings);
    for (std::int64_t id = 1; id <= requests; ++id) {
      driver.accept(static_cast<std::uint64_t>(id), prompt, 4);
    }
    driver.run_out(400, 1'000);
    std::array<std::int64_t, StepBooks::kWaits> times{};
    for (std::size_t what = 0; what < times.size(); ++what) {
      times[what] = driver.engine.step_books().waited(static_cast<StepBooks::Waited>(what));
      CHECK(times[what] <= driver.now);
    }
    return times;
  };
  const auto alone = waited(small_engine(40), 1, 4);
  CHECK(alone == std::array<std::int64_t, StepBooks::kWaits>{});
  const auto memory = waited(small_engine(6), 3, 12);
  CHECK(memory[StepBooks::kForMemory] > 0);
  CHECK(memory[StepBooks::kForPlace] == 0);
  EngineSettings one = small_engine(40);
  one.scheduler.sequences_max = 1;
  const auto place = waited(one, 3, 2);
  CHECK(place[StepBooks::kForPlace] > 0);
  CHECK(place[StepBooks::kForMemory] == 0);
  const auto turn = waited(small_engine(40), 3, 12);
  CHECK(turn[StepBooks::kForTurn] > 0);
  CHECK(turn[StepBooks::kForMemory] == 0);
}
