#include "core/engine.h"

#include <limits>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

using Outputs = std::vector<Token>;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

EngineSettings with_context(std::int64_t blocks, std::int64_t context_tokens) {
  EngineSettings settings = small_engine(blocks);
  settings.context_tokens = context_tokens;
  return settings;
}

Arrival arrival(std::uint64_t id) {
  Arrival made;
  made.id = SequenceId{id};
  made.tenant = TenantId{1};
  return made;
}

// The engine's books and tables, to plant a fault in them.
Ledger& ledger_of(EngineDriver& driver) {
  return const_cast<Ledger&>(driver.engine.ledger());
}
BlockTables& tables_of(EngineDriver& driver) {
  return const_cast<BlockTables&>(driver.engine.tables());
}

}  // namespace

TEST_CASE("an engine with nothing to do plans nothing and waits for no commit") {
  // If this fails, an idle server spins, or hangs.
  EngineDriver driver(small_engine(4));
  CHECK(driver.plan().header.sequences == 0);
  CHECK_FALSE(driver.engine.has_uncommitted_step());
  CHECK_BREAKS(driver.engine.commit(StepId{1}, {}, {}, 0));
  driver.accept(1, 2, 1);
  CHECK(driver.plan().step == StepId{1});
}

TEST_CASE("a prompt that can never fit is refused at once, with the limit (B30)") {
  // If this fails, it waits at the head of the queue for ever and everybody behind it too.
  EngineSettings settings = small_engine(32);
  settings.slots_per_block = 16;  // 512 tokens
  settings.scheduler.token_budget = 512;
  EngineDriver driver(settings);
  CHECK_FALSE(driver.accept(1, 600, 10));
  REQUIRE(driver.refused.size() == 1);
  CHECK(driver.refused[0].sequence == 1);
  CHECK(driver.refused[0].tokens == 600);
  CHECK(driver.refused[0].tokens_max == 512);
  CHECK(driver.engine.waiting() == 0);
  CHECK(driver.accept(2, 20, 1));
  driver.steps(1);
  CHECK(driver.outputs[2].size() == 1);
  CHECK_FALSE(driver.receipts.contains(1));
  CHECK(driver.engine.ledger().tenants().size() == 1);
}

TEST_CASE("an empty prompt is refused") {
  // If this fails, a sequence runs that has no token to compute.
  EngineDriver driver(small_engine(4));
  CHECK_FALSE(driver.accept(1, 0, 1));
  CHECK(driver.refused.at(0).tokens == 0);
  CHECK(driver.plan().header.sequences == 0);
}

TEST_CASE("the end of the context is not off by one (B43)") {
  // If this fails, the last token of a context is lost, or one too many is written.
  EngineSettings settings = with_context(600, 8192);
  settings.slots_per_block = 16;
  settings.scheduler.token_budget = 8192;
  EngineDriver driver(settings);
  CHECK(driver.engine.sequence_tokens_max() == 8192);
  CHECK(driver.accept(1, 8191, 1));
  driver.run_out(1);
  CHECK(driver.reason(1) == EndReason::kLength);
  CHECK(driver.outputs[1].size() == 1);
  CHECK(driver.accept(2, 8191, 2));
  driver.run_out(1);
  CHECK(driver.reason(2) == EndReason::kContext);
  CHECK(driver.outputs[2].size() == 1);
  CHECK_FALSE(driver.accept(3, 8192, 1));
  CHECK_FALSE(driver.accept(4, 8193, 1));
  CHECK(driver.refused.at(1).tokens == 8193);
  CHECK(driver.refused.at(1).tokens_max == 8191);
}

TEST_CASE("a text without a limit ends with the context (B45)") {
  // If this fails, it never ends.
  EngineDriver driver(with_context(40, 100));
  driver.manner.ignore_end_of_text = true;
  driver.accept(1, 90, kUnlimited);
  driver.run_out(30);
  CHECK(driver.reason(1) == EndReason::kContext);
  CHECK(driver.outputs[1].size() == 10);
}

