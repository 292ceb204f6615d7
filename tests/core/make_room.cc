#include "core/make_room.h"

#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "tests/check_throws.h"
#include "tests/core/engine_driver.h"
#include "tests/simulation/random.h"

namespace {

// Allocations until one fails; negative: none does.
thread_local std::int64_t allocations_left = -1;
bool allocation_failed = false;

}  // namespace

// The program's own, so that a test can let one fail. Not inlined: the compiler would see free()
// called for what `new` gave.
__attribute__((noinline)) void* operator new(std::size_t size) {
  if (allocations_left >= 0 && allocations_left-- == 0) {
    allocation_failed = true;
    throw std::bad_alloc();
  }
  if (void* memory = std::malloc(size == 0 ? 1 : size)) {
    return memory;
  }
  throw std::bad_alloc();
}

__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}

__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace kvledger {
namespace {

using simulation::Random;

// A seeded script of arrivals, ends, pauses, steps, and steps that fail, over a pool so small that
// sequences are preempted. Ends at the first allocation that fails.
class Script {
 public:
  explicit Script(bool reuses) : reuses_(reuses), engine_(settings(reuses), 0) {}

  // Whether it ran to its end with the allocation of that number failing.
  bool run(std::int64_t failing) {
    allocations_left = failing;
    allocation_failed = false;
    try {
      for (int step = 0; step < 260; ++step) {
        turn();
      }
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
      return false;
    }
    allocations_left = -1;
    return true;
  }

  // What the service does when its loop dies: everybody gets a receipt, and every block is free.
  void close_the_books() {
    if (engine_.has_uncommitted_step()) {
      engine_.abandon(StepId{steps_ + 1}, ++now_);
    }
    REQUIRE(engine_.audit() == std::nullopt);
    const std::vector<std::uint64_t> all(accepted_.begin(), accepted_.end());
    allocations_left = 0;  // closing them needs no memory
    engine_.end(all, EndReason::kFailed, ++now_);
    allocations_left = -1;
    take_report();
    REQUIRE(engine_.audit() == std::nullopt);
    for (std::uint32_t tenant = 1; tenant <= 3; ++tenant) {
      engine_.purge(ScopeId{tenant}, now_);
    }
    CHECK(engine_.ledger().free() == engine_.ledger().total());
    CHECK(receipts_.size() == accepted_.size());
    for (const auto& [id, count] : receipts_) {
      CHECK(count == 1);
    }
    CHECK(engine_.running() + engine_.waiting() == 0);
  }

  std::int64_t preemptions = 0;
  std::int64_t commits = 0;

 private:
  static EngineSettings settings(bool reuses) {
    EngineSettings settings = testing::small_engine(9);
    settings.context_tokens = 30;
    settings.prefixes.on = reuses;
    return settings;
  }

  void turn() {
    ++now_;
    if (random_.chance(600)) {
      arrive();
    }
    const std::uint64_t somebody = random_.between(1, 1 + static_cast<std::int64_t>(next_));
    if (random_.chance(100)) {
      engine_.end({&somebody, 1}, EndReason::kCancelled, now_);
    }
    if (random_.chance(100)) {
      engine_.pause({&somebody, 1}, now_);
    } else if (random_.chance(200)) {
      engine_.resume({&somebody, 1}, now_);
    }
    const StepPlan& plan = engine_.plan(now_);
    if (engine_.has_uncommitted_step()) {
      step(plan);
    }
    take_report();
  }

  void arrive() {
    Arrival arrival;
    arrival.id = SequenceId{next_ + 1};
    arrival.tenant = TenantId{static_cast<std::uint32_t>(random_.between(1, 3))};
    arrival.arrived_at = now_;
    arrival.output_tokens_max = random_.between(1, 20);
    arrival.scopes.keeps = arrival.scopes.reuses = reuses_;
    arrival.scopes.own = ScopeId{arrival.tenant.value()};
    const std::vector<Token> prompt(static_cast<std::size_t>(random_.between(0, 16)), 5);
    if (engine_.accept(arrival, prompt)) {
      const std::int64_t left = std::exchange(allocations_left, -1);
      accepted_.insert(arrival.id.value());
      allocations_left = left;
    }
    ++next_;
  }

  void step(const StepPlan& plan) {
    const std::uint64_t somebody = random_.between(1, 1 + static_cast<std::int64_t>(next_));
    if (random_.chance(100)) {  // while the step runs
      engine_.end({&somebody, 1}, EndReason::kCancelled, now_);
    }
    if (random_.chance(50)) {
      engine_.abandon(plan.view().step, now_);
    } else {
      const auto wanted = static_cast<std::size_t>(plan.view().header.logits);
      const std::vector<Token> tokens(wanted, 7);
      std::vector<std::int32_t> offsets(wanted + 1);
      for (std::size_t i = 0; i <= wanted; ++i) {
        offsets[i] = static_cast<std::int32_t>(i);
      }
      engine_.commit(plan.view().step, tokens, offsets, now_);
      ++commits;
    }
    steps_ = plan.view().step.value();
  }

  // Counts with memory of its own: a failure is to be the engine's.
  void take_report() {
    const StepReport& report = engine_.take_report();
    const std::int64_t left = std::exchange(allocations_left, -1);
    preemptions += static_cast<std::int64_t>(report.preemptions.size());
    for (const Receipt& receipt : report.receipts) {
      ++receipts_[receipt.sequence];
    }
    allocations_left = left;
  }

  const bool reuses_;
  Random random_{7};
  Engine engine_;
  Nanoseconds now_ = 0;
  std::uint64_t next_ = 0;
  std::uint64_t steps_ = 0;  // committed or abandoned
  std::set<std::uint64_t> accepted_;
  std::map<std::uint64_t, int> receipts_;
};

}  // namespace

// Where memory ends in the middle of a posting, the server would end without a word, or with bills
// made of half a step. The script's own allocations are among those that fail; they stand between
// calls of the engine.
TEST_CASE("whichever allocation fails, the books can be closed") {
  bool reuses = false;
  SUBCASE("without the prefix index") {}
  SUBCASE("with it") {
    reuses = true;
  }
  std::int64_t failing = 0;
  for (;; ++failing) {
    REQUIRE(failing < 100'000);
    Script script(reuses);
    const bool whole = script.run(failing);
    script.close_the_books();
    if (whole && !allocation_failed) {  // the index does without, and goes on
      CHECK(script.preemptions > 5);
      CHECK(script.commits > 100);
      break;
    }
  }
  MESSAGE(failing << " allocations failed, one at a time");
  CHECK(failing > 200);
}

// A vector that grows one by one would copy itself at every arrival.
TEST_CASE("room is made in doubles") {
  std::vector<int> values;
  make_room(values, 3);
  CHECK(values.capacity() >= 3);
  const std::size_t before = values.capacity();
  make_room(values, before);
  CHECK(values.capacity() == before);
  make_room(values, before + 1);
  CHECK(values.capacity() >= 2 * before);
  CHECK(values.empty());
}

}  // namespace kvledger
