#include "core/books.h"

#include <array>
#include <map>
#include <optional>
#include <random>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

constexpr TenantId kAnna{1};
constexpr TenantId kBen{2};
constexpr ScopeId kAnnas{1};
constexpr ScopeId kBens{2};
constexpr ScopeId kGroup{(std::uint32_t{1} << 31) | 1};
constexpr Nanoseconds kSecond = 1'000'000'000;

BlockNanoseconds time_of(std::uint64_t seconds, std::uint32_t nanos) {
  return static_cast<BlockNanoseconds>(seconds) * kSecond + nanos;
}

// What is of one moment adds up: over states, and over accounts.
void check_adds_up(const Books& books, std::int64_t total) {
  REQUIRE(books.states.size() == kBlockStates);
  std::int64_t blocks = 0;
  BlockNanoseconds time = 0;
  for (const StateRow& row : books.states) {
    blocks += row.blocks;
    time += time_of(row.seconds, row.nanos);
  }
  CHECK(blocks == total);
  CHECK((time ==
         static_cast<BlockNanoseconds>(total) * static_cast<BlockNanoseconds>(books.elapsed)));
  std::array<std::int64_t, 3> of_accounts{};
  std::array<BlockNanoseconds, 3> time_of_accounts{};
  for (const AccountRow& row : books.accounts) {
    of_accounts[0] += row.reserved;
    of_accounts[1] += row.held;
    of_accounts[2] += row.cached;
    time_of_accounts[0] += time_of(row.reserved_seconds, row.reserved_nanos);
    time_of_accounts[1] += time_of(row.held_seconds, row.held_nanos);
    time_of_accounts[2] += time_of(row.cached_seconds, row.cached_nanos);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const StateRow& state = books.states[i + 1];  // reserved, held, cached
    CHECK(of_accounts[i] == state.blocks);
    CHECK((time_of_accounts[i] == time_of(state.seconds, state.nanos)));
  }
}

// How far each row has come, by what steps were told to compute: what the core counts tokens by is
// not looked at.
class Slots {
 public:
  Slots(const EngineDriver& driver, std::int64_t slots) : driver_(driver), slots_(slots) {}

  void see(const StepPlanView& view) {
    for (; seen_ < driver_.admitted.size(); ++seen_) {
      std::erase_if(computed_, [&](const auto& entry) {
        const auto owner = driver_.owners.find(static_cast<std::int32_t>(entry.first));
        return owner->second == driver_.admitted[seen_];
      });
    }
    for (std::size_t i = 0; i < view.rows.size(); ++i) {
      const auto last = static_cast<std::size_t>(view.query_start[i + 1]) - 1;
      computed_[static_cast<std::uint32_t>(view.rows[i])] = view.positions[last] + 1;
    }
  }

  // Slots of held blocks in which no row has a token; O(rows x blocks). Nothing while somebody has
  // begun in others' blocks and was in no step since.
  std::optional<std::int64_t> empty() const {
    for (const auto& [row, owner] : driver_.owners) {
      const auto number = static_cast<std::uint32_t>(row);
      if (!computed_.contains(number) && length(TableRow{number}) > 0) {
        return std::nullopt;
      }
    }
    std::map<BlockId, std::int64_t> stored;
    for (const auto& [row, computed] : computed_) {
      for (std::int64_t i = 0; i < length(TableRow{row}); ++i) {
        std::int64_t& most = stored[driver_.engine.tables().at(TableRow{row}, i)];
        most = std::max(most, std::min(slots_, computed - i * slots_));
      }
    }
    std::int64_t count = 0;
    for (const auto& [block, most] : stored) {
      CHECK(driver_.engine.ledger().state_of(block) == BlockState::kHeld);
      count += slots_ - most;
    }
    return count;
  }

 private:
  std::int64_t length(TableRow row) const {
    try {
      return driver_.engine.tables().length(row).value();
    } catch (const std::exception&) {
      return 0;  // nobody has it
    }
  }

  const EngineDriver& driver_;
  const std::int64_t slots_;
  std::map<std::uint32_t, std::int64_t> computed_;
  std::size_t seen_ = 0;  // of driver_.admitted
};

PrefixScopes scopes_of(ScopeId own, std::int64_t shared_tokens) {
  PrefixScopes scopes;
  scopes.keeps = scopes.reuses = true;
  scopes.own = own;
  scopes.has_shared = shared_tokens > 0;
  scopes.shared = kGroup;
  scopes.shared_tokens = shared_tokens;
  scopes.writes_shared = true;
  return scopes;
}

}  // namespace