TEST_CASE("a pool of four blocks serves to its last slot, and everybody in turn") {
  // If this fails, small pools lose slots, or stand still.
  EngineDriver driver(small_engine(4));
  CHECK(driver.engine.sequence_tokens_max() == 17);  // the last token needs no slot
  driver.accept(1, 16, kUnlimited);
  driver.accept(2, 1, kUnlimited);
  driver.accept(3, 5, 7);
  CHECK_FALSE(driver.accept(4, 17, 1));
  driver.run_out(100);
  CHECK(driver.outputs[1].size() == 1);
  CHECK(driver.receipt(1).peak_blocks == 4);
  CHECK(driver.outputs[2].size() == 16);
  CHECK(driver.outputs[3].size() == 7);
  CHECK(driver.blocks(BlockState::kFree) == 4);
}

TEST_CASE("a sequence ends after as many tokens as it asked for") {
  // If this fails, a client is billed for more than it wanted.
  EngineDriver driver(small_engine(20));
  for (const std::int64_t tokens : {1, 2, 7}) {
    const auto id = static_cast<std::uint64_t>(tokens);
    driver.accept(id, 3, tokens);
    driver.run_out(10);
    CHECK(driver.outputs[id].size() == static_cast<std::size_t>(tokens));
    CHECK(driver.reason(id) == EndReason::kLength);
  }
}

TEST_CASE("an end-of-text token ends a text, unless it is to be ignored (B73)") {
  // If this fails, texts run on past their end, or benchmarks stop early.
  EngineDriver driver(small_engine(20));
  driver.accept(1, 3, 9);
  driver.manner.ignore_end_of_text = true;
  driver.accept(2, 3, 9);
  driver.plan();
  driver.commit({{2}, {2}});
  CHECK(driver.outputs[1] == Outputs{2});
  CHECK(driver.reason(1) == EndReason::kStop);
  driver.run_out(20);
  CHECK(driver.outputs[2].size() == 9);
  CHECK(driver.reason(2) == EndReason::kLength);
}

TEST_CASE("what waits can be cancelled and never runs") {
  // If this fails, an answer is made for a client that has gone.
  EngineDriver driver(small_engine(20));
  driver.accept(1, 3, 9);
  driver.accept(2, 3, 9);
  driver.now = 40;
  driver.end({1});
  CHECK(driver.reason(1) == EndReason::kCancelled);
  CHECK(driver.receipt(1).queued == 40);
  CHECK(driver.receipt(1).peak_blocks == 0);
  driver.steps(1);
  CHECK(driver.admitted == std::vector<std::uint64_t>{2});
}

TEST_CASE("what runs can be cancelled between steps, and its blocks are free at once") {
  // If this fails, blocks are held for a client that has gone.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 20, 9);
  driver.steps(1);  // not even its prompt is computed
  CHECK(driver.blocks(BlockState::kReserved) == 3);
  driver.end({1});
  CHECK(driver.blocks(BlockState::kFree) == 8);
  CHECK(driver.receipt(1).computed_tokens == 8);
  CHECK(driver.plan().header.sequences == 0);
}

TEST_CASE("what a step computes can be cancelled, and its blocks wait for the step") {
  // If this fails, another sequence's keys are written where a running kernel still reads.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 4, 9);
  driver.accept(2, 4, 9);
  const StepPlanView& view = driver.plan();
  const std::int32_t row = view.rows[0];
  const std::int32_t block = view.delta_blocks[0];
  driver.end({1});
  CHECK(driver.reason(1) == EndReason::kCancelled);  // the receipt does not wait
  CHECK(driver.blocks(BlockState::kReleasing) == 1);
  CHECK(driver.blocks(BlockState::kFree) == 6);
  CHECK(driver.engine.ledger().state_of(BlockId{static_cast<std::uint32_t>(block)}) ==
        BlockState::kReleasing);
  const std::int64_t width = driver.engine.tables().width().value();
  CHECK(driver.engine.tables().data()[row * width] == block);
  driver.end({1});  // twice is once
  driver.commit({{5}, {6}});
  CHECK(driver.blocks(BlockState::kReleasing) == 0);
  CHECK(driver.blocks(BlockState::kFree) == 7);
  CHECK(driver.outputs[1].empty());
  CHECK(driver.outputs[2] == Outputs{6});
}

TEST_CASE("what runs but has no part in the step is freed at once when cancelled") {
  // If this fails, blocks stay in releasing that nobody reads.
  EngineDriver driver(small_engine(60));
  driver.accept(1, 100, 1);
  driver.accept(2, 50, 1);
  driver.steps(1);
  driver.accept(3, 4, 9);
  driver.plan();  // half for 1, the rest for 3
  REQUIRE(driver.planned(2) == 0);
  driver.end({2});
  CHECK(driver.blocks(BlockState::kReleasing) == 0);
  driver.commit({{7}});
  CHECK(driver.outputs[3].size() == 1);
}

