#include "core/sequence_blocks.h"

#include <algorithm>
#include <set>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using namespace kvledger::testing;

namespace {

using Words = std::vector<std::int32_t>;

std::vector<std::int32_t> words(std::span<const std::int32_t> values) {
  return {values.begin(), values.end()};
}

struct SampleDriver : EngineDriver {
  explicit SampleDriver(std::int64_t samples, std::int64_t blocks = 20)
      : EngineDriver(small_engine(blocks)) {
    manner.samples = samples;
  }
};

}  // namespace

TEST_CASE("samples begin together, and each copies the last block when it is the first to write") {
  // If this fails, samples write into each other's context, or the prompt is computed for each.
  SampleDriver driver(3);
  driver.accept(1, 6, 3);
  const StepPlanView& prompt = driver.plan();
  CHECK(prompt.header.tokens == 6);
  CHECK(words(prompt.logit_tokens) == Words{5, 5, 5});
  CHECK(std::set<std::int32_t>(prompt.logit_rows.begin(), prompt.logit_rows.end()).size() == 3);
  CHECK(prompt.header.copies == 0);
  CHECK(driver.blocks(BlockState::kHeld) == 2);
  driver.commit({{11}, {12}, {13}});
  CHECK(driver.outputs[1] == std::vector<Token>{11});
  CHECK(driver.outputs[3] == std::vector<Token>{13});

  const StepPlanView& decode = driver.plan();
  CHECK(decode.header.decode_tokens == 3);
  CHECK(words(decode.token_ids) == Words{11, 12, 13});
  CHECK(words(decode.positions) == Words{6, 6, 6});
  CHECK(decode.header.copies == 2);  // the last one keeps the block
  CHECK(decode.copy_from[0] == decode.copy_from[1]);
  CHECK(decode.copy_to[0] != decode.copy_to[1]);
  CHECK(driver.blocks(BlockState::kHeld) == 4);
  driver.commit_one_each(decode);
  driver.run_out(5);

  const Receipt& receipt = driver.receipt(1);
  CHECK(driver.receipts.size() == 1);
  CHECK(receipt.output_tokens == 9);
  CHECK(receipt.computed_tokens == 6 + 3 * 2);
  CHECK(receipt.shared_tokens == 12);
  CHECK(receipt.recomputed_tokens == 0);
  CHECK(receipt.peak_blocks == 4);
  CHECK(driver.blocks(BlockState::kFree) == 20);
}

TEST_CASE("nothing is copied where a prompt fills its blocks") {
  // If this fails, every request with samples copies a block for nothing.
  SampleDriver driver(3);
  driver.accept(1, 8, 3);
  driver.commit_one_each(driver.plan());
  const StepPlanView& decode = driver.plan();
  CHECK(decode.header.copies == 0);
  CHECK(driver.blocks(BlockState::kHeld) == 2 + 3);
  driver.commit_one_each(decode);
  driver.run_out(5);
  CHECK(driver.receipt(1).computed_tokens == 8 + 3 * 2);
}

TEST_CASE("samples of one token take one step and no block of their own") {
  // If this fails, the prompt is computed once for each.
  SampleDriver driver(4);
  driver.accept(1, 6, 1);
  driver.commit_one_each(driver.plan());
  CHECK(driver.receipt(1).computed_tokens == 6);
  CHECK(driver.receipt(1).peak_blocks == 2);
  CHECK(driver.receipt(1).output_tokens == 4);
}

TEST_CASE("who finds no place begins later in the blocks of one that runs") {
  // If this fails, a sample that comes late computes the prompt again.
  SampleDriver driver(6);
  driver.accept(1, 6, 3);
  driver.steps(3);  // four have run and are gone but for those that still decode
  driver.run_out(20);
  const Receipt& receipt = driver.receipt(1);
  CHECK(receipt.output_tokens == 18);
  CHECK(driver.blocks(BlockState::kFree) == 20);
  // All four end in the same step, so the fifth computes the prompt, and the sixth begins with it.
  CHECK(receipt.computed_tokens == 2 * 6 + 6 * 2);
  CHECK(receipt.shared_tokens == 4 * 6);
}

