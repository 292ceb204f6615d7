// A few seeds of the simulation, and whether it would notice if something went wrong.

#include <map>

#include "tests/check_throws.h"
#include "tests/simulation/simulator.h"

using namespace kvledger;
using namespace kvledger::simulation;

TEST_CASE("the engine agrees with the model, whatever happens in whatever order") {
  // If this fails, run `simulation --seed S --steps 1000` with the seed named.
  std::map<Arm, Outcome> arms;
  for (std::uint64_t seed = 1; seed <= 160; ++seed) {
    if (seed > 40 && arm_of(seed) != Arm::kSamples) {
      continue;  // in few others anybody sits out a step
    }
    Simulator simulator(seed);
    CAPTURE(seed);
    CAPTURE(simulator.step());
    REQUIRE_NOTHROW(arms[arm_of(seed)].add(simulator.run(1000)));
  }
  REQUIRE(arms.size() == kArms);
  CHECK(arms[Arm::kThrash].counts.preemptions > 0);
  std::int64_t sat_out = 0;
  for (const auto& [arm, outcome] : arms) {
    sat_out += outcome.counts.sat_out;
  }
  CHECK(sat_out > 20);
  CHECK(arms[Arm::kEdges].counts.preemptions > 0);
  CHECK(arms[Arm::kChunks].counts.chunks > 0);
  CHECK(arms[Arm::kCancels].cancelled_in_step > 0);
  CHECK(arms[Arm::kCancels].cancelled_in_prefill > 0);
  CHECK(arms[Arm::kFailures].abandoned > 0);
  CHECK(arms[Arm::kSpeculation].commits_of_many > 0);
  CHECK(arms[Arm::kAdmission].refused > 0);
  CHECK(arms[Arm::kSamples].counts.forks > 0);
  CHECK(arms[Arm::kSamples].counts.late_forks > 0);
  CHECK(arms[Arm::kSamples].counts.copies > 0);
  CHECK(arms[Arm::kNearEnd].counts.ends[static_cast<std::size_t>(EndReason::kContext)] > 0);
}

TEST_CASE("a seed replays exactly, and another seed is another run") {
  // If this fails, a failure cannot be found again.
  for (const std::uint64_t seed : {3, 10, 15}) {
    const Outcome first = Simulator(seed).run(500);
    const Outcome again = Simulator(seed).run(500);
    CHECK(first.digest == again.digest);
    CHECK(first.steps == again.steps);
    CHECK(first.digest != Simulator(seed + kArms).run(500).digest);
  }
}

TEST_CASE("a server can be taken down at any step of any seed") {
  // If this fails, stopping a busy server breaks an invariant.
  for (std::uint64_t seed = 1; seed <= 90; ++seed) {
    Simulator simulator(seed);
    CAPTURE(seed);
    REQUIRE_NOTHROW(simulator.run_and_leave(static_cast<std::int64_t>(seed)));
  }
}

namespace {

// One sequence of two tokens in row 0 and block 0 of two, planned by hand.
struct OneSequence {
  OneSequence() : runner(Text{1, 50}, 2, 4, 1, 2), tables(1, BlockCount{2}), plan(4, 1, 4) {
    tables.append(tables.take_row(), BlockId{0});
    report.admissions.push_back(Admission{9, 0, 0, 0});
  }

  // Plans `tokens` from `position` on and lets the runner compute them.
  std::uint64_t run(std::vector<Token> tokens, std::int64_t position, bool with_delta) {
    plan.begin(StepId{1});
    if (with_delta) {
      plan.append_delta(TableRow{0}, 0, BlockId{0});
    }
    plan.append_sequence(TableRow{0}, tokens, position, true);
    plan.begin_prefill();
    plan.finish();
    runner.follow(report, plan.view());
    return runner.run(plan.view(), tables).at(0).digest;
  }

  FakeRunner runner;
  BlockTables tables;
  StepPlan plan;
  StepReport report;
};

}  // namespace