TEST_CASE("the books say who has what, and for how long, at the time they are asked for") {
  // If this fails, an operator is shown something else than what receipts are made from.
  EngineDriver driver(small_engine(10));
  driver.manner.tenant = kAnna;
  driver.accept(1, 6, 4);
  driver.steps(1, 500'000'000);  // plan at 0: two blocks held for half a second, 6 tokens computed
  const Books books = driver.engine.books(driver.now + kSecond);
  check_adds_up(books, 10);
  CHECK(books.elapsed == 1'500'000'000);
  REQUIRE(books.accounts.size() == 1);
  const AccountRow& anna = books.accounts.front();
  CHECK(anna.account == kAnna.value());
  CHECK(anna.open_requests == 1);
  CHECK(anna.held == 2);
  CHECK((anna.held_seconds == 3 && anna.held_nanos == 0));
  CHECK(anna.closed_seconds == 0);
  CHECK(books.empty_slots == 2);  // 6 tokens in 2 blocks of 4
  driver.now += kSecond;
  driver.end({1});
  const AccountRow after = driver.engine.books(driver.now + kSecond).accounts.front();
  CHECK(after.open_requests == 0);
  CHECK(after.held == 0);
  CHECK((after.held_seconds == 3 && after.closed_seconds == 3));
  check_adds_up(driver.engine.books(0), 10);  // a clock that jumps back stands still
  CHECK(driver.engine.books(0).empty_slots == 0);
}

TEST_CASE("samples that share a block in part count its empty slots once") {
  // If this fails, fragmentation is reported in blocks that are there only once.
  EngineDriver driver(small_engine(16));
  driver.manner.samples = 3;
  driver.manner.ignore_end_of_text = true;
  driver.accept(1, 5, 6);
  Slots slots(driver, 4);
  for (int i = 0; i < 5; ++i) {
    const StepPlanView& view = driver.plan();
    slots.see(view);
    driver.commit_one_each(view);
    const std::int64_t empty = driver.engine.books(driver.now).empty_slots;
    CHECK(empty == (i == 0 ? 3 : slots.empty().value()));  // at first they share 5 tokens' blocks
  }
}

TEST_CASE("under any load the books add up, and empty slots are those never written") {
  // If this fails, a reader who checks conservation finds a leak where there is none, or none
  // where there is one.
  std::mt19937_64 random(7);
  std::int64_t partly = 0;
  std::int64_t preempted = 0;
  std::int64_t shared = 0;
  std::int64_t compared = 0;
  for (int run = 0; run < 20; ++run) {
    const std::int64_t total = 12;
    EngineSettings settings = small_engine(total);
    settings.prefixes.on = true;
    EngineDriver driver(settings);
    Slots slots(driver, 4);
    std::uint64_t next = 1;
    for (int step = 0; step < 200; ++step) {
      if (random() % 3 == 0 && driver.engine.waiting() < 6) {
        const bool is_anna = random() % 2 == 0;
        driver.manner.tenant = is_anna ? kAnna : kBen;
        driver.manner.samples = 1 + static_cast<std::int64_t>(random() % 3);
        driver.manner.scopes =
            scopes_of(is_anna ? kAnnas : kBens, static_cast<std::int64_t>(random() % 3) * 4);
        driver.accept(next, 1 + static_cast<std::int64_t>(random() % 18),
                      1 + static_cast<std::int64_t>(random() % 12));
        next += 3;
      }
      const StepPlanView& view = driver.plan();
      slots.see(view);
      driver.now += static_cast<Nanoseconds>(random() % 1'000'000'007);
      if (driver.engine.has_uncommitted_step()) {
        check_adds_up(driver.engine.books(driver.now), total);
        if (random() % 8 == 0) {
          driver.end({1 + random() % next});  // its blocks are releasing until the commit
          check_adds_up(driver.engine.books(driver.now), total);
        }
        random() % 40 == 0 ? driver.abandon() : driver.commit_one_each(view);
      }
      const Books books = driver.engine.books(driver.now);
      check_adds_up(books, total);
      if (const auto empty = slots.empty()) {
        CHECK(books.empty_slots == *empty);
        ++compared;
      }
      partly += books.empty_slots;
      shared += books.states[2].blocks > 0 && books.accounts.back().account == kGroup.value()
                    ? books.accounts.back().held
                    : 0;
    }
    preempted += static_cast<std::int64_t>(driver.preempted.size());
  }
  // Or the load was none.
  CHECK(partly > 0);
  CHECK(preempted > 5);
  CHECK(shared > 10);
  CHECK(compared > 2000);
}
