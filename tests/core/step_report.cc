#include "core/step_report.h"

#include <type_traits>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

using Outputs = std::vector<Token>;

BlockNanoseconds held(const Receipt& receipt) {
  return static_cast<BlockNanoseconds>(receipt.held_seconds) * 1'000'000'000 + receipt.held_nanos;
}

}  // namespace

TEST_CASE("records are plain data without gaps") {
  // If this fails, numpy reads fields where there are none.
  static_assert(std::is_trivially_copyable_v<Receipt>);
  static_assert(sizeof(Admission) == 40);
  static_assert(sizeof(Preemption) == 16);
  static_assert(sizeof(Refusal) == 24);
  static_assert(sizeof(OutputToken) == 16);
  static_assert(sizeof(Receipt) == 8 + 2 * 4 + 22 * 8 + 4 * 8 + 4 * 4);
  CHECK(true);
}

TEST_CASE("stop goes before length, and length before context") {
  // If this fails, a finished answer looks cut off.
  EngineSettings settings = small_engine(20);
  settings.context_tokens = 4;
  EngineDriver driver(settings);
  driver.accept(1, 3, 1);
  driver.accept(2, 3, 1);
  driver.accept(3, 3, 2);
  driver.plan();
  driver.commit({{2}, {7}});  // 1 and 2; the budget leaves 3 for the next step
  driver.run_out(2);
  CHECK(driver.reason(1) == EndReason::kStop);
  CHECK(driver.reason(2) == EndReason::kLength);
  CHECK(driver.reason(3) == EndReason::kContext);
}

TEST_CASE("several tokens can come out of one step, up to the end of the text") {
  // If this fails, speculation loses tokens, or appends some after the end.
  EngineDriver driver(small_engine(20));
  driver.accept(1, 3, 9);
  driver.plan();
  driver.commit({{5, 6, 7}});
  CHECK(driver.outputs[1] == Outputs{5, 6, 7});
  const StepPlanView& view = driver.plan();
  CHECK(view.header.decode_tokens == 3);
  CHECK(Outputs(view.token_ids.begin(), view.token_ids.end()) == Outputs{5, 6, 7});
  CHECK(view.positions[0] == 3);
  CHECK(view.logit_tokens[0] == 2);
  driver.commit({{8, 2, 9}});
  CHECK(driver.outputs[1] == Outputs{5, 6, 7, 8, 2});
  CHECK(driver.reason(1) == EndReason::kStop);
  driver.accept(2, 3, 2);
  driver.plan();
  driver.commit({{5, 6, 7}});
  CHECK(driver.outputs[2] == Outputs{5, 6});
  CHECK(driver.reason(2) == EndReason::kLength);
}

TEST_CASE("unusable logits end one sequence, and the tokens before them count") {
  // If this fails, one NaN fails everybody in the step.
  EngineDriver driver(small_engine(20));
  driver.accept(1, 2, 9);
  driver.accept(2, 2, 9);
  driver.accept(3, 2, 9);
  driver.plan();
  driver.commit({{5}, {-1}, {6, -1, 7}});
  CHECK(driver.reason(2) == EndReason::kFailed);
  CHECK(driver.receipt(2).output_tokens == 0);
  CHECK(driver.reason(3) == EndReason::kFailed);
  CHECK(driver.outputs[3] == Outputs{6});
  CHECK(driver.outputs[1] == Outputs{5});
  CHECK(driver.engine.running() == 1);
}

