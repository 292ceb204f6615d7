// Whom a sequence that needs a block takes it from, and what the victims are told.

#include <cmath>
#include <functional>
#include <memory>
#include <random>

#include "core/scheduler.h"
#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

// Room for 64 tokens in a step, and for eight sequences to run.
EngineSettings engine_of(std::int64_t blocks) {
  EngineSettings settings = small_engine(blocks);
  settings.scheduler.token_budget = 64;
  settings.scheduler.sequences_max = 8;
  return settings;
}

// A sequence comes in each step; then they go on until blocks are short.
class Scarce {
 public:
  explicit Scarce(const EngineSettings& settings) : driver(settings) {
    driver.manner.ignore_end_of_text = true;
  }

  void come(std::uint64_t id, std::uint32_t tenant, std::int64_t prompt, std::int64_t output = 40,
            Token word = 5) {
    driver.manner.tenant = TenantId{tenant};
    driver.manner.scopes.keeps = driver.manner.scopes.reuses = true;
    driver.manner.scopes.own = ScopeId{tenant};
    driver.accept(id, std::vector<Token>(static_cast<std::size_t>(prompt), word), output);
    for (int i = 0; i == 0 || driver.engine.waiting() > 0; ++i) {
      REQUIRE(i < 4);
      step();
    }
    driver.now += 1;
  }
  // A step that takes `tick`, and a tenth of it for each token.
  void step() {
    const StepPlanView& view = driver.plan();
    driver.now += tick + tick / 10 * view.header.tokens;
    driver.commit_one_each(view);
  }
  // A tenant's outputs end with so many tokens.
  void teach(std::uint32_t tenant, const std::vector<int>& lengths) {
    driver.manner.ignore_end_of_text = false;
    driver.manner.tenant = TenantId{tenant};
    std::uint64_t id = 1000;
    for (const int length : lengths) {
      driver.accept(++id, 2, 100);
      for (int made = 1; !driver.receipts.contains(id); ++made) {
        const StepPlanView& view = driver.plan();
        driver.commit(std::vector<std::vector<Token>>(view.logit_tokens.size(),
                                                      {made == length ? Token{2} : Token{7}}));
      }
    }
    driver.manner.ignore_end_of_text = true;
  }
  // Who loses its blocks first.
  std::uint64_t first_victim() {
    for (int i = 0; driver.preempted.empty(); ++i) {
      REQUIRE(i < 100);
      step();
    }
    return driver.preempted.front();
  }

  Nanoseconds tick = 0;
  EngineDriver driver;
};

using Scene = std::function<void(Scarce&)>;

// The scene in a pool that has no block left when a sequence has made so many tokens; one with a
// prompt of three then needs another.
std::unique_ptr<Scarce> scarce_for(std::uint64_t needy, const Scene& scene,
                                   EngineSettings settings = engine_of(200),
                                   std::size_t outputs = 6) {
  Scarce ample(settings);
  scene(ample);
  while (ample.driver.outputs[needy].size() < outputs) {
    ample.step();
  }
  settings.blocks = BlockCount{ample.driver.blocks(BlockState::kHeld) +
                               ample.driver.blocks(BlockState::kReserved)};
  auto scarce = std::make_unique<Scarce>(settings);
  scene(*scarce);
  return scarce;
}

}  // namespace

TEST_CASE("of those behind it the cheapest goes, not the newest") {
  // If this fails, a long prompt is computed again where a short one would have done.
  for (const bool priced : {true, false}) {
    EngineSettings settings = engine_of(200);
    settings.scheduler.priced_victims = priced;
    const auto scarce = scarce_for(
        1,
        [](Scarce& all) {
          all.come(1, 1, 3);
          all.come(2, 1, 2);
          all.come(3, 1, 24);
        },
        settings);
    CHECK(scarce->first_victim() == (priced ? 2 : 3));
  }
}

