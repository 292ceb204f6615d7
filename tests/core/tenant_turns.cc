// What one tenant can bring about for another in the scheduler, by accident or on purpose.

#include <algorithm>

#include "core/fair_queue.h"
#include "core/scheduler.h"
#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;

namespace {

EngineSettings large_engine() {
  EngineSettings settings;
  settings.blocks = BlockCount{4000};
  settings.slots_per_block = 32;
  settings.context_tokens = 200'000;
  settings.scheduler.token_budget = 512;
  settings.scheduler.sequences_max = 64;
  settings.end_of_text = {2};
  settings.prefixes.on = true;
  settings.prefixes.seed = 12345;
  return settings;
}

// Tenants that always have so many requests in the queue.
struct Tenants {
  explicit Tenants(const EngineSettings& settings) : driver(settings) {}

  void come(std::uint64_t id, std::uint32_t tenant, std::int64_t tokens, std::int64_t output,
            Token first = 5) {
    driver.manner.tenant = TenantId{tenant};
    std::vector<Token> prompt(static_cast<std::size_t>(tokens));
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      prompt[i] = first + static_cast<Token>(i % 97);
    }
    driver.accept(id, prompt, output);
  }
  // Keeps `count` requests of a tenant going; ids are its own.
  void flood(std::uint32_t tenant, int count, std::int64_t tokens) {
    std::uint64_t& next = nexts[tenant];
    std::int64_t open = 0;
    for (std::uint64_t id = next > 20 ? next - 20 : 0; id < next; ++id) {
      open += driver.receipts.contains(tenant * 1'000'000 + id) ? 0 : 1;
    }
    for (; open < count; ++open) {
      come(tenant * 1'000'000 + next, tenant, tokens, 1, 5 + static_cast<Token>(next % 1000));
      ++next;
    }
  }
  void step() { step_of(1'000'000, 0); }
  void step_of(Nanoseconds fixed, Nanoseconds each) {
    const StepPlanView& view = driver.plan();
    for (std::size_t i = 0; i < view.rows.size(); ++i) {
      const std::uint64_t id = driver.owners.at(view.rows[i]);
      computed[static_cast<std::uint32_t>(id / 1'000'000)] +=
          view.query_start[i + 1] - view.query_start[i];
    }
    driver.now += fixed + each * view.header.tokens;
    if (driver.engine.has_uncommitted_step()) {
      driver.commit_one_each(view);
    }
  }

  EngineDriver driver;
  std::map<std::uint32_t, std::uint64_t> nexts;
  std::map<std::uint32_t, std::int64_t> computed;  // that were computed, by tenant
};

}  // namespace