TEST_CASE("the runner's text depends on every token and not on how it was cut into steps") {
  // If this fails, the simulation would not see a token that was mixed up.
  OneSequence whole;
  OneSequence parts;
  OneSequence other;
  const std::uint64_t digest = whole.run({3, 4, 5}, 0, true);
  parts.run({3}, 0, true);
  CHECK(parts.run({4, 5}, 1, false) == digest);
  CHECK(other.run({8, 4, 5}, 0, true) != digest);
}

TEST_CASE("the runner notices a context that was not written for this sequence") {
  // If this fails, the simulation would not see a block that was given away.
  OneSequence skipped;
  CHECK_THROWS_AS(skipped.run({4}, 1, true), Violation);
  OneSequence taken_again;
  taken_again.run({3}, 0, true);
  CHECK_THROWS_AS(taken_again.run({4}, 1, true), Violation);  // the block was acquired anew
  OneSequence given_away;
  given_away.run({3}, 0, true);
  given_away.report.admissions[0].sequence = 10;
  CHECK_THROWS_AS(given_away.run({4}, 1, false), Violation);
}

TEST_CASE("the runner notices tables that its deltas do not explain") {
  // If this fails, the simulation would not see a table changed under a running step.
  OneSequence sequence;
  sequence.run({3}, 0, true);
  sequence.tables.clear(TableRow{0});
  sequence.tables.append(TableRow{0}, BlockId{1});
  CHECK_THROWS_AS(sequence.run({4}, 1, false), Violation);
}

TEST_CASE("the model notices a token, a receipt or a block that is not right") {
  // If this fails, the simulation would agree with anything.
  EngineSettings settings;
  settings.blocks = BlockCount{4};
  settings.slots_per_block = 4;
  settings.context_tokens = 100;
  settings.scheduler.token_budget = 8;
  settings.scheduler.sequences_max = 2;
  const Text text{1, 50};
  Arrival arrival;
  arrival.id = SequenceId{1};
  arrival.output_tokens_max = 1;
  const std::vector<Token> prompt = {3, 4};
  const std::vector<Token> right = {text.next(text.after(text.after(text.begin(1), 3), 4))};
  const std::vector<std::int32_t> offsets = {0, 1};
  // Runs the one step; `falsify` may change the engine's last report before the model sees it.
  const auto run = [&](const std::vector<Token>& tokens, auto falsify) {
    Engine engine(settings, 0);
    Model model(settings, text, 0);
    model.accept(arrival, prompt, engine.accept(arrival, prompt), engine.take_report());
    const StepPlan& plan = engine.plan(5);
    model.plan(plan.view(), engine.take_report(), 5);
    engine.commit(StepId{1}, tokens, offsets, 7);
    StepReport report = engine.take_report();
    falsify(report);
    model.commit({tokens}, report, 7);
    model.check_books(engine);
  };
  CHECK_NOTHROW(run(right, [](StepReport&) {}));
  CHECK_THROWS_AS(run({right[0] + 1}, [](StepReport&) {}), Violation);
  const auto refuses = [&](auto falsify) { CHECK_THROWS_AS(run(right, falsify), Violation); };
  refuses([](StepReport& report) { report.tokens.clear(); });
  refuses([](StepReport& report) { report.tokens.push_back(report.tokens[0]); });
  refuses([](StepReport& report) { report.tokens[0].end_reason = 0; });
  refuses([](StepReport& report) { report.receipts.clear(); });
  refuses([](StepReport& report) { report.receipts.push_back(report.receipts[0]); });
  refuses([](StepReport& report) { report.receipts[0].held_nanos += 1; });
  refuses([](StepReport& report) { report.receipts[0].queued += 1; });
  refuses([](StepReport& report) { report.receipts[0].computed_tokens += 1; });
  refuses([](StepReport& report) { report.receipts[0].peak_blocks -= 1; });
  refuses([](StepReport& report) { report.receipts[0].tenant += 1; });
}
