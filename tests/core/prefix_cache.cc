#include "core/prefix_cache.h"

#include <numeric>

#include "tests/core/engine_driver.h"

using namespace kvledger;
using kvledger::testing::EngineDriver;
using kvledger::testing::small_engine;

namespace {

constexpr TenantId kAnna{1};
constexpr TenantId kBen{2};
constexpr ScopeId kAnnas{10};
constexpr ScopeId kBens{20};
constexpr ScopeId kGroup{0x80000001};

// Blocks of 4 tokens, 8 tokens in a step, 4 sequences.
EngineSettings reusing(std::int64_t blocks) {
  EngineSettings settings = small_engine(blocks);
  settings.prefixes.on = true;
  return settings;
}

EngineDriver::Manner of(TenantId tenant, ScopeId own) {
  EngineDriver::Manner manner;
  manner.tenant = tenant;
  manner.scopes.keeps = manner.scopes.reuses = true;
  manner.scopes.own = own;
  return manner;
}

// `count` tokens from `first` on.
std::vector<Token> tokens(std::int64_t count, Token first = 100) {
  std::vector<Token> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// Runs one request to its end.
const Receipt& run(EngineDriver& driver, std::uint64_t id, const std::vector<Token>& prompt,
                   std::int64_t outputs = 1) {
  REQUIRE(driver.accept(id, prompt, outputs));
  driver.run_out(1000, 10);
  return driver.receipt(id);
}

}  // namespace

TEST_CASE("a prompt begins with what is there of it, but its last token") {
  // If this fails, a repeated prompt is computed again, or answers without logits.
  EngineDriver driver(reusing(40));
  driver.manner = of(kAnna, kAnnas);
  const Receipt cold = run(driver, 1, tokens(14));
  CHECK(cold.reused_own == 0);
  CHECK(cold.computed_tokens == 14);
  CHECK(driver.blocks(BlockState::kCached) == 3);  // the last block is not full
  const Receipt& warm = run(driver, 2, tokens(14));
  CHECK(warm.reused_own == 12);
  CHECK(warm.computed_tokens == 2);
  CHECK(driver.blocks(BlockState::kHeld) == 0);
}

TEST_CASE("the end of a prompt that a cached block begins with is copied") {
  // If this fails, whole blocks are all that is reused, or a cached block is written to.
  EngineDriver driver(reusing(40));
  driver.manner = of(kAnna, kAnnas);
  run(driver, 1, tokens(16));
  const Receipt& same = run(driver, 2, tokens(16));
  CHECK(same.reused_own == 15);
  CHECK(same.computed_tokens == 1);
  std::vector<Token> other = tokens(16);
  other[14] = 7;
  const Receipt& differs = run(driver, 3, other);
  CHECK(differs.reused_own == 14);
  const Receipt& again = run(driver, 4, tokens(16));  // as it was: nobody wrote into it
  CHECK(again.reused_own == 15);
}

TEST_CASE("the next turn of a conversation reuses the answer too") {
  // If this fails, every turn computes the last answer again.
  EngineDriver driver(reusing(40));
  driver.manner = of(kAnna, kAnnas);
  run(driver, 1, tokens(10), 7);
  std::vector<Token> next = tokens(10);
  next.insert(next.end(), driver.outputs[1].begin(), driver.outputs[1].end());
  REQUIRE(next.size() == 17);
  next.insert(next.end(), {50, 51, 52});
  // The last token of the answer was never computed: 16 are known, which are 4 blocks.
  CHECK(run(driver, 2, next).reused_own == 16);
}

TEST_CASE("nobody begins with another's blocks, whatever the tokens") {
  // If this fails, one tenant is given another's context.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  run(driver, 1, tokens(20));
  driver.manner = of(kBen, kBens);
  CHECK(run(driver, 2, tokens(20)).reused_own == 0);
  CHECK(run(driver, 3, tokens(20)).reused_own == 19);
  driver.manner = of(kAnna, ScopeId{11});  // another namespace of the first
  CHECK(run(driver, 4, tokens(20)).reused_own == 0);
  driver.manner.scopes = PrefixScopes{};
  CHECK(run(driver, 5, tokens(20)).reused_own == 0);
  driver.manner = of(kAnna, kAnnas);
  CHECK(run(driver, 6, tokens(20)).reused_own == 19);
}

TEST_CASE("who wants all of its prompt computed leaves it to others all the same") {
  // If this fails, log-probabilities of a prompt are missing, or never warm.
  EngineDriver driver(reusing(40));
  driver.manner = of(kAnna, kAnnas);
  driver.manner.scopes.reuses = false;
  run(driver, 1, tokens(14));
  CHECK(run(driver, 2, tokens(14)).computed_tokens == 14);
  CHECK(driver.blocks(BlockState::kCached) == 3);  // the same tokens once
  driver.manner.scopes.reuses = true;
  CHECK(run(driver, 3, tokens(14)).reused_own == 12);
}

TEST_CASE("what lies before the border is the group's, what follows and what is said is not") {
  // If this fails, one member reads another's question.
  EngineDriver driver(reusing(60));
  const auto member = [](TenantId tenant, ScopeId own) {
    EngineDriver::Manner manner = of(tenant, own);
    manner.scopes.has_shared = manner.scopes.writes_shared = true;
    manner.scopes.shared = kGroup;
    manner.scopes.shared_tokens = 10;  // two blocks and a half
    return manner;
  };
  driver.manner = member(kAnna, kAnnas);
  const Receipt first = run(driver, 1, tokens(20), 5);
  CHECK(first.reused_shared == 0);
  CHECK(driver.engine.ledger().statement(TenantId{kGroup.value()}).cached == BlockCount{2});
  driver.manner = member(kBen, kBens);
  const Receipt second = run(driver, 2, tokens(20), 5);
  CHECK(second.reused_shared == 8);
  CHECK(second.reused_own == 0);
  const Receipt third = run(driver, 3, tokens(20), 5);
  CHECK(third.reused_shared == 8);
  CHECK(third.reused_own == 11);
  // The group's blocks are at full weight beside a request's own, and not part of it.
  CHECK(third.scope_nanos > 0);
  driver.engine.purge(kGroup, driver.now);
  CHECK(run(driver, 4, tokens(20), 5).computed_tokens == 24);  // below the group's: all gone
}

TEST_CASE("a block that several requests of a tenant hold is split among them") {
  // If this fails, the neighbours' use makes a request cheaper or dearer than it is.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(13), 40);
  driver.steps(2, 100);  // 12 tokens computed and known
  driver.accept(2, tokens(13), 40);
  driver.steps(1, 100);
  const TenantStatement both = driver.engine.ledger().statement(kAnna);
  CHECK(both.held.value() == 3 + 2);  // three blocks together, one each besides
  driver.steps(10, 100);
  driver.end({1, 2});
  const auto time = [](const Receipt& receipt) {
    return receipt.held_seconds * 1'000'000'000 + receipt.held_nanos;
  };
  const TenantStatement after = driver.engine.ledger().statement(kAnna);
  CHECK((after.held_time == BlockNanoseconds{time(driver.receipt(1)) + time(driver.receipt(2))}));
  CHECK((after.closed_time == after.held_time));
}

TEST_CASE("who comes while another computes the same waits for its block, not for its prompt") {
  // If this fails, the same prompt is computed twice at once, or one waits for the other's end.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(41), 4);
  driver.accept(2, tokens(41), 4);
  driver.accept(3, tokens(41), 4);
  std::int64_t steps = driver.run_out(100, 10);
  std::int64_t computed = 0;
  for (const std::uint64_t id : {1, 2, 3}) {
    computed += driver.receipt(id).computed_tokens;
  }
  CHECK(computed == 41 + 3 + 2 * (1 + 3));  // each its last token and three of its answer's
  CHECK(steps <= 41 / 8 + 1 + 1 + 4);
  CHECK(driver.outputs[1].size() == 4);
}

TEST_CASE("a sequence that computes takes what another has computed meanwhile") {
  // If this fails, two that began in different places compute the same to the end.
  EngineSettings settings = reusing(60);
  settings.scheduler.token_budget = 6;  // chunks end within blocks
  EngineDriver driver(settings);
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(41), 4);
  driver.steps(1);
  driver.accept(2, tokens(41), 4);
  driver.run_out(100, 10);
  const std::int64_t computed =
      driver.receipt(1).computed_tokens + driver.receipt(2).computed_tokens;
  CHECK(computed < 41 + 41 / 2);
  CHECK(driver.receipt(1).reused_own + driver.receipt(2).reused_own > 0);
}

