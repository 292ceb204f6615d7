#include "core/step_plan.h"

#include <algorithm>
#include <memory>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

using Words = std::vector<std::int32_t>;

Words words(std::span<const std::int32_t> span) {
  return Words(span.begin(), span.end());
}

// Two decodes and a chunk of three, with two deltas; step 2^32 + 5.
StepPlan three_sequences() {
  StepPlan plan(8, 4, 8);
  plan.begin(StepId{(std::uint64_t{1} << 32) + 5});
  plan.append_delta(TableRow{1}, 3, BlockId{40});
  plan.append_sequence(TableRow{1}, Words{11}, 24, true);
  plan.append_sequence(TableRow{0}, Words{12}, 7, true);
  plan.begin_prefill();
  plan.append_delta(TableRow{2}, 0, BlockId{41});
  plan.append_sequence(TableRow{2}, Words{21, 22, 23}, 0, false);
  plan.finish();
  return plan;
}

void check_three_sequences(const StepPlanView& view) {
  CHECK(view.step == StepId{(std::uint64_t{1} << 32) + 5});
  CHECK(view.header.tokens == 5);
  CHECK(view.header.sequences == 3);
  CHECK(view.header.logits == 2);
  CHECK(view.header.deltas == 2);
  CHECK(view.header.decode_tokens == 2);
  CHECK(view.header.layer_group == 0);
  CHECK(words(view.token_ids) == Words{11, 12, 21, 22, 23});
  CHECK(words(view.positions) == Words{24, 7, 0, 1, 2});
  CHECK(words(view.rows) == Words{1, 0, 2});
  CHECK(words(view.query_start) == Words{0, 1, 2, 5});
  CHECK(words(view.context_length) == Words{25, 8, 3});
  CHECK(words(view.adapters) == Words{0, 0, 0});
  CHECK(words(view.logit_tokens) == Words{0, 1});
  CHECK(words(view.logit_rows) == Words{1, 0});
  CHECK(words(view.delta_rows) == Words{1, 2});
  CHECK(words(view.delta_indices) == Words{3, 0});
  CHECK(words(view.delta_blocks) == Words{40, 41});
}

// The words of a plan in memory of exactly their size, so that the address sanitizer sees one read
// too many.
std::optional<StepPlanView> read_exactly(const Words& buffer) {
  const std::unique_ptr<std::int32_t[]> copy(new std::int32_t[buffer.size()]);
  std::copy(buffer.begin(), buffer.end(), copy.get());
  return StepPlanView::read({copy.get(), buffer.size()});
}

}  // namespace

TEST_CASE("a plan reads back as it was built") {
  // If this fails, the model computes something else than what was scheduled.
  const StepPlan plan = three_sequences();
  const std::optional<StepPlanView> view = StepPlanView::read(plan.buffer());
  REQUIRE(view.has_value());
  check_three_sequences(*view);
}

TEST_CASE("a plan can be copied elsewhere and read there") {
  // If this fails, plans cannot go to another process.
  Words elsewhere(1000, -1);
  {
    const StepPlan plan = three_sequences();
    std::copy(plan.buffer().begin(), plan.buffer().end(), elsewhere.begin() + 123);
    const std::optional<StepPlanView> view =
        StepPlanView::read(std::span(elsewhere).subspan(123, plan.buffer().size()));
    REQUIRE(view.has_value());
    CHECK(view->token_ids.data() >= elsewhere.data());
    CHECK(view->delta_blocks.data() < elsewhere.data() + elsewhere.size());
    elsewhere = words(std::span(elsewhere).subspan(123, plan.buffer().size()));
  }
  const std::optional<StepPlanView> view = StepPlanView::read(elsewhere);
  REQUIRE(view.has_value());
  check_three_sequences(*view);
}

TEST_CASE("a buffer that is cut or too long is refused") {
  // If this fails, a reader goes past the end of what it was sent.
  const StepPlan plan = three_sequences();
  const Words whole = words(plan.buffer());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CHECK_FALSE(read_exactly(Words(whole.begin(), whole.begin() + length)).has_value());
  }
  CHECK(read_exactly(whole).has_value());
  Words longer = whole;
  longer.push_back(0);
  CHECK_FALSE(read_exactly(longer).has_value());
}

TEST_CASE("a buffer of another version, another kind or impossible counts is refused") {
  // If this fails, a reader takes the words of one array for those of another.
  const StepPlan plan = three_sequences();
  const Words whole = words(plan.buffer());
  const auto with = [&](std::size_t word, std::int32_t value) {
    Words changed = whole;
    changed[word] = value;
    return read_exactly(changed).has_value();
  };
  CHECK(with(0, StepPlanHeader::kMagic));
  CHECK_FALSE(with(0, StepPlanHeader::kMagic + 1));
  CHECK_FALSE(with(1, StepPlanHeader::kVersion + 1));
  CHECK_FALSE(with(1, 0));
  for (const std::size_t count : {4U, 5U, 6U, 7U}) {  // tokens, sequences, logits, deltas
    for (const std::int32_t value : {-1, 0x7fffffff, static_cast<std::int32_t>(0x80000000)}) {
      CAPTURE(count);
      CHECK_FALSE(with(count, value));
    }
  }
}