TEST_CASE("the receipt of one short request, by hand") {
  // If this fails, receipts are wrong in the simplest case.
  EngineDriver driver(small_engine(8));
  driver.manner.tenant = TenantId{6};
  driver.accept(1, 5, 3);
  driver.now = 10;
  driver.plan();  // two blocks from here on
  driver.now = 30;
  driver.commit({{7}});  // the first token
  driver.steps(2, 10);
  const Receipt& receipt = driver.receipt(1);
  CHECK(receipt.sequence == 1);
  CHECK(receipt.tenant == 6);
  CHECK(driver.reason(1) == EndReason::kLength);
  CHECK(receipt.prompt_tokens == 5);
  CHECK(receipt.output_tokens == 3);
  CHECK(receipt.computed_tokens == 7);  // the last token is never computed
  CHECK(receipt.recomputed_tokens == 0);
  CHECK(receipt.preemptions == 0);
  CHECK(receipt.peak_blocks == 2);
  CHECK(receipt.queued == 10);
  CHECK(receipt.prefill == 20);
  CHECK(receipt.decode == 20);
  CHECK(receipt.held_seconds == 0);
  CHECK(receipt.held_nanos == 2 * 40);
  CHECK(receipt.compute == 40);                 // alone in three steps
  CHECK(receipt.uncached_tokens == 5 + 6 + 7);  // all of the context for each token
  CHECK(receipt.requeued == 0);
  CHECK(receipt.saved_nanos == 0);
  CHECK(receipt.reserved_nanos == 0);
}

TEST_CASE("a prompt in chunks holds what is written and reserves the rest") {
  // If this fails, a waiting block is billed as a used one.
  EngineSettings settings = small_engine(8);
  settings.scheduler.token_budget = 4;
  EngineDriver driver(settings);
  driver.accept(1, 10, 1);
  driver.steps(3, 10);
  const Receipt& receipt = driver.receipt(1);
  CHECK(receipt.held_nanos == 10 * (1 + 2 + 3));
  CHECK(receipt.reserved_nanos == 10 * (2 + 1));
  CHECK(receipt.prefill == 30);
  CHECK(receipt.decode == 0);
  CHECK(receipt.computed_tokens == 10);
}

