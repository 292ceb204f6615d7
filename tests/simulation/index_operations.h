// Drives the prefix cache, the block pool and the ledger as the scheduler and the engine do, with
// operations drawn from a seed, beside a model that says beforehand what each of them will do.
//
// Requests of three tenants, a group of two of them and a public scope share a pool of a few
// blocks, so that room has to be made all the time. After every operation the model's answer is
// compared: what was found, and in whose scope, which blocks went and in which order, which block
// was taken, all balances, what everybody holds and has paid for, to the nanosecond.
//
// With evictions by age the model says which block goes; with the default policy it hears which one
// went, and says whether it might.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/ledger.h"
#include "core/prefix_cache.h"
#include "core/sequence.h"
#include "core/sequence_blocks.h"
#include "core/step_plan.h"
#include "tests/simulation/random.h"
#include "tests/simulation/reader_model.h"

namespace kvledger::simulation {

enum class EvictionOrder : std::uint8_t { kByAge, kDefault };

// What happened, so that a run that tried nothing is noticed.
struct IndexOutcome {
  std::int64_t operations = 0;
  std::int64_t requests = 0;
  std::int64_t found_own = 0;     // tokens
  std::int64_t found_shared = 0;  // tokens
  std::int64_t tails = 0;
  std::int64_t caught_up = 0;
  std::int64_t evicted = 0;
  std::int64_t refused = 0;
  std::int64_t preempted = 0;
  std::int64_t forked = 0;
  std::int64_t split = 0;  // requests that paid for a part of a block
  std::int64_t stayed = 0;
  std::int64_t purged = 0;  // blocks
  std::int64_t shares = 0;

  void add(const IndexOutcome& other);
};

class IndexOperations {
 public:
  IndexOperations(std::uint64_t seed, EvictionOrder order);

  // Throws a Violation that names the operation.
  IndexOutcome run(std::int64_t operations);

 private:
  using Tokens = std::vector<Token>;
  // What policies were told, by the slots of nodes.
  struct Heard {
    std::vector<CacheSlot> entered;
    std::vector<CacheSlot> evicted;
  };
  struct Live {
    std::unique_ptr<Sequence> sequence;
    bool planned = false;    // it is in the step
    std::int64_t chunk = 0;  // tokens there
  };
  class HeardPolicy;

  static constexpr std::int64_t kRows = 8;
  static constexpr std::uint32_t kTenants = 3;
  static constexpr std::uint32_t kGroup = 0x80000001;   // tenants 1 and 2
  static constexpr std::uint32_t kPublic = 0x80000002;  // everybody reads it
  static constexpr ScopeId own_scope(std::uint32_t tenant, std::uint32_t space) {
    return ScopeId{10 * tenant + space};
  }
  struct World {
    std::int64_t blocks;
    std::int32_t slots;
  };

  PrefixCacheSettings settings(std::uint64_t seed, EvictionOrder order);
  void one();
  void one_between_steps();
  void of_one(Live& live, std::int64_t drawn);
  void one_in_step();
  void tick();

  void arrive();
  void accept(const Arrival& arrival, const Tokens& prompt);
  Arrival draw_arrival(const Sequence* other);
  Tokens draw_prompt(const Sequence* other, Arrival& arrival);
  void look(Live& live);
  void admit(Live& live);
  void begin(Live& live);
  void fork(const Sequence& source, Live& live);
  void follow(const Sequence& leader, Live& live);
  void compute(Live& live);
  void plan(Live& live, std::int64_t tokens);
  void catch_up(Live& live);
  void preempt(Live& live);
  void purge();
  void draw_shares();
  void open_step();
  void commit();
  void commit(Live& live, std::int64_t tokens);
  void exchange();
  void end(std::uint64_t id, bool as_planned);
  void end_request(std::uint64_t id);
  void end_all();
  PrefixMatch match(Sequence& waiting);

  // Tells the model which blocks went.
  void hear();
  ReaderModel::Reader& reader(const Sequence& sequence);
  Live* any(bool running);
  void check();
  void check_blocks() const;
  void check_owners() const;
  void check_readers();
  void check_statement(const Sequence& ended, std::uint64_t request);
  void audit() const;

  Random random_;
  const World world_;
  Heard heard_;
  Ledger ledger_;
  BlockPool pool_;
  BlockTables tables_;
  PrefixCache cache_;
  SequenceBlocks blocks_;
  StepPlan plan_;
  ReaderModel model_;
  Nanoseconds clock_ = 0;
  bool step_is_open_ = false;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Live> live_;
  std::unique_ptr<Sequence> ended_;              // the last one
  std::vector<std::uint64_t> step_;              // who is in it, in order
  std::map<CacheSlot, std::uint32_t> block_at_;  // of filled nodes, by slot
  std::map<std::uint64_t, PrefixNode> nodes_;    // by the model's id
  std::vector<Tokens> texts_;                    // that prompts begin with
  std::vector<PoolShare> shares_;
  const char* doing_ = "";
  IndexOutcome outcome_;
};

}  // namespace kvledger::simulation