TEST_CASE("cached blocks go when somebody needs room, and no sooner") {
  // If this fails, a cache costs requests their place, or is empty while the pool is not full.
  EngineDriver driver(reusing(10));
  driver.manner = of(kAnna, kAnnas);
  run(driver, 1, tokens(17));
  CHECK(driver.blocks(BlockState::kCached) == 4);
  run(driver, 2, tokens(17, 300));
  CHECK(driver.blocks(BlockState::kCached) == 8);
  run(driver, 3, tokens(17, 500));
  CHECK(driver.blocks(BlockState::kCached) <= 10);
  CHECK(driver.engine.prefix_counts().evicted > 0);
  CHECK(run(driver, 4, tokens(37, 700)).computed_tokens == 37);  // takes the whole pool
}

TEST_CASE("a purge lets nobody begin with what it took, and takes nothing from who runs") {
  // If this fails, a revoked tenant's blocks are found, or a running answer breaks.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(21), 30);
  driver.steps(4, 10);
  CHECK(driver.engine.purge(kAnnas, driver.now) == 5);
  CHECK(driver.engine.purge(kAnnas, driver.now) == 0);
  CHECK(run(driver, 2, tokens(21)).reused_own == 0);
  CHECK(driver.receipt(1).output_tokens == 30);
  // What went on after the purge did not come back into the index behind it.
  driver.engine.purge(kAnnas, driver.now);
  CHECK(driver.blocks(BlockState::kCached) == 0);
  CHECK(driver.blocks(BlockState::kFree) == 60);
}

