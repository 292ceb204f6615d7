#include "core/scheduler.h"

#include <algorithm>
#include <limits>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

using Ids = std::vector<std::uint64_t>;

// Room for `sequences` to run and `tokens` in a step, in `blocks` blocks of `slots` slots.
EngineSettings engine_of(std::int64_t blocks, std::int32_t slots, std::int64_t tokens,
                         std::int64_t sequences) {
  EngineSettings settings = small_engine(blocks);
  settings.slots_per_block = slots;
  settings.scheduler.token_budget = tokens;
  settings.scheduler.sequences_max = sequences;
  return settings;
}

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

}  // namespace

TEST_CASE("decode tokens are budgeted first and stand first in the plan") {
  // If this fails, a long prompt stops everybody who is being answered.
  EngineDriver driver(small_engine(40));
  driver.accept(1, 3, 50);
  driver.accept(2, 3, 50);
  driver.steps(1);
  driver.accept(3, 40, 50);
  for (int i = 0; i < 6; ++i) {
    const StepPlanView& view = driver.plan();
    CHECK(view.header.decode_tokens == 2);
    CHECK(view.header.tokens == 8);
    CHECK(driver.planned(1) == 1);
    CHECK(driver.planned(2) == 1);
    CHECK(driver.planned(3) == 6);
    CHECK(driver.owners.at(view.rows[2]) == 3);
    driver.commit_one_each(view);
  }
}

TEST_CASE("running streams get a token in every step of a long prefill (B27)") {
  // If this fails, the gap between two tokens is as long as somebody else's prompt.
  EngineDriver driver(engine_of(600, 16, 256, 16));
  for (std::uint64_t id = 1; id <= 8; ++id) {
    driver.accept(id, 4, 60);
  }
  driver.steps(1);
  driver.accept(9, 8000, 1);
  for (int i = 0; i < 33; ++i) {
    const StepPlanView& view = driver.plan();
    for (std::uint64_t id = 1; id <= 8; ++id) {
      REQUIRE(driver.planned(id) == 1);
    }
    driver.commit_one_each(view);
  }
  CHECK(driver.receipt(9).output_tokens == 1);
}

TEST_CASE("the oldest prompt has half of the budget, the shortest the rest") {
  // If this fails, a long prompt holds up short ones, or short ones starve it.
  EngineDriver driver(small_engine(60));
  driver.accept(1, 40, 1);
  driver.accept(2, 10, 1);
  driver.accept(3, 3, 1);
  driver.plan();
  CHECK(driver.planned(1) == 4);
  CHECK(driver.planned(2) == 1);
  CHECK(driver.planned(3) == 3);
}

TEST_CASE("what nobody else wants of the budget returns to the oldest") {
  // If this fails, steps are left half empty.
  EngineDriver driver(small_engine(60));
  driver.accept(1, 40, 1);
  driver.accept(2, 2, 1);
  driver.plan();
  CHECK(driver.planned(1) == 6);
  CHECK(driver.planned(2) == 2);
}

TEST_CASE("a short prompt does not wait for a long one (B29)") {
  // If this fails, 20 tokens wait for 8,000.
  EngineDriver driver(engine_of(600, 16, 256, 4));
  driver.accept(1, 8000, 5);
  driver.steps(3);
  driver.accept(2, 20, 5);
  const StepPlanView& view = driver.plan();
  CHECK(driver.planned(2) == 20);
  CHECK(driver.planned(1) == 236);
  driver.commit_one_each(view);
  CHECK(driver.outputs[2].size() == 1);
}

TEST_CASE("the first to arrive is the first to run, and ids decide between equals") {
  // If this fails, the order of service is chance.
  EngineDriver driver(engine_of(40, 4, 8, 1));
  driver.accept(9, 3, 2);
  driver.accept(4, 3, 2);
  driver.now = 10;
  driver.accept(1, 3, 2);
  driver.run_out(10);
  CHECK(driver.admitted == Ids{4, 9, 1});
}

TEST_CASE("a level of priority is worth a time of waiting, not more") {
  // If this fails, urgency means nothing, or the less urgent never run.
  EngineSettings settings = engine_of(40, 4, 8, 1);
  settings.scheduler.aging_per_priority = 100;
  EngineDriver driver(settings);
  driver.accept(1, 3, 2);
  driver.steps(1);  // it runs; the others queue
  driver.manner.priority = 1;
  driver.accept(2, 3, 2);  // counts as arrived at 100
  driver.manner.priority = 0;
  driver.now = 99;
  driver.accept(3, 3, 2);
  driver.now = 101;
  driver.accept(4, 3, 2);
  driver.manner.priority = -1;
  driver.accept(5, 3, 2);  // counts as arrived at 1
  driver.run_out(20);
  CHECK(driver.admitted == Ids{1, 5, 3, 2, 4});
}

