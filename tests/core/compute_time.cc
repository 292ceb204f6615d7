#include "core/compute_time.h"

#include <memory>
#include <numeric>
#include <vector>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

// Sequences of one request each, and the chunks that a step has of them.
struct Step {
  void add(std::int64_t computed, std::int64_t tokens) {
    const SequenceId id{sequences.size() + 1};
    Arrival arrival;
    arrival.id = id;
    requests.push_back(std::make_shared<Request>(id, RequestAccount{0}));
    sequences.push_back(
        std::make_unique<Sequence>(arrival, std::vector<Token>{1}, requests.back()));
    sequences.back()->computed = computed;
    requests.back()->samples.push_back(sequences.back().get());
    chunks.push_back(Chunk{sequences.back().get(), tokens});
  }
  Nanoseconds sum() const {
    return std::accumulate(requests.begin(), requests.end(), Nanoseconds{0},
                           [](Nanoseconds all, const auto& one) { return all + one->compute; });
  }

  std::vector<std::shared_ptr<Request>> requests;
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<Chunk> chunks;
};

}  // namespace

TEST_CASE("a step's time is divided by tokens, to the nanosecond") {
  // If this fails, somebody pays for another's prompt, or nobody for some of it.
  Step step;
  step.add(0, 1);
  step.add(7, 1);
  step.add(0, 8);
  ComputeTime time(0.0);
  time.book(step.chunks, 1'000);
  CHECK(step.requests[0]->compute == 100);
  CHECK(step.requests[1]->compute == 100);
  CHECK(step.requests[2]->compute == 800);
  time.book(step.chunks, 7);  // 0.7, 0.7 and 5.6 of it
  CHECK(step.requests[0]->compute == 100);
  CHECK(step.requests[1]->compute == 101);
  CHECK(step.requests[2]->compute == 806);
  CHECK(step.sum() == 1'007);
  CHECK(time.totals().steps == 1'007);
  CHECK_FALSE(time.audit(step.sum()).has_value());
  CHECK(time.audit(step.sum() - 1).has_value());
}

TEST_CASE("a token costs more for each one before it") {
  // If this fails, long contexts are computed at the price of short ones.
  Step step;
  step.add(0, 1);
  step.add(1'000, 1);  // 1 + 1,000 / 1,000
  step.add(0, 3);      // 1 + 1.001 + 1.002
  ComputeTime time(0.001);
  time.book(step.chunks, 6'003'000);
  CHECK(std::abs(step.requests[0]->compute - 1'000'000) <= 20);
  CHECK(std::abs(step.requests[1]->compute - 2'000'000) <= 200);
  CHECK(std::abs(step.requests[2]->compute - 3'003'000) <= 200);
  CHECK(step.sum() == 6'003'000);
}

TEST_CASE("the largest steps there can be do not overflow") {
  // If this fails, a long step of long contexts is booked to whoever the bits point at.
  Step step;
  for (int i = 0; i < 4; ++i) {
    step.add(std::int64_t{1} << 30, std::int64_t{1} << 18);
  }
  ComputeTime time(1.0);
  const Nanoseconds hour = 3'600'000'000'000;
  time.book(step.chunks, hour);
  for (const auto& request : step.requests) {
    CHECK(request->compute == hour / 4);
  }
}

TEST_CASE("what no step needs is free, and a step of no time costs nothing") {
  // If this fails, a sample that takes over another's logits pays for them twice.
  Step step;
  step.add(0, 4);
  step.add(4, 0);
  ComputeTime time(0.0);
  time.book(step.chunks, 12);
  time.book(step.chunks, 0);
  CHECK(step.requests[0]->compute == 12);
  CHECK(step.requests[1]->compute == 0);
}

TEST_CASE("receipts add up to the time of all steps") {
  // If this fails, the bills of a machine's users are not what the machine took.
  EngineSettings settings = small_engine(6);
  settings.prefixes.cost_growth = 0.01 * 4;
  EngineDriver driver(settings);  // audits after each call
  Nanoseconds steps = 0;
  for (std::uint64_t id = 1; id <= 30; id += 3) {
    driver.manner.samples = static_cast<std::int64_t>(1 + id % 3);
    driver.accept(id, static_cast<std::int64_t>(1 + id % 11), 9);
    for (int i = 0; i < 2; ++i) {
      const StepPlanView& view = driver.plan();
      if (driver.engine.has_uncommitted_step()) {
        driver.now += static_cast<Nanoseconds>(101 + id);
        steps += static_cast<Nanoseconds>(101 + id);
        i == 0 && id == 16 ? driver.abandon() : driver.commit_one_each(view);
      }
      driver.now += 1'000;  // between steps nothing is computed
    }
    driver.end({id / 2});
  }
  while (driver.engine.running() + driver.engine.waiting() > 0) {
    driver.steps(1, 97);
    steps += 97;
  }
  Nanoseconds sum = 0;
  std::int64_t preemptions = 0;
  for (const auto& [id, receipt] : driver.receipts) {
    sum += receipt.compute;
    preemptions += receipt.preemptions;
  }
  CHECK(preemptions > 0);
  CHECK(driver.receipts.size() == 10);
  CHECK(sum == steps);
  CHECK(driver.engine.compute_totals().steps == steps);
  CHECK(driver.engine.compute_totals().closed == steps);
  CHECK(driver.engine.compute_totals().unclaimed == 0);
}

TEST_CASE("who ends while its step runs leaves its share to nobody else") {
  // If this fails, those who stay pay for who left.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 2, 4);
  driver.accept(2, 2, 4);
  const StepPlanView& view = driver.plan();
  driver.end({1});
  driver.now += 100;
  driver.commit_one_each(view);
  CHECK(driver.receipt(1).compute == 0);
  CHECK(driver.engine.compute_totals().unclaimed == 50);
  driver.end({2});
  CHECK(driver.receipt(2).compute == 50);
}