TEST_CASE("blocks that are reserved for a prompt and not filled yet cost nothing") {
  // If this fails, work is lost where none had been done yet.
  EngineSettings settings = engine_of(200);
  settings.scheduler.step_time_max = 1;  // a prompt token each step
  settings.scheduler.prefill_least = 1;
  const auto scarce = scarce_for(
      1,
      [](Scarce& all) {
        all.tick = 1'000'000;
        all.driver.manner.priority = 1;
        all.come(3, 1, 24);
        all.driver.manner.priority = 0;
        all.come(1, 1, 3);
        for (int i = 0; i < 4; ++i) {
          all.step();
        }
        all.come(2, 1, 60);
      },
      settings, 14);
  CHECK(scarce->first_victim() == 2);
}

TEST_CASE("who ends soon by its own limit is spared, however cheap it is") {
  // If this fails, blocks are taken that would have come back by themselves.
  for (const std::int64_t output : {40, 9}) {
    const auto scarce = scarce_for(1, [&](Scarce& all) {
      all.come(1, 1, 3);
      all.come(2, 1, 2, output);
      all.come(3, 1, 24);
    });
    CHECK(scarce->first_victim() == (output == 40 ? 2 : 3));
  }
}

TEST_CASE("who ends soon as its tenant's outputs use to is spared") {
  // If this fails, only what clients say of their outputs counts, which is mostly nothing.
  for (const bool learns : {false, true}) {
    const auto scarce = scarce_for(1, [&](Scarce& all) {
      if (learns) {
        all.teach(7, std::vector<int>(40, 8));
      }
      all.come(1, 1, 3);
      all.come(2, 7, 2);
      all.come(3, 3, 24);
    });
    CHECK(scarce->first_victim() == (learns ? 3 : 2));
  }
}

TEST_CASE("nobody loses blocks to a tenant that holds far more, if there is another") {
  // If this fails, a tenant of short chats computes again for one that fills the pool.
  for (const std::uint32_t whose : {1, 2}) {
    const auto scarce = scarce_for(1, [&](Scarce& all) {
      all.come(1, 1, 3);
      all.come(2, whose, 2);
      all.come(3, 1, 24);
    });
    CHECK(scarce->first_victim() == (whose == 1 ? 2 : 3));
  }
  const auto alone = scarce_for(1, [](Scarce& all) {  // nobody else is there
    all.come(1, 1, 3);
    all.come(2, 2, 2);
  });
  CHECK(alone->first_victim() == 2);
}

TEST_CASE("a paused sequence goes first, whatever it costs") {
  // If this fails, who does not read makes those compute again who do.
  const auto scarce = scarce_for(1, [](Scarce& all) {
    all.come(9, 1, 24);
    all.driver.engine.pause(std::vector<std::uint64_t>{9}, all.driver.now);
    all.come(1, 1, 3);
    all.come(2, 1, 2);
  });
  CHECK(scarce->first_victim() == 9);
}

TEST_CASE("for blocks that are about to come back a sequence waits, and keeps its own") {
  // If this fails, a prompt is computed again for a block that would have come a moment later.
  for (const std::int64_t steps : {0, 8}) {
    EngineSettings settings = engine_of(200);
    settings.scheduler.wait_steps_max = steps;
    const auto scarce = scarce_for(
        2,
        [](Scarce& all) {
          all.come(1, 1, 3, 9);
          all.come(2, 1, 3, 20);
          all.come(3, 1, 24, 20);
        },
        settings);
    EngineDriver& driver = scarce->driver;
    std::int64_t waited = 0;
    while (!driver.receipts.contains(1)) {
      const std::int64_t held = driver.blocks(BlockState::kHeld);
      driver.steps(1);
      const bool waits = driver.planned(2) == 0 && driver.preempted.empty();
      waited += waits ? 1 : 0;
      CHECK((!waits || driver.receipts.contains(1) || driver.blocks(BlockState::kHeld) == held));
    }
    CHECK(driver.preempted.empty() == (steps > 0));
    CHECK((waited > 0) == (steps > 0));
    driver.run_out(200);
    CHECK(driver.receipt(2).output_tokens == 20);
  }
}