TEST_CASE("an abandoned step fails what it named, nothing else") {
  // If this fails, one bad step takes the whole server down, or leaves sequences that never end.
  EngineSettings settings = small_engine(8);
  settings.scheduler.sequences_max = 2;
  EngineDriver driver(settings);
  driver.accept(1, 4, 9);
  driver.accept(2, 4, 9);
  driver.accept(3, 4, 1);
  driver.plan();
  driver.end({2});
  driver.abandon();
  CHECK(driver.reason(1) == EndReason::kFailed);
  CHECK(driver.reason(2) == EndReason::kCancelled);
  CHECK(driver.receipt(1).computed_tokens == 0);
  CHECK(driver.blocks(BlockState::kFree) == 8);
  CHECK(driver.engine.waiting() == 1);
  driver.run_out(2);
  CHECK(driver.reason(3) == EndReason::kLength);
}

TEST_CASE("ending what is not there does nothing") {
  // If this fails, a cancel that comes too late ends the server.
  EngineDriver driver(small_engine(8));
  driver.end({77});
  driver.accept(1, 3, 9);
  driver.steps(1);
  driver.end({1, 1, 77}, EndReason::kStop);
  CHECK(driver.reason(1) == EndReason::kStop);
  CHECK(driver.receipts.size() == 1);
}

TEST_CASE("sequences may arrive while a step is under way") {
  // If this fails, arrivals wait for the model.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 4, 2);
  const StepPlanView& view = driver.plan();
  CHECK(driver.accept(2, 4, 1));
  CHECK_FALSE(driver.accept(3, 0, 1));
  driver.commit_one_each(view);
  CHECK(driver.outputs[2].empty());
  driver.run_out(2);
  CHECK(driver.outputs[2].size() == 1);
}

TEST_CASE("an engine can be taken down in the middle of a step") {
  // If this fails, a server that stops breaks an invariant on its way out.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 20, 9);
  driver.accept(2, 4, 9);
  driver.accept(3, 100, 9);
  driver.plan();
  driver.end({2});
  CHECK(driver.engine.has_uncommitted_step());
}

TEST_CASE("steps are planned and settled one after the other") {
  // If this fails, tokens are booked to the wrong step.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 4, 9);
  driver.plan();
  CHECK_BREAKS(driver.engine.plan(0));
  CHECK_BREAKS(driver.engine.commit(StepId{2}, {}, {}, 0));
  CHECK_BREAKS(driver.engine.abandon(StepId{0}, 0));
  driver.commit({{7}});
  CHECK_BREAKS(driver.engine.commit(StepId{1}, {}, {}, 0));
  CHECK_BREAKS(driver.engine.abandon(StepId{1}, 0));
}

TEST_CASE("a commit that does not match its plan breaks") {
  // If this fails, one sequence gets the tokens of another.
  const auto commit = [](const std::vector<Token>& tokens,
                         const std::vector<std::int32_t>& offsets) {
    EngineDriver driver(small_engine(8));
    driver.accept(1, 3, 9);
    driver.accept(2, 3, 9);
    REQUIRE(driver.plan().header.logits == 2);
    driver.engine.commit(StepId{1}, tokens, offsets, 0);
  };
  commit({5, 6}, {0, 1, 2});
  CHECK_BREAKS(commit({5}, {0, 1}));
  CHECK_BREAKS(commit({5, 6}, {0, 1, 2, 2}));
  CHECK_BREAKS(commit({5, 6}, {}));
  CHECK_BREAKS(commit({5, 6}, {0, 1, 1}));
  CHECK_BREAKS(commit({5, 6, 7}, {0, 1, 2}));
  CHECK_BREAKS(commit({5, 6}, {1, 1, 2}));
  CHECK_BREAKS(commit({5, 6}, {0, 3, 2}));
  CHECK_BREAKS(commit({5, 6}, {-1, 1, 2}));
  CHECK_BREAKS(commit({5, 6}, {1, 2, 2}));
  CHECK_BREAKS(commit({5, 6, 7}, {1, 2, 3}));
}