TEST_CASE("a plan of nothing is a plan") {
  // If this fails, an idle step cannot be told from a broken one.
  StepPlan plan(4, 2, 4);
  plan.begin(StepId{1});
  plan.begin_prefill();
  plan.finish();
  CHECK(plan.view().header.tokens == 0);
  CHECK(plan.view().header.sequences == 0);
  CHECK(words(plan.view().query_start) == Words{0});
  CHECK(StepPlanView::read(plan.buffer()).has_value());
}

TEST_CASE("a sequence of no tokens is legal padding to a reader, and not built here") {
  // If this fails, plans cannot be padded to a fixed size.
  CHECK_BREAKS([] {
    StepPlan plan(4, 2, 4);
    plan.begin(StepId{1});
    plan.append_sequence(TableRow{0}, Words{}, 0, false);
  }());
  StepPlan plan(4, 2, 4);
  plan.begin(StepId{1});
  plan.append_sequence(TableRow{0}, Words{9}, 0, true);
  plan.finish();
  Words padded = words(plan.buffer());
  padded[5] = 2;  // sequences
  // header, 1 token, 1 position, then rows, query_start, context_length, adapters by one more each
  const std::ptrdiff_t rows = kStepPlanHeaderWords + 2;
  padded.insert(padded.begin() + rows + 1, 0);  // rows: 0, 0
  padded.insert(padded.begin() + rows + 4, 1);  // query_start: 0, 1, 1
  padded.insert(padded.begin() + rows + 6, 0);  // context_length: 1, 0
  padded.insert(padded.begin() + rows + 8, 0);  // adapters: 0, 0
  const std::optional<StepPlanView> view = StepPlanView::read(padded);
  REQUIRE(view.has_value());
  CHECK(words(view->query_start) == Words{0, 1, 1});
  CHECK(words(view->context_length) == Words{1, 0});
}

TEST_CASE("the next plan forgets the one before") {
  // If this fails, tokens of the last step are computed again.
  StepPlan plan = three_sequences();
  plan.begin(StepId{9});
  plan.append_sequence(TableRow{3}, Words{1}, 2, false);
  plan.begin_prefill();
  plan.finish();
  CHECK(plan.view().step == StepId{9});
  CHECK(words(plan.view().token_ids) == Words{1});
  CHECK(words(plan.view().positions) == Words{2});
  CHECK(plan.view().logit_tokens.empty());
  CHECK(plan.view().delta_rows.empty());
}

TEST_CASE("building the largest plan does not move the buffer") {
  // If this fails, the hot path allocates.
  StepPlan plan(8, 4, 8);
  plan.begin(StepId{1});
  plan.finish();
  const std::int32_t* const first = plan.buffer().data();
  plan.begin(StepId{2});
  for (std::uint32_t row = 0; row < 4; ++row) {
    plan.append_delta(TableRow{row}, 0, BlockId{row});
    plan.append_delta(TableRow{row}, 1, BlockId{row + 4});
    plan.append_sequence(TableRow{row}, Words{1, 2}, 0, true);
  }
  plan.begin_prefill();
  plan.finish();
  CHECK(plan.buffer().data() == first);
}

TEST_CASE("a reader that follows the deltas has the engine's tables") {
  // If this fails, a process that keeps its own copy of the tables reads the wrong blocks.
  EngineDriver driver(small_engine(12));
  const std::int64_t width = driver.engine.tables().width().value();
  std::vector<std::int32_t> copy(static_cast<std::size_t>(4 * width), -1);
  for (std::uint64_t id = 1; id <= 6; ++id) {
    driver.accept(id, static_cast<std::int64_t>(5 * id), 20);
  }
  while (driver.engine.running() + driver.engine.waiting() > 0) {
    const StepPlanView& view = driver.plan();
    for (std::size_t i = 0; i < view.delta_rows.size(); ++i) {
      copy[static_cast<std::size_t>(view.delta_rows[i] * width + view.delta_indices[i])] =
          view.delta_blocks[i];
    }
    for (std::size_t i = 0; i < view.rows.size(); ++i) {
      const std::int64_t first = view.rows[i] * width;
      for (std::int64_t entry = first; entry < first + (view.context_length[i] + 3) / 4; ++entry) {
        REQUIRE(copy[static_cast<std::size_t>(entry)] == driver.engine.tables().data()[entry]);
      }
    }
    driver.commit_one_each(view);
  }
  CHECK_FALSE(driver.preempted.empty());
  CHECK(driver.receipts.size() == 6);
}