TEST_CASE("nobody waits longer than so many steps for blocks that do not come") {
  // If this fails, a stream stands still for as long as another does not end as it used to.
  EngineSettings settings = engine_of(200);
  settings.slots_per_block = 16;  // the others need none meanwhile
  settings.scheduler.wait_steps_max = 8;
  const auto scarce = scarce_for(
      2,
      [](Scarce& all) {
        std::vector<int> lengths;
        for (int length = 2; length < 60; length += 2) {  // of those that come so far a quarter
          const double count = 200 * std::pow(0.75, length / 2);
          lengths.insert(lengths.end(), static_cast<std::size_t>(count) + 1, length);
        }
        all.teach(7, lengths);
        all.come(1, 7, 3);
        all.come(2, 1, 3);
        all.come(3, 1, 24);
      },
      settings, 14);
  EngineDriver& driver = scarce->driver;
  std::int64_t waited = 0;
  while (driver.preempted.empty()) {
    driver.steps(1);
    CHECK(driver.planned(1) == 1);  // the first goes on in every step
    waited += driver.planned(2) == 0 ? 1 : 0;
    REQUIRE(waited <= 8);
  }
  CHECK(waited == 8);
}

TEST_CASE("nobody waits where computing a victim again is cheaper") {
  // If this fails, a long stream stands still to spare a few tokens.
  for (const std::int64_t prompt : {1, 24}) {
    const auto scarce = scarce_for(2, [&](Scarce& all) {
      all.come(1, 1, 3, 12);
      all.come(2, 1, 3, 20);
      all.come(3, 1, prompt, 20);
    });
    bool waits = false;
    while (scarce->driver.preempted.empty() && !scarce->driver.receipts.contains(1)) {
      scarce->driver.steps(1);
      waits = waits || scarce->driver.planned(2) == 0;
    }
    CHECK(waits == (prompt == 24));
  }
}

TEST_CASE("within a tenant it counts what others hold too, between tenants it does not") {
  // If this fails, much is taken that gives little back; or whom another tenant's sequence is taken
  // from tells what texts the other has.
  for (const bool same_tenant : {true, false}) {
    for (const bool alike : {true, false}) {
      EngineSettings settings = engine_of(200);
      settings.prefixes.on = true;
      const auto scarce = scarce_for(
          1,
          [&](Scarce& all) {
            const std::uint32_t theirs = same_tenant ? 1 : 2;
            all.come(1, 1, 3, 40, 11);
            all.come(2, theirs, 16, 40, 20);
            all.come(3, theirs, 17, 40, alike ? 20 : 30);
            all.come(4, same_tenant ? 1 : 3, 14, 40, 40);
          },
          settings, 14);
      CAPTURE(same_tenant);
      CAPTURE(alike);
      // Alike, 2 and 3 give back only what they made themselves, which is less than what 4 has.
      const std::uint64_t victim = scarce->first_victim();
      if (same_tenant && alike) {
        CHECK((victim == 2 || victim == 3));
      } else {
        CHECK(victim == 4);
      }
    }
  }
}