TEST_CASE("arrivals that the service must not send break") {
  // If this fails, two requests share an id, or a rank overflows.
  Engine engine(small_engine(8), 0);
  const std::vector<Token> prompt = {1, 2};
  Arrival made = arrival(1);
  CHECK(engine.accept(made, prompt));
  CHECK_BREAKS(engine.accept(made, prompt));
  made.id = SequenceId{2};
  for (const std::int32_t priority :
       {kPriorityMax + 1, -kPriorityMax - 1, std::numeric_limits<std::int32_t>::max(),
        std::numeric_limits<std::int32_t>::min()}) {
    made.priority = priority;
    CHECK_BREAKS(engine.accept(made, prompt));
  }
  made.priority = kPriorityMax;
  made.output_tokens_max = 0;
  CHECK_BREAKS(engine.accept(made, prompt));
  made.output_tokens_max = 1;
  CHECK(engine.accept(made, prompt));
}

TEST_CASE("an engine that could hold no sequence breaks at once") {
  // If this fails, a server starts that refuses everything, or divides by zero.
  const auto make = [](std::int64_t blocks, std::int32_t slots, std::int64_t context) {
    EngineSettings settings = with_context(blocks, context);
    settings.slots_per_block = slots;
    return Engine(settings, 0).running();
  };
  CHECK(make(1, 1, 2) == 0);
  CHECK_BREAKS(make(1, 1, 1));
  CHECK_BREAKS(make(0, 4, 100));
  CHECK_BREAKS(make(4, 0, 100));
  CHECK_BREAKS(make(4, -4, 100));
}

TEST_CASE("the audit finds a block in a table that the ledger gave away") {
  // If this fails, a sequence reads and writes blocks of another, unnoticed.
  EngineDriver driver(small_engine(8));
  driver.accept(1, 4, 9);
  driver.accept(2, 4, 9);
  driver.steps(1);
  const TableRow row = [&] {
    for (const auto& [taken, id] : driver.owners) {
      if (id == 1) {
        return TableRow{static_cast<std::uint32_t>(taken)};
      }
    }
    return TableRow{};
  }();
  const BlockId block = driver.engine.tables().at(row, 0);
  const RequestAccount account = *driver.engine.ledger().holder_of(block);
  SUBCASE("released behind everybody's back") {
    ledger_of(driver).release(account, block);
    CHECK(driver.engine.audit().value_or("").find("is referenced but held by nobody") !=
          std::string::npos);
    ledger_of(driver).reserve(account, BlockCount{1});
    ledger_of(driver).acquire(account, block);
  }
  SUBCASE("more in the table than in the ledger") {
    tables_of(driver).append(row, block);
    CHECK(driver.engine.audit().value_or("") ==
          "block 0 is referenced 1 times and stands in 2 tables");
    tables_of(driver).clear(row);
    CHECK(driver.engine.audit().value_or("") ==
          "request 1 has 0 blocks in its tables and 1 in the ledger");
    tables_of(driver).append(row, block);
  }
  SUBCASE("another one's block in the table") {
    BlockId other{0};
    while (other == block || !driver.engine.ledger().holder_of(other)) {
      other = BlockId{other.value() + 1};
    }
    tables_of(driver).clear(row);
    tables_of(driver).append(row, other);
    CHECK(driver.engine.audit().value_or("").find("in its table, which is not its request's") !=
          std::string::npos);
    tables_of(driver).clear(row);
    tables_of(driver).append(row, block);
  }
  CHECK(driver.engine.audit().value_or("") == "");
}

namespace {

std::int64_t looks_at_the_clock = 0;

Nanoseconds counting_clock() noexcept {
  return ++looks_at_the_clock;
}

}  // namespace

TEST_CASE("what the books take is counted step by step, where there is a clock") {
  // If this fails, nobody sees that bookkeeping has become dear.
  EngineSettings settings = small_engine(8);
  EngineDriver untimed(settings);
  settings.books_clock = &counting_clock;
  EngineDriver driver(settings);
  for (EngineDriver* each : {&untimed, &driver}) {
    each->accept(1, 2, 3);
    each->steps(1, 10);
  }
  const Nanoseconds before = driver.engine.books_nanoseconds();
  driver.steps(1, 10);
  // Two tokens fit into the first block: dividing the step's time and counting the step remain.
  CHECK(driver.engine.books_nanoseconds() == before + 2);
  driver.engine.books(driver.now);
  CHECK(driver.engine.books_nanoseconds() == before + 3);
  CHECK(untimed.engine.books_nanoseconds() == 0);
}