TEST_CASE("who came before a purge neither finds nor leaves anything in its scope afterwards") {
  // If this fails, requests on their way share what a leaver may no longer see.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  driver.manner.scopes.has_shared = driver.manner.scopes.writes_shared = true;
  driver.manner.scopes.shared = kGroup;
  driver.manner.scopes.shared_tokens = 12;
  for (std::uint64_t id = 1; id <= 6; ++id) {  // two of them wait
    driver.accept(id, tokens(16), 2);
  }
  driver.steps(1, 10);
  driver.engine.purge(kGroup, driver.now);
  driver.run_out(100, 10);
  CHECK(driver.engine.ledger().statement(TenantId{kGroup.value()}).cached == BlockCount{0});
  for (std::uint64_t id = 5; id <= 6; ++id) {
    CHECK(driver.receipt(id).reused_shared == 0);
  }
}

TEST_CASE("blocks of a request whose logits were unusable are given to nobody") {
  // If this fails, one bad step makes every later request with that beginning fail.
  EngineDriver driver(reusing(60));
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(14), 4);
  driver.steps(1);
  driver.plan();
  driver.commit({{-1}});
  CHECK(driver.reason(1) == EndReason::kFailed);
  CHECK(driver.blocks(BlockState::kCached) == 0);
  CHECK(run(driver, 2, tokens(14)).reused_own == 0);
}

TEST_CASE("a preempted sequence comes back to what is left of its blocks") {
  // If this fails, preemption always costs the whole prompt.
  EngineSettings settings = reusing(12);
  settings.scheduler.token_budget = 40;
  EngineDriver driver(settings);
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(12), 30);
  driver.accept(2, tokens(12, 300), 30);
  driver.run_out(200, 10);
  REQUIRE_FALSE(driver.preempted.empty());
  const Receipt& receipt = driver.receipt(driver.preempted.front());
  CHECK(receipt.preemptions > 0);
  CHECK(receipt.reused_own > 0);
  CHECK(driver.outputs[1].size() == 30);
  CHECK(driver.outputs[2].size() == 30);
}

TEST_CASE("what stays is found whatever comes, and goes with its scope") {
  // If this fails, a public prefix is evicted, or can never be taken back.
  EngineDriver driver(reusing(20));
  driver.manner.scopes.keeps = driver.manner.scopes.reuses = driver.manner.scopes.stays = true;
  driver.manner.scopes.own = kGroup;
  run(driver, 1, tokens(13));
  CHECK(driver.engine.shareable_blocks() == BlockCount{17});
  CHECK(driver.engine.ledger().statement(TenantId{kGroup.value()}).held == BlockCount{3});
  driver.manner = of(kAnna, kAnnas);
  CHECK_FALSE(driver.accept(2, tokens(70), 1));  // the pool is smaller now
  run(driver, 3, tokens(60, 500));
  driver.manner.scopes.has_shared = true;
  driver.manner.scopes.shared = kGroup;
  driver.manner.scopes.shared_tokens = 13;
  CHECK(run(driver, 4, tokens(20)).reused_shared == 12);
  CHECK(driver.engine.purge(kGroup, driver.now) > 2);
  CHECK(driver.engine.shareable_blocks() == BlockCount{20});
  CHECK(run(driver, 5, tokens(20)).reused_shared == 0);
}