TEST_CASE("a tenant at its own limit does not stop the queue's time") {
  // If this fails, whoever comes next has as much credit as the others were given meanwhile, and
  // starves them.
  Tenants tenants(large_engine());
  tenants.driver.engine.set_shares(
      {PoolShare{TenantId{9}, BlockCount{0}, BlockCount{4}, BlockCount{4000}, false}}, 0);
  tenants.come(1, 9, 100, 5);
  tenants.step();
  const std::uint64_t paused = 1;
  tenants.driver.engine.pause({&paused, 1}, tenants.driver.now);
  tenants.come(2, 9, 100, 5);
  for (int i = 0; i < 300; ++i) {
    tenants.flood(1, 5, 1000);
    tenants.step();
  }
  tenants.computed.clear();
  for (int i = 0; i < 100; ++i) {
    tenants.flood(1, 5, 1000);
    tenants.flood(3, 5, 1000);
    tenants.step();
  }
  CHECK(tenants.computed[1] > 20'000);
  CHECK(tenants.computed[3] > 20'000);
}

TEST_CASE("a tiny request in every step does not take it from all others") {
  // If this fails, one tenant with requests of one token holds up every long prompt.
  Nanoseconds times[2];
  for (const bool is_beside : {false, true}) {
    Tenants tenants(large_engine());
    for (std::uint64_t warm = 1; warm <= 12; ++warm) {  // how long steps take
      tenants.come(warm, 1, static_cast<std::int64_t>(40 * warm), 1);
      tenants.step_of(5'000'000, 100'000);
    }
    const Nanoseconds began = tenants.driver.now;
    tenants.come(1'000'000, 1, 4000, 1);
    for (std::uint64_t id = 2'000'000; !tenants.driver.receipts.contains(1'000'000); ++id) {
      REQUIRE(id < 2'000'200);
      if (is_beside) {
        tenants.come(id, 2, 1, 1);
      }
      tenants.step_of(5'000'000, 100'000);
    }
    times[is_beside ? 1 : 0] = tenants.driver.now - began;
  }
  CHECK(times[1] < times[0] * 3 / 2);
}

TEST_CASE("what another tenant has behind it does not make one's chunks smaller") {
  // If this fails, chunks tell what others have cached, and long contexts slow everybody down.
  for (const bool is_beside : {false, true}) {
    EngineSettings settings = large_engine();
    settings.scheduler.prefill_time_max = 50'000'000;
    Tenants tenants(settings);
    tenants.come(40, 2, 10, 1);
    tenants.step();
    const auto compute = [&](const auto& is_done) {
      std::int64_t largest = 0;
      while (!is_done()) {
        const StepPlanView& view = tenants.driver.plan();
        std::int64_t keys = 0;
        for (std::size_t i = 0; i < view.rows.size(); ++i) {
          const std::int64_t chunk = view.query_start[i + 1] - view.query_start[i];
          keys += chunk * view.context_length[i];
          largest =
              tenants.driver.owners.at(view.rows[i]) == 1 ? std::max(largest, chunk) : largest;
        }
        tenants.driver.now += 5'000'000 + 100'000 * view.header.tokens + 30 * keys;
        tenants.driver.commit_one_each(view);
      }
      return largest;
    };
    tenants.driver.manner.scopes = {};
    tenants.come(50, 1, 6000, 1, 700);
    compute([&] { return tenants.driver.receipts.contains(50); });
    PrefixScopes scopes;
    scopes.keeps = scopes.reuses = true;
    scopes.own = ScopeId{2};
    tenants.driver.manner.scopes = scopes;
    tenants.come(60, 2, 60'000, 1, 3);
    compute([&] { return tenants.driver.receipts.contains(60); });
    tenants.driver.manner.scopes = {};
    tenants.come(1, 1, 6000, 1, 900);
    if (is_beside) {
      tenants.driver.manner.scopes = scopes;
      tenants.come(70, 2, 90'000, 1, 3);  // begins behind 60,000 of its own
    }
    CHECK(compute([&] { return tenants.driver.receipts.contains(1); }) > 300);
  }
}

TEST_CASE("steps are short for whoever comes, while somebody else comes") {
  // If this fails, a tenant that is alone pays for others, or one that comes waits for a long step.
  EngineSettings settings = large_engine();
  settings.scheduler.prefill_time_max = 10'000'000;
  Tenants tenants(settings);
  const auto largest_step = [&](std::uint64_t id) {
    tenants.come(id, static_cast<std::uint32_t>(id / 1'000'000), 2000, 1);
    std::int64_t largest = 0;
    while (!tenants.driver.receipts.contains(id)) {
      const StepPlanView& view = tenants.driver.plan();
      largest = std::max<std::int64_t>(largest, view.header.tokens);
      tenants.driver.now += 1'000'000 + 100'000 * view.header.tokens;
      tenants.driver.commit_one_each(view);
    }
    return largest;
  };
  const std::uint64_t server = kServerTenants.value() * std::uint64_t{1'000'000};
  CHECK(largest_step(server) == 512);
  CHECK(largest_step(server + 1'000'000) == 512);
  CHECK(largest_step(1'000'000) == 512);
  CHECK(largest_step(2'000'000) < 120);
  CHECK(largest_step(2'000'001) < 120);
  tenants.driver.now += Scheduler::kOthersStay;
  CHECK(largest_step(2'000'002) == 512);
}

TEST_CASE("nobody waits for a block of a tenant whose turn comes later") {
  // If this fails, a tenant that was given little starves behind one that was given much.
  Tenants tenants(large_engine());
  PrefixScopes scopes;
  scopes.keeps = scopes.reuses = scopes.has_shared = scopes.writes_shared = true;
  scopes.shared = ScopeId{0x80000001U};
  scopes.shared_tokens = 2000;
  for (int i = 0; i < 100; ++i) {
    tenants.flood(2, 2, 1000);
    tenants.flood(3, 2, 1000);
    tenants.step();
  }
  scopes.own = ScopeId{2};
  tenants.driver.manner.scopes = scopes;
  tenants.come(2'900'000, 2, 2100, 1, 3);
  scopes.own = ScopeId{1};
  tenants.driver.manner.scopes = scopes;
  tenants.come(1'000'000, 1, 2100, 1, 3);
  tenants.driver.manner.scopes = {};
  int steps = 0;
  for (; !tenants.driver.receipts.contains(1'000'000); ++steps) {
    REQUIRE(steps < 100);
    tenants.flood(3, 2, 1000);
    tenants.step();
  }
  CHECK(steps < 20);
}
