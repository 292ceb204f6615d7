// Who is let in when memory is expected to last, and who is in spite of what is expected.

#include <algorithm>
#include <array>
#include <limits>

#include "core/recompute_governor.h"
#include "core/scheduler.h"
#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

using Ids = std::vector<std::uint64_t>;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
constexpr Token kEnd = 2;

// Blocks of 4 slots, 64 tokens in a step, 8 sequences.
EngineSettings foreseeing(std::int64_t blocks) {
  EngineSettings settings = small_engine(blocks);
  settings.scheduler.token_budget = 64;
  settings.scheduler.sequences_max = 8;
  settings.scheduler.forecast = true;
  return settings;
}

// Lets a tenant have so many outputs of `tokens` tokens that end by themselves.
void teach(EngineDriver& driver, std::uint64_t first, std::int64_t outputs, std::int64_t tokens) {
  for (std::int64_t i = 0; i < outputs; ++i) {
    driver.accept(first + static_cast<std::uint64_t>(i), 1, kUnlimited);
    driver.steps(tokens - 1);
    const StepPlanView& view = driver.plan();
    driver.commit(std::vector<std::vector<Token>>(view.logit_tokens.size(), {kEnd}));
  }
  REQUIRE(driver.receipts.size() >= static_cast<std::size_t>(outputs));
  driver.admitted.clear();
}

}  // namespace

TEST_CASE("nobody is let in who would have to make room again before the others end") {
  // If this fails, a pool that is too small computes everything twice.
  for (const bool forecast : {true, false}) {
    EngineSettings settings = foreseeing(12);
    settings.scheduler.forecast = forecast;
    EngineDriver driver(settings);
    for (std::uint64_t id = 1; id <= 8; ++id) {
      driver.accept(id, 3, 18);  // five blocks in the end
    }
    driver.steps(1);
    CAPTURE(forecast);
    CHECK(driver.admitted.size() == (forecast ? 2 : 6));
    driver.run_out(200);
    CHECK(driver.preempted.empty() == forecast);
    CHECK(driver.receipts.size() == 8);
  }
}

TEST_CASE("outputs that used to be short let in many, whatever their limit") {
  // If this fails, clients that set no limit have the server to themselves, one after the other.
  EngineDriver unknown(foreseeing(60));
  EngineDriver known(foreseeing(60));
  teach(known, 1, 60, 4);
  for (EngineDriver* driver : {&unknown, &known}) {
    for (std::uint64_t id = 101; id <= 108; ++id) {
      driver->accept(id, 4, kUnlimited);
    }
    driver->steps(1);
  }
  CHECK(known.admitted.size() == 8);
  CHECK(unknown.admitted.size() < 8);
  CHECK_FALSE(unknown.admitted.empty());
}

TEST_CASE("if nobody goes on the next one is let in, whatever is expected") {
  // If this fails, a request that may fill the pool is never answered, or a client that stopped
  // reading stops the server.
  EngineDriver driver(foreseeing(10));
  driver.accept(1, 4, kUnlimited);
  driver.accept(2, 4, kUnlimited);
  driver.steps(1);
  CHECK(driver.admitted == Ids{1});
  driver.engine.pause(std::vector<std::uint64_t>{1}, driver.now);
  driver.steps(1);
  CHECK(driver.admitted == Ids{1, 2});
  driver.engine.resume(std::vector<std::uint64_t>{1}, driver.now);
  driver.run_out(200);
  CHECK(driver.receipts.size() == 2);
}

TEST_CASE("samples count as many, before they begin") {
  // If this fails, one request with sixteen samples fills a pool that was thought to last.
  EngineDriver driver(foreseeing(18));
  driver.accept(1, 3, 14);  // four blocks
  driver.manner.samples = 4;
  driver.accept(2, 3, 14);  // four times four
  driver.steps(1);
  CHECK(driver.admitted == Ids{1});
  driver.run_out(100);
  CHECK(driver.preempted.empty());
}

TEST_CASE("who waits for its own tenant's sequences to end holds up nobody") {
  // If this fails, a tenant at its limit stops the others.
  EngineDriver driver(foreseeing(60));
  driver.engine.set_shares(
      {PoolShare{TenantId{1}, BlockCount{0}, BlockCount{8}, BlockCount{60}, false}}, 0);
  driver.accept(1, 3, 18);
  driver.accept(2, 3, 18);  // ten blocks, of eight that the tenant may have
  driver.manner.tenant = TenantId{2};
  driver.accept(3, 3, 18);
  driver.steps(1);
  CHECK(driver.admitted == Ids{1, 3});
  driver.run_out(100);
  CHECK(driver.preempted.empty());
}