TEST_CASE("small requests pass one that does not fit, a bounded number of times (B36)") {
  // If this fails, the pool stands idle behind a large request, or the large one starves.
  for (const std::int64_t overtakes_max : {16, 2, 0}) {
    EngineSettings settings = engine_of(32, 16, 512, 16);
    settings.scheduler.overtakes_max = overtakes_max;
    EngineDriver driver(settings);
    driver.accept(1, 300, 40);
    driver.steps(1);
    driver.accept(2, 250, 2);
    for (std::uint64_t id = 3; id <= 7; ++id) {
      driver.accept(id, 20, 2);
    }
    driver.steps(10);
    CAPTURE(overtakes_max);
    const auto passed = std::min<std::size_t>(5, static_cast<std::size_t>(overtakes_max));
    REQUIRE(driver.admitted.size() == 1 + passed);
    driver.run_out(60);
    CHECK(driver.admitted[1 + passed] == 2);
    CHECK(driver.receipts.size() == 7);
  }
}

TEST_CASE("a stream of small requests cannot starve a large one") {
  // If this fails, a large request waits for as long as small ones come.
  EngineDriver driver(engine_of(32, 16, 512, 16));
  driver.accept(1, 300, 120);
  driver.steps(1);
  driver.accept(2, 250, 2);
  for (std::uint64_t id = 3; id < 203; ++id) {
    driver.accept(id, 20, 2);
    driver.steps(1);
  }
  const auto large = std::find(driver.admitted.begin(), driver.admitted.end(), 2);
  REQUIRE(large != driver.admitted.end());
  CHECK(large - driver.admitted.begin() == 1 + 16);
  CHECK(driver.receipts.contains(2));
}

TEST_CASE("every one who passes counts, also when several pass in one step") {
  // If this fails, the limit on overtaking is eight times what the operator set.
  EngineSettings settings = engine_of(32, 4, 64, 16);
  settings.scheduler.overtakes_max = 3;
  EngineDriver driver(settings);
  driver.accept(1, 60, 40);
  driver.steps(1);
  driver.accept(2, 80, 2);
  for (std::uint64_t id = 3; id <= 8; ++id) {
    driver.accept(id, 2, 2);
  }
  driver.steps(1);
  CHECK(driver.admitted == Ids{1, 3, 4, 5});
  driver.steps(5);
  CHECK(driver.admitted == Ids{1, 3, 4, 5});
}

TEST_CASE("whoever is admitted leaves a block for each of the others to grow into") {
  // If this fails, sequences are let in only to be preempted a moment later.
  EngineDriver driver(engine_of(4, 4, 32, 4));
  for (std::uint64_t id = 1; id <= 4; ++id) {
    driver.accept(id, 4, 5);  // 8 slots in the end: two blocks
  }
  driver.steps(1);
  CHECK(driver.admitted == Ids{1, 2});
  driver.run_out(20);
  CHECK(driver.preempted.empty());
  EngineDriver later(engine_of(4, 4, 32, 4));
  later.accept(1, 2, 9);
  later.steps(1);
  later.accept(2, 12, 1);  // the three blocks that are free
  later.steps(1);
  CHECK(later.admitted == Ids{1});
}

TEST_CASE("the newest is preempted first, and keeps its place in the queue") {
  // If this fails, the one that waited longest loses its work.
  EngineDriver driver(engine_of(6, 4, 16, 4));
  for (std::uint64_t id = 1; id <= 3; ++id) {
    driver.accept(id, 3, 12);
    driver.now += 1;
  }
  driver.steps(1);
  REQUIRE(driver.admitted == Ids{1, 2, 3});
  driver.accept(4, 3, 1);
  driver.run_out(60);
  CHECK(driver.preempted.at(0) == 3);
  CHECK(std::count(driver.preempted.begin(), driver.preempted.end(), 1) == 0);
  const auto again = std::find(driver.admitted.begin() + 3, driver.admitted.end(), 3);
  REQUIRE(again != driver.admitted.end());
  CHECK(driver.receipt(3).output_tokens == 12);
}

