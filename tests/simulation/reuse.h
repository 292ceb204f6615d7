// Drives the real engine with requests that share beginnings, within and between tenants, and looks
// at whose blocks each of them reads and at what these hold.
//
// What a slot holds is a digest of all tokens up to it, so a block means the same whoever computed
// it, and any block that is not what a sequence's tokens say is seen at once. Beside that:
//
//   isolation  a table names only blocks of the sequence's tenant, and below its border of the
//              shared scope it named; what was reused was computed in the same scope, ever
//   reuse      what a running sequence of the same scopes has computed is not computed again
//   purge      what was computed in a scope before it was purged is not found in it afterwards
//   shares      nobody takes more than its share, nor what another has guaranteed
//   books      every audit; receipts add up to the tenants' block-time, to the nanosecond

//
// Harsh runs have pools of a few blocks, many samples, outputs as long as the pool, priorities, and
// shares that change at any time; as those then only drain, they are not looked at there.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "core/engine.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

struct ReuseOutcome {
  std::int64_t steps = 0;
  std::int64_t requests = 0;
  std::int64_t computed = 0;
  std::int64_t reused_own = 0;
  std::int64_t reused_shared = 0;
  std::int64_t tails = 0;      // admissions that began within a block
  std::int64_t caught_up = 0;  // tokens that others computed while the sequence ran
  std::int64_t preemptions = 0;
  std::int64_t purges = 0;
  std::int64_t purged_in_use = 0;  // purges while a sequence of the scope ran
  std::int64_t at_limit = 0;       // steps in which a tenant had all that its share lets it have
  std::uint64_t evicted = 0;

  void add(const ReuseOutcome& other);
};

class ReuseSimulator {
 public:
  explicit ReuseSimulator(std::uint64_t seed, bool harsh = false);

  // Runs `steps` steps and then until everything has ended; throws a Violation.
  ReuseOutcome run(std::int64_t steps);

 private:
  struct Live {
    Arrival arrival;
    std::vector<Token> tokens;
    std::int64_t prompt = 0;
    std::int32_t row = -1;  // of a running one
    std::int64_t computed = 0;
    std::int64_t reused = 0;   // as admissions said
    std::int64_t planned = 0;  // tokens in the step
    bool purged = false;       // its scopes were, since it was admitted
    PrefixScopes named;        // as it came; the arrival loses what was purged
  };
  using Tokens = std::vector<Token>;

  void arrive();
  Arrival draw_arrival();
  Tokens draw_prompt(const Arrival& arrival);
  void disturb();
  void purge();
  void draw_shares();
  void check_shares() const;
  void one_step();
  void follow(const StepPlanView& plan);
  void admit(const Admission& admission);
  void compute(const StepPlanView& plan);
  void check_table(const Live& live, std::int64_t blocks) const;
  void check_context(const Live& live) const;
  void commit(const StepPlanView& plan);
  void remember(const Live& live, std::int64_t computed);
  void take_report();
  void bill(const StepReport& report);
  void check_reuse(const Live& live, std::int64_t found) const;
  std::int64_t alike(const Tokens& a, const Tokens& b) const;
  ScopeId scope_at(const Arrival& arrival, std::int64_t block) const;
  std::uint64_t digest(const Tokens& tokens, std::int64_t count) const;
  void audit() const;
  void check_end();
  Nanoseconds tick();

  const bool harsh_;
  Random random_;
  EngineSettings settings_;
  Nanoseconds clock_ = 0;
  Engine engine_;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Live> live_;
  std::map<std::int32_t, std::uint64_t> rows_;
  std::vector<std::uint64_t> slots_;  // digests, by block and slot
  // Whatever was computed in a scope since it was purged last, block by block: digests of all
  // tokens up to a block's end.
  std::map<std::uint32_t, std::set<std::uint64_t>> computed_;
  std::map<std::uint32_t, BlockNanoseconds> billed_;  // by tenant
  std::vector<std::vector<Tokens>> texts_;            // that prompts begin with, by tenant
  std::vector<PoolShare> shares_;
  bool quiet_ = false;
  ReuseOutcome outcome_;
};

}  // namespace kvledger::simulation