TEST_CASE("a late sample computes only the prompt's last token, in a block of its own") {
  // If this fails, it writes into the block in which its source goes on.
  EngineSettings settings = small_engine(20);
  settings.scheduler.sequences_max = 2;
  EngineDriver driver(settings);
  driver.manner.samples = 3;
  driver.accept(1, 6, 6);
  driver.steps(2);
  driver.end({1}, EndReason::kStop);
  const StepPlanView& late = driver.plan();
  CHECK(driver.planned(2) == 1);
  CHECK(driver.planned(3) == 1);
  CHECK(late.positions[1] == 5);
  CHECK(late.header.copies == 1);
  driver.commit_one_each(late);
  driver.run_out(20);
  CHECK(driver.receipt(1).shared_tokens == 6 + 5);
}

TEST_CASE("while a sample computes the prompt, the others hold up nobody") {
  // If this fails, one request with many samples blocks the queue.
  SampleDriver driver(16, 40);
  driver.accept(1, 30, 2);
  driver.manner.samples = 1;
  driver.accept(50, 3, 2);
  const StepPlanView& view = driver.plan();
  CHECK(view.header.sequences == 2);
  CHECK(driver.planned(50) == 3);
  driver.commit_one_each(view);
  driver.run_out(100);
  CHECK(driver.receipt(1).output_tokens == 32);
}

TEST_CASE("when the one that computes the prompt is ended, the next takes over") {
  // If this fails, the other samples wait for ever.
  SampleDriver driver(3);
  driver.accept(1, 30, 2);
  driver.steps(1);
  driver.end({1});
  CHECK(driver.receipts.empty());  // two are left
  driver.run_out(30);
  CHECK(driver.receipt(1).output_tokens == 4);
  CHECK(driver.reason(1) == EndReason::kLength);
}

TEST_CASE("a request fails as a whole, and nobody else") {
  // If this fails, a caller gets some answers of a request that failed.
  SampleDriver driver(3);
  driver.accept(1, 6, 9);
  driver.manner.samples = 1;
  driver.accept(50, 2, 9);
  driver.commit_one_each(driver.plan());
  const StepPlanView& view = driver.plan();
  std::vector<std::vector<Token>> tokens(view.logit_tokens.size(), {EngineDriver::kToken});
  const auto second = std::find_if(view.logit_rows.begin(), view.logit_rows.end(),
                                   [&](std::int32_t row) { return driver.owners.at(row) == 2; });
  tokens[static_cast<std::size_t>(second - view.logit_rows.begin())] = {-1};
  driver.commit(tokens);
  CHECK(driver.reason(1) == EndReason::kFailed);
  CHECK(driver.blocks(BlockState::kHeld) == 1);
  driver.run_out(20);
  CHECK(driver.reason(50) == EndReason::kLength);
}

TEST_CASE("a block that a step may still read is not given away with the last sample") {
  // If this fails, a running step reads what somebody else writes.
  SampleDriver driver(2);
  driver.accept(1, 6, 9);
  driver.commit_one_each(driver.plan());
  driver.engine.pause(std::vector<std::uint64_t>{2}, driver.now);
  const StepPlanView& view = driver.plan();
  CHECK(view.header.sequences == 1);
  driver.end({1, 2});  // the paused one last: it is not in the step, its blocks are
  CHECK(driver.blocks(BlockState::kHeld) == 0);
  CHECK(driver.blocks(BlockState::kReleasing) == 3);
  driver.commit_one_each(view);
  CHECK(driver.blocks(BlockState::kFree) == 20);
}

TEST_CASE("samples do not pass who waits before them") {
  // If this fails, a request with many samples starves an older one that needs room.
  EngineSettings settings = small_engine(8);
  settings.scheduler.token_budget = 16;
  EngineDriver driver(settings);
  driver.accept(90, 12, 40);
  driver.steps(1);
  driver.accept(91, 20, 2);  // does not fit beside the first
  driver.manner.samples = 3;
  driver.now = 1000;
  driver.accept(1, 2, 4);
  const StepPlanView& view = driver.plan();
  CHECK(driver.planned(91) == 0);
  CHECK(driver.planned(1) == 2);
  CHECK(view.logit_tokens.size() == 2);  // of the first, and of one sample
  driver.commit_one_each(view);
  driver.end({90});
  driver.run_out(50);
  CHECK(driver.receipt(1).output_tokens == 12);
}

TEST_CASE("a request has at least one sample and not more than its limit") {
  // If this fails, ids of other requests are taken.
  for (const std::int64_t samples : {std::int64_t{0}, kSamplesMax + 1}) {
    SampleDriver driver(samples);
    CHECK_BREAKS(driver.accept(1, 6, 3));
  }
}