TEST_CASE("the least urgent is preempted, not the last to come") {
  // If this fails, a batch job keeps its blocks while a chat loses them.
  EngineDriver driver(engine_of(4, 4, 16, 4));
  driver.manner.priority = 1;
  driver.accept(1, 3, 12);
  driver.manner.priority = 0;
  driver.accept(2, 3, 12);
  driver.run_out(60);
  CHECK(driver.preempted.at(0) == 1);
  CHECK(std::count(driver.preempted.begin(), driver.preempted.end(), 2) == 0);
}

TEST_CASE("nobody is preempted more than three times, and all end (B32)") {
  // If this fails, a small pool preempts everybody for ever and computes nothing.
  EngineDriver driver(engine_of(12, 4, 64, 12));
  driver.manner.ignore_end_of_text = true;
  for (std::uint64_t id = 1; id <= 12; ++id) {
    driver.accept(id, 4, 12);  // four blocks in the end: room for three
  }
  while (driver.engine.running() + driver.engine.waiting() > 0) {
    const StepPlanView& view = driver.plan();
    REQUIRE(view.header.tokens > 0);
    REQUIRE(view.header.logits > 0);  // something comes out of every step
    driver.commit_one_each(view);
    REQUIRE(driver.step().value() < 200);
  }
  CHECK_FALSE(driver.preempted.empty());
  for (std::uint64_t id = 1; id <= 12; ++id) {
    CHECK(driver.receipt(id).preemptions <= 3);
    CHECK(driver.receipt(id).output_tokens == 12);
    CHECK(driver.reason(id) == EndReason::kLength);
  }
}

TEST_CASE("who was preempted often enough reserves all it can need and is spared") {
  // If this fails, the last to come never ends.
  EngineSettings settings = engine_of(6, 4, 16, 4);
  settings.scheduler.preemptions_max = 1;
  EngineDriver driver(settings);
  for (std::uint64_t id = 1; id <= 3; ++id) {
    driver.accept(id, 3, 12);
  }
  bool reserved = false;
  while (driver.engine.running() + driver.engine.waiting() > 0) {
    driver.steps(1);
    REQUIRE(driver.step().value() < 100);
    reserved = reserved || driver.blocks(BlockState::kReserved) > 0;
  }
  CHECK(reserved);
  for (std::uint64_t id = 1; id <= 3; ++id) {
    CHECK(driver.receipt(id).preemptions <= 1);
    CHECK(driver.receipt(id).output_tokens == 12);
  }
}

TEST_CASE("an output limit without end reserves the pool, not more") {
  // If this fails, a client that sets no limit ends the server once it is protected.
  EngineSettings settings = engine_of(4, 4, 16, 4);
  settings.scheduler.preemptions_max = 1;
  EngineDriver driver(settings);
  for (std::uint64_t id = 1; id <= 4; ++id) {
    driver.accept(id, 3, kUnlimited);
  }
  driver.run_out(300);
  CHECK_FALSE(driver.preempted.empty());
  for (std::uint64_t id = 1; id <= 4; ++id) {
    CHECK(driver.reason(id) == EndReason::kContext);
    CHECK(driver.receipt(id).output_tokens == 4 * 4 + 1 - 3);
  }
}

TEST_CASE("all sequences may cross a block edge in the same step (B40)") {
  // If this fails, many half full blocks are taken for free memory.
  EngineDriver driver(engine_of(64, 64, 1024, 32));
  for (std::uint64_t id = 1; id <= 32; ++id) {
    // Eight are let in each step: by the fourth all are equally far.
    driver.accept(id, 60 + static_cast<std::int64_t>((id - 1) / 8), 100);
  }
  driver.steps(4);
  REQUIRE(driver.engine.running() == 32);
  CHECK(driver.blocks(BlockState::kHeld) == 32);
  CHECK(driver.blocks(BlockState::kFree) == 32);
  driver.steps(2);
  CHECK(driver.blocks(BlockState::kHeld) == 64);
  CHECK(driver.preempted.empty());
  driver.steps(64);  // the next edge, with nothing free
  CHECK_FALSE(driver.preempted.empty());
  driver.run_out(1000);
  CHECK(driver.receipts.size() == 32);
  CHECK(driver.blocks(BlockState::kFree) == 64);
}