TEST_CASE("who fits into its guarantee does not wait for what others grow to") {
  // If this fails, a guarantee is worth nothing as soon as others have long answers.
  for (const std::int64_t guaranteed : {10, 0}) {
    EngineDriver driver(foreseeing(30));
    driver.engine.set_shares(
        {PoolShare{TenantId{1}, BlockCount{guaranteed}, BlockCount{30}, BlockCount{30}, false}}, 0);
    driver.manner.tenant = TenantId{2};
    driver.accept(1, 4, 60);  // 16 blocks
    driver.steps(1);
    driver.manner.tenant = TenantId{1};
    driver.accept(2, 4, 60);
    driver.steps(1);
    CAPTURE(guaranteed);
    CHECK(driver.admitted.size() == (guaranteed > 0 ? 2 : 1));
  }
}

TEST_CASE("what several share is not counted again with each of them") {
  // If this fails, the longer the prompt that all begin with, the fewer are let in.
  EngineSettings settings = foreseeing(60);
  settings.prefixes.on = true;
  settings.scheduler.token_budget = 256;
  EngineDriver driver(settings);
  driver.manner.scopes.keeps = driver.manner.scopes.reuses = true;
  driver.manner.scopes.own = ScopeId{1};
  driver.accept(1, 120, 20);  // 30 blocks
  driver.steps(2);
  for (std::uint64_t id = 2; id <= 4; ++id) {
    driver.accept(id, 120, 20);
  }
  driver.steps(2);
  CHECK(driver.admitted == Ids{1, 2, 3, 4});
}

TEST_CASE("a server that recomputes becomes more careful") {
  // If this fails, lengths that change all at once cost as much as if nobody looked ahead.
  EngineDriver driver(foreseeing(40));
  teach(driver, 1, 600, 2);
  for (std::uint64_t id = 1001; id <= 1030; ++id) {
    driver.accept(id, 20, 100);
  }
  driver.run_out(5000);
  CHECK_FALSE(driver.preempted.empty());
  CHECK(driver.engine.governor().raised() > 0);
}

TEST_CASE("a tenant that lives in its guarantee is no reason to let nobody else in") {
  // If this fails, a request that is next stands in the queue for ever, and all behind it.
  EngineDriver driver(foreseeing(100));
  driver.engine.set_shares(
      {PoolShare{TenantId{1}, BlockCount{10}, BlockCount{100}, BlockCount{100}, false}}, 0);
  std::uint64_t next = 100;
  const auto go_on = [&] {  // the tenant with the guarantee always runs something
    driver.manner.tenant = TenantId{1};
    driver.accept(next++, 3, 6);
    driver.steps(4);
  };
  go_on();
  driver.manner.tenant = TenantId{2};
  driver.accept(1, 240, 120);  // all that the guarantee leaves, in the end
  for (int i = 0; i < 20; ++i) {
    go_on();
  }
  CHECK(std::find(driver.admitted.begin(), driver.admitted.end(), 1) != driver.admitted.end());
}

TEST_CASE("readers that pause do not keep others out") {
  // If this fails, whoever does not read takes the place of those who do.
  EngineDriver driver(foreseeing(40));
  driver.manner.tenant = TenantId{1};
  driver.accept(1, 40, 60);  // 25 blocks in the end
  driver.steps(30);
  driver.engine.pause(std::vector<std::uint64_t>{1}, driver.now);
  driver.manner.tenant = TenantId{2};
  for (std::uint64_t id = 2; id <= 4; ++id) {
    driver.accept(id, 3, 40);  // eleven blocks each
  }
  driver.steps(2);
  CHECK(driver.admitted.size() == 4);
  driver.steps(60);
  CHECK(driver.receipts.size() == 3);
  CHECK(std::count(driver.preempted.begin(), driver.preempted.end(), 1) == 1);
}

TEST_CASE("a limit that is far away is no disadvantage in a full pool") {
  // If this fails, a tenant with a limit is passed by in what has nothing to do with it.
  EngineSettings settings = foreseeing(64);
  settings.scheduler.sequences_max = 16;
  EngineDriver driver(settings);
  driver.engine.set_shares(
      {PoolShare{TenantId{1}, BlockCount{0}, BlockCount{60}, BlockCount{64}, false}}, 0);
  std::array<std::uint64_t, 2> sent{};
  const auto ended = [&](std::uint64_t tenant) {
    return static_cast<std::uint64_t>(
        std::count_if(driver.receipts.begin(), driver.receipts.end(),
                      [&](const auto& each) { return each.first / 100'000 == tenant; }));
  };
  for (int step = 0; step < 2000; ++step) {
    for (const std::uint64_t tenant : {1, 2}) {
      driver.manner.tenant = TenantId{static_cast<std::uint32_t>(tenant)};
      while (sent[tenant - 1] < ended(tenant) + 16) {
        driver.accept(tenant * 100'000 + sent[tenant - 1]++, 8, 40);
      }
    }
    driver.steps(1);
  }
  CHECK(static_cast<double>(ended(1)) > 0.93 * static_cast<double>(ended(2)));
}