TEST_CASE("what stays takes no more than half the pool, and comes before all others") {
  // If this fails, a public prefix starves those who wait already.
  EngineDriver driver(reusing(20));
  EngineDriver::Manner staying;
  staying.scopes.keeps = staying.scopes.stays = true;
  staying.scopes.own = kGroup;
  driver.manner = staying;
  CHECK_FALSE(driver.accept(1, tokens(41), 1));
  driver.manner = of(kAnna, kAnnas);
  CHECK(driver.accept(2, tokens(5), 1));
  driver.manner = staying;
  CHECK_FALSE(driver.accept(3, tokens(5), 1));
  driver.run_out(10);
  CHECK(driver.accept(4, tokens(40), 1));
  driver.run_out(10);
}

TEST_CASE("a tenant's share holds against a flood, and its limit against itself") {
  // If this fails, one tenant's requests drive out what another was promised.
  EngineDriver driver(reusing(24));
  driver.engine.set_shares({PoolShare{kAnna, BlockCount{8}, BlockCount{24}, BlockCount{24}, false},
                            PoolShare{kBen, BlockCount{0}, BlockCount{10}, BlockCount{24}, false}},
                           0);
  CHECK(driver.engine.sequence_tokens_max(kBen) == 41);
  driver.manner = of(kAnna, kAnnas);
  run(driver, 1, tokens(29));
  CHECK(driver.engine.ledger().statement(kAnna).cached == BlockCount{7});
  driver.manner = of(kBen, kBens);
  for (std::uint64_t id = 2; id < 30; ++id) {
    driver.accept(id, tokens(30, static_cast<Token>(1000 * id)), 3);
  }
  while (driver.engine.running() + driver.engine.waiting() > 0) {
    driver.steps(1, 10);
    CHECK(driver.engine.ledger().live(kBen) <= BlockCount{10});
    CHECK(driver.engine.ledger().statement(kAnna).cached == BlockCount{7});
  }
  driver.manner = of(kAnna, kAnnas);
  CHECK(run(driver, 40, tokens(29)).reused_own == 28);
}

TEST_CASE("a guarantee is at hand at once, however many others wait before") {
  // If this fails, a flood of one tenant holds up another that was promised room.
  for (const std::int64_t limit : {8, 12}) {
    EngineDriver driver(reusing(24));
    driver.engine.set_shares(
        {PoolShare{kAnna, BlockCount{8}, BlockCount{24}, BlockCount{24}, false},
         PoolShare{kBen, BlockCount{0}, BlockCount{limit}, BlockCount{24}, false}},
        0);
    driver.manner = of(kBen, kBens);
    for (std::uint64_t id = 1; id <= 40; ++id) {
      driver.accept(id, tokens(23, static_cast<Token>(1000 * id)), 30);
    }
    driver.steps(6, 10);
    driver.manner = of(kAnna, kAnnas);
    driver.accept(100, tokens(20), 3);
    driver.steps(1, 10);
    CHECK(driver.admitted.back() == 100);
    driver.run_out(3000, 10);
  }
}

TEST_CASE("who waits for its own tenant's limit holds up nobody, however often it is passed") {
  // If this fails, one tenant at its limit stops the server for all.
  EngineDriver driver(reusing(40));
  driver.engine.set_shares({PoolShare{kBen, BlockCount{0}, BlockCount{7}, BlockCount{40}, false}},
                           0);
  driver.manner = of(kBen, kBens);
  driver.accept(1, tokens(20), 8);
  driver.accept(2, tokens(20, 300), 8);
  driver.manner = of(kAnna, kAnnas);
  for (std::uint64_t id = 10; id < 50; ++id) {
    driver.accept(id, tokens(5, static_cast<Token>(100 * id)), 1);
  }
  driver.steps(60, 10);
  for (std::uint64_t id = 10; id < 50; ++id) {
    CHECK(driver.receipts.contains(id));
  }
  driver.run_out(100, 10);
  CHECK(driver.reason(2) == EndReason::kLength);
}

TEST_CASE("what waits and can never fit under a lowered share ends, what runs goes on") {
  // If this fails, one request keeps the queue standing for ever.
  EngineDriver driver(reusing(24));
  driver.manner = of(kAnna, kAnnas);
  driver.accept(1, tokens(40), 20);
  driver.steps(6, 10);
  driver.accept(2, tokens(50, 500), 4);
  driver.engine.set_shares({PoolShare{kAnna, BlockCount{0}, BlockCount{6}, BlockCount{24}, false}},
                           driver.now);
  driver.manner = of(kBen, kBens);
  driver.accept(3, tokens(10), 4);
  driver.run_out(60, 10);
  CHECK(driver.reason(1) == EndReason::kContext);
  CHECK(driver.reason(2) == EndReason::kContext);
  CHECK(driver.receipt(2).output_tokens == 0);
  CHECK(driver.reason(3) == EndReason::kLength);
}