TEST_CASE("a request that waits for room takes nothing while it waits (B34)") {
  // If this fails, each failed try leaves blocks behind.
  EngineDriver driver(engine_of(8, 4, 32, 4));
  driver.accept(1, 20, kUnlimited);
  driver.steps(1);
  driver.accept(2, 16, 2);
  for (int i = 0; i < 100; ++i) {
    driver.steps(1);
    if (driver.receipts.contains(1)) {
      break;
    }
    CHECK(driver.blocks(BlockState::kReserved) == 0);
    CHECK(driver.blocks(BlockState::kFree) + driver.blocks(BlockState::kHeld) == 8);
  }
  driver.run_out(10);
  CHECK(driver.receipt(2).output_tokens == 2);
  CHECK(driver.receipt(2).held_seconds == 0);
  CHECK(driver.blocks(BlockState::kFree) == 8);
}

TEST_CASE("several pending tokens of one leave one for everybody behind") {
  // If this fails, with speculation the first sequence takes the whole step from the others.
  EngineDriver driver(engine_of(40, 4, 4, 3));
  for (std::uint64_t id = 1; id <= 3; ++id) {
    driver.accept(id, 1, 60);
  }
  driver.steps(1);
  for (int i = 0; i < 8; ++i) {
    const StepPlanView& view = driver.plan();
    for (std::uint64_t id = 1; id <= 3; ++id) {
      CHECK(driver.planned(id) >= 1);
    }
    CHECK(view.header.tokens <= 4);
    driver.commit(std::vector<std::vector<Token>>(view.logit_tokens.size(), {5, 6, 7, 8}));
  }
}

TEST_CASE("a scheduler whose numbers do not fit together breaks at once") {
  // If this fails, a server starts that will stand still or overrun its tables.
  Ledger ledger(BlockCount{4}, 0);
  BlockPool pool(ledger);
  PrefixCache cache({}, 4, ledger, pool);
  BlockTables tables(2, BlockCount{4});
  const auto make = [&](std::int64_t budget, std::int64_t sequences, std::int32_t slots,
                        std::int64_t tokens_max) {
    SchedulerSettings settings;
    settings.token_budget = budget;
    settings.sequences_max = sequences;
    return Scheduler(settings, slots, tokens_max, pool, tables, cache).running();
  };
  CHECK(make(2, 2, 4, 17) == 0);
  CHECK_BREAKS(make(2, 0, 4, 17));
  CHECK_BREAKS(make(1, 2, 4, 17));
  CHECK_BREAKS(make(3, 3, 4, 17));
  CHECK_BREAKS(make(2, 2, 4, 18));
  CHECK_BREAKS(make(2, 2, 0, 17));
  BlockTables narrow(2, BlockCount{3});
  SchedulerSettings settings;
  settings.token_budget = 2;
  settings.sequences_max = 2;
  CHECK_BREAKS(Scheduler(settings, 4, 17, pool, narrow, cache));
}

TEST_CASE("a sequence is taken out once") {
  // If this fails, its blocks are given back twice.
  Ledger ledger(BlockCount{4}, 0);
  BlockPool pool(ledger);
  BlockTables tables(2, BlockCount{4});
  SchedulerSettings settings;
  settings.token_budget = 8;
  settings.sequences_max = 2;
  PrefixCache cache({}, 4, ledger, pool);
  Scheduler scheduler(settings, 4, 17, pool, tables, cache);
  const auto request = std::make_shared<Request>(SequenceId{0}, ledger.open(TenantId{1}));
  Sequence sequence(Arrival{}, {1, 2, 3}, request);
  request->samples.push_back(&sequence);
  scheduler.enqueue(*request);
  CHECK(scheduler.waiting() == 1);
  scheduler.remove(sequence);
  CHECK(sequence.state == Sequence::State::kEnded);
  CHECK_BREAKS(scheduler.remove(sequence));
  sequence.state = Sequence::State::kWaiting;
  CHECK_BREAKS(scheduler.remove(sequence));
  CHECK(scheduler.waiting() == 0);
}