TEST_CASE("a receipt says what its preemptions were for") {
  // If this fails, a tenant looks for the fault with others where it is its own, or the reverse.
  const auto told = [](Scarce& scarce, std::uint64_t id) {
    scarce.driver.engine.resume(std::vector<std::uint64_t>{1, 2, 3}, scarce.driver.now);
    scarce.driver.run_out(400);
    const Receipt& receipt = scarce.driver.receipt(id);
    CHECK(receipt.preempted_own + receipt.preempted_others + receipt.preempted_itself +
              receipt.preempted_paused ==
          receipt.preemptions);
    return receipt;
  };
  for (const std::uint32_t neighbour : {1, 2}) {
    const auto scarce = scarce_for(1, [&](Scarce& all) {
      all.come(1, 1, 3, 20);
      all.come(2, neighbour, 3, 20);
    });
    CHECK(scarce->first_victim() == 2);
    const Receipt receipt = told(*scarce, 2);
    CHECK(receipt.preempted_own == (neighbour == 1 ? 1 : 0));
    CHECK(receipt.preempted_others == (neighbour == 1 ? 0 : 1));
  }
  const auto itself = scarce_for(2, [](Scarce& all) {
    all.come(1, 1, 4, 40);
    all.come(2, 1, 3, 20);
  });
  CHECK(itself->first_victim() == 2);
  CHECK(told(*itself, 2).preempted_itself == 1);

  EngineSettings settings = engine_of(40);
  settings.scheduler.wait_steps_max = 0;
  Scarce at_limit(settings);
  at_limit.driver.engine.set_shares(
      {PoolShare{TenantId{1}, BlockCount{0}, BlockCount{5}, BlockCount{40}, false}}, 0);
  at_limit.come(1, 1, 4, 15);
  at_limit.come(2, 1, 3, 15);
  while (at_limit.driver.preempted.empty()) {
    at_limit.driver.steps(1);
  }
  const Receipt limited = told(at_limit, 2);
  CHECK(limited.preempted_own == limited.preemptions);  // it stepped back, for its tenant's limit
  CHECK(limited.preemptions > 0);

  const auto paused = scarce_for(2, [](Scarce& all) {
    all.come(1, 1, 3, 20);
    all.come(2, 1, 3, 20);
    all.driver.engine.pause(std::vector<std::uint64_t>{1}, all.driver.now);
  });
  CHECK(paused->first_victim() == 1);
  CHECK(told(*paused, 1).preempted_paused == 1);
}

TEST_CASE("who was preempted as often as it may be is no victim, however cheap") {
  // If this fails, a sequence is preempted for ever, or the process ends.
  EngineSettings settings = engine_of(13);
  settings.scheduler.preemptions_max = 1;
  settings.scheduler.wait_steps_max = 0;
  Scarce scarce(settings);
  EngineDriver& driver = scarce.driver;
  scarce.come(1, 1, 3, 24);
  scarce.come(2, 1, 3, 40);
  CHECK(scarce.first_victim() == 2);
  while (!driver.receipts.contains(1) || driver.engine.running() == 0) {
    scarce.step();
  }
  driver.manner.priority = -1;
  scarce.come(5, 1, 3, 20);  // before it in rank, and with two blocks that it can have
  while (driver.preempted.size() == 1) {
    scarce.step();
  }
  CHECK(driver.preempted.back() == 5);
  driver.run_out(300);
  CHECK(driver.receipt(2).preemptions == 1);
}

TEST_CASE("whatever the prices are, nobody is preempted more than three times and all end") {
  // If this fails, the cheapest sequence of a small pool is preempted for ever.
  std::int64_t preemptions = 0;
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto between = [&random](std::int64_t least, std::int64_t most) {
      return least +
             static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(most - least + 1));
    };
    EngineSettings settings = engine_of(between(10, 24));
    settings.scheduler.forecast = seed % 4 == 0;
    EngineDriver driver(settings);
    driver.manner.ignore_end_of_text = true;
    constexpr std::uint64_t kRequests = 30;
    for (std::uint64_t id = 1; id <= kRequests; ++id) {
      driver.manner.tenant = TenantId{static_cast<std::uint32_t>(between(1, 3))};
      driver.accept(id, between(1, 20), between(1, 18));
      driver.steps(between(0, 2), between(0, 5) * 1'000'000);
    }
    driver.run_out(2000, 1'000'000);
    for (std::uint64_t id = 1; id <= kRequests; ++id) {
      REQUIRE(driver.receipt(id).preemptions <= 3);
      REQUIRE(driver.reason(id) == EndReason::kLength);
    }
    preemptions += static_cast<std::int64_t>(driver.preempted.size());
  }
  CHECK(preemptions > 60);
}