TEST_CASE("block-seconds past a second come in seconds and the rest") {
  // If this fails, long requests are billed modulo a second.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 5, 1);
  driver.steps(1, 1'700'000'001);
  CHECK(driver.receipt(1).held_seconds == 3);
  CHECK(driver.receipt(1).held_nanos == 400'000'002);
}

TEST_CASE("what is computed again after a preemption is counted as such") {
  // If this fails, a tenant cannot see what a full pool cost it.
  EngineSettings settings = small_engine(4);
  settings.scheduler.token_budget = 16;
  EngineDriver driver(settings);
  driver.accept(1, 3, 12);
  driver.accept(2, 3, 12);
  driver.steps(6, 1);  // two blocks full each: 3 prompt tokens and 5 more computed
  CHECK(driver.preempted.empty());
  driver.steps(1, 1);  // 1 needs a third block
  CHECK(driver.preempted == std::vector<std::uint64_t>{2});
  driver.run_out(40, 1);
  CHECK(driver.receipt(1).preemptions == 0);
  CHECK(driver.receipt(1).computed_tokens == 14);
  CHECK(driver.receipt(2).preemptions == 1);
  CHECK(driver.receipt(2).recomputed_tokens == 8);
  CHECK(driver.receipt(2).computed_tokens == 14 + 8);
  CHECK(driver.receipt(2).output_tokens == 12);
  CHECK(driver.receipt(2).queued > 0);
  CHECK(driver.receipt(2).requeued == driver.receipt(2).queued);  // admitted at once at first
  CHECK(driver.receipt(1).requeued == 0);
}

TEST_CASE("an admission says which row, how long it waited and whether it is the first") {
  // If this fails, the sampler uses the settings of another request.
  Engine engine(small_engine(4), 0);
  Arrival arrival;
  arrival.id = SequenceId{5};
  const std::vector<Token> prompt = {1, 2, 3};
  engine.accept(arrival, prompt);
  const StepPlanView& view = engine.plan(25).view();
  const std::int32_t row = view.rows[0];
  const StepReport& report = engine.take_report();
  REQUIRE(report.admissions.size() == 1);
  CHECK(report.admissions[0].sequence == 5);
  CHECK(report.admissions[0].row == row);
  CHECK(report.admissions[0].queued == 25);
  CHECK(report.admissions[0].again == 0);
  CHECK(engine.take_report().admissions.empty());
}

TEST_CASE("a report holds everything since the last one and is handed out once") {
  // If this fails, tokens are lost or sent twice.
  Engine engine(small_engine(8), 0);
  Arrival arrival;
  arrival.id = SequenceId{5};
  const std::vector<Token> prompt = {1, 2, 3};
  engine.accept(arrival, prompt);
  arrival.id = SequenceId{6};
  engine.accept(arrival, std::vector<Token>());
  engine.plan(0);
  const std::vector<Token> tokens = {9};
  const std::vector<std::int32_t> offsets = {0, 1};
  engine.commit(StepId{1}, tokens, offsets, 0);
  const StepReport& report = engine.take_report();
  CHECK(report.admissions.size() == 1);
  CHECK(report.refusals.size() == 1);
  CHECK(report.tokens.size() == 1);
  REQUIRE(report.receipts.size() == 1);
  CHECK(report.tokens[0].end_reason == static_cast<std::int32_t>(EndReason::kLength));
  const StepReport& next = engine.take_report();
  CHECK(next.admissions.empty());
  CHECK(next.refusals.empty());
  CHECK(next.tokens.empty());
  CHECK(next.receipts.empty());
}

TEST_CASE("every accepted sequence has one receipt, and tenants' statements are their sums") {
  // If this fails, the bill and the receipts disagree.
  EngineDriver driver(small_engine(8));
  std::map<std::uint64_t, Nanoseconds> arrived;
  std::map<std::uint64_t, Nanoseconds> ended;
  std::map<std::uint32_t, BlockNanoseconds> sums;
  std::uint64_t id = 0;
  for (int step = 0; step < 200; ++step) {
    if (step % 3 == 0 && step < 150) {
      driver.manner.tenant = TenantId{static_cast<std::uint32_t>(1 + id % 3)};
      driver.accept(++id, 1 + step % 13, 1 + step % 11);
      arrived[id] = driver.now;
    }
    if (step % 7 == 0 && id > 0) {
      driver.end({1 + id / 2});
    }
    driver.steps(1, 1 + step % 5);
    for (const auto& [done, receipt] : driver.receipts) {
      ended.try_emplace(done, driver.now);
    }
  }
  driver.run_out(200, 1);
  CHECK(driver.receipts.size() == id);
  for (const auto& [done, receipt] : driver.receipts) {
    sums[receipt.tenant] += held(receipt);
    const Nanoseconds spent = receipt.queued + receipt.prefill + receipt.decode;
    if (ended.contains(done) && driver.reason(done) == EndReason::kLength) {
      CHECK(spent == ended[done] - arrived[done]);
    }
  }
  for (const TenantId tenant : driver.engine.ledger().tenants()) {
    const TenantStatement statement = driver.engine.ledger().statement(tenant);
    CHECK((statement.closed_time == sums[tenant.value()]));
    CHECK((statement.held_time == sums[tenant.value()]));
    CHECK(statement.held == BlockCount{0});
  }
  CHECK(sums.size() == 3);
}

TEST_CASE("a clock that runs backwards costs nobody anything") {
  // If this fails, receipts show negative times, or the same time twice.
  EngineDriver driver(small_engine(8));
  driver.now = 100;
  driver.accept(1, 3, 4);
  driver.steps(1, 10);  // to 110
  driver.now = 50;
  driver.steps(1, 10);  // stands still at 110
  driver.now = 115;
  driver.accept(2, 3, 4);
  driver.now = 20;
  driver.end({2});
  driver.now = 115;
  driver.steps(2, 5);  // to 125
  const Receipt& receipt = driver.receipt(1);
  CHECK(receipt.queued == 0);
  CHECK(receipt.prefill == 10);
  CHECK(receipt.decode == 15);
  CHECK(receipt.held_nanos == 10 + 5 + 2 * 10);  // the second block from 115 on
  CHECK(driver.receipt(2).queued == 0);
  CHECK(driver.reason(2) == EndReason::kCancelled);
}