TEST_CASE("a step is kept short while somebody decodes, and long when nobody does") {
  // If this fails, a long prompt makes every running stream stutter, or waits for nobody.
  EngineSettings settings = engine_of(2000, 16, 512, 8);
  settings.scheduler.step_stretch = 3000;
  EngineDriver driver(settings);
  constexpr Nanoseconds kMillisecond = 1'000'000;
  const auto run_step = [&driver] {
    const StepPlanView& view = driver.plan();
    const std::int64_t prompt = view.header.tokens - view.header.decode_tokens;
    driver.now += (10 + view.header.decode_tokens + prompt) * kMillisecond;
    driver.commit_one_each(view);
    return prompt;
  };
  for (std::uint64_t id = 1; id <= 4; ++id) {
    driver.accept(id, 4, 1000);
  }
  for (int i = 0; i < 50; ++i) {
    run_step();
  }
  driver.accept(5, 3000, 1);
  std::int64_t longest = 0;
  std::int64_t computed = 0;
  std::int64_t steps = 0;
  while (computed < 3000) {
    const std::int64_t prompt = run_step();
    longest = std::max(longest, prompt);
    computed += prompt;
    REQUIRE(++steps < 500);
  }
  CHECK(longest <= 30);  // decoding takes 14 ms, so 28 are left of three times that
  CHECK(longest >= 24);
  const std::vector<std::uint64_t> everybody = {1, 2, 3, 4};
  driver.end(everybody);
  driver.accept(6, 3000, 1);
  CHECK(run_step() == 512);
}

TEST_CASE("a step is as short as the most sensitive of those who decode in it wants it") {
  // If this fails, a tenant's target is another's, or holds while nobody of it decodes.
  EngineSettings settings = engine_of(2000, 16, 512, 8);
  settings.scheduler.step_time_max = 60'000'000;
  EngineDriver driver(settings);
  const auto largest = [&driver](int steps) {
    std::int64_t prompt = 0;
    for (int i = 0; i < steps; ++i) {
      const StepPlanView& view = driver.plan();
      prompt = std::max<std::int64_t>(prompt, view.header.tokens - view.header.decode_tokens);
      driver.now += (10 + view.header.tokens) * 1'000'000;
      driver.commit_one_each(view);
    }
    return prompt;
  };
  driver.accept(1, 4, 100'000);
  driver.accept(2, 20'000, 1);
  largest(100);
  CHECK(largest(100) >= 46);  // 60 ms less 10 and its own token
  CHECK(largest(100) <= 49);
  driver.manner.step_time_max = 30'000'000;
  driver.accept(3, 4, 60);
  largest(2);  // its prompt
  CHECK(largest(50) <= 18);
  driver.manner.step_time_max = 200'000'000;
  largest(20);
  REQUIRE(driver.receipts.contains(3));
  driver.accept(4, 4, 100'000);
  largest(2);
  CHECK(largest(30) <= 48);  // the server's own target holds for the first
  driver.end(std::vector<std::uint64_t>{1});
  CHECK(largest(30) >= 120);
}

TEST_CASE("a server that always has prompts finds out how much of them its steps can take") {
  // If this fails, a server that starts under load takes prompts a few tokens at a time for as long
  // as the load lasts.
  EngineSettings settings = engine_of(2000, 16, 512, 8);
  settings.scheduler.step_stretch = 3000;
  EngineDriver driver(settings);
  driver.accept(1, 4, 2000);
  driver.accept(2, 20000, 1);
  std::int64_t prompt = 0;
  std::int64_t without = 0;
  for (int i = 0; i < 400; ++i) {
    const StepPlanView& view = driver.plan();
    REQUIRE(view.header.decode_tokens == (i == 0 ? 0 : 1));
    prompt = view.header.tokens - view.header.decode_tokens;
    without += prompt == 0 ? 1 : 0;
    driver.now += (10 + view.header.decode_tokens + prompt) * 1'000'000;
    driver.commit_one_each(view);
  }
  CHECK(prompt >= 20);  // decoding takes 11 ms: 22 are left of three times that
  CHECK(prompt <= 24);
  CHECK(without == 7);  // the second step, and one after each 64
}

TEST_CASE("prompts go on even where decoding alone breaks the target") {
  // If this fails, a target that was set too low starves every prompt.
  EngineSettings settings = engine_of(2000, 16, 512, 8);
  settings.scheduler.step_time_max = 1000;
  settings.scheduler.prefill_least = 16;
  EngineDriver driver(settings);
  driver.accept(1, 4, 1000);
  driver.steps(3);
  driver.accept(2, 100, 1);
  std::int64_t steps = 0;
  for (; driver.receipts.count(2) == 0; ++steps) {
    const StepPlanView& view = driver.plan();
    driver.now += 50'000'000;
    driver.commit_one_each(view);
  }
  CHECK(steps >= 5);
  CHECK(steps <= 7);
}
