// The engine in the simplest form that can be right: what must be true of every sequence after
// every call, recomputed without lists, heaps or deltas of balances.
//
// The model does not schedule. It is told what the engine was asked and what it answered, works
// out what that means for each sequence, and throws a Violation where the answer breaks a rule:
//
//   plans       every planned token is the next of its sequence; budgets; decode first; half of
//               the rest for the oldest prompt, then the shortest; nothing idle that could run
//   blocks      a block stands in one table, as many as the tokens need, none before it is free
//   order       whose turn it is, who may preempt whom, who may pass whom and how often
//   samples     who waits for whom, who begins where another stands, what is shared and copied
//   books       every balance, every receipt and every tenant's statement, to the nanosecond
//
// Slow on purpose: each call costs O(sequences), and time is added up second by second.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/engine.h"
#include "core/memory_forecast.h"
#include "core/output_lengths.h"
#include "core/recompute_governor.h"
#include "core/step_time.h"
#include "tests/simulation/fake_runner.h"

namespace kvledger::simulation {

// One sequence.
struct Modelled {
  enum class Phase : std::uint8_t { kQueued, kPrefill, kDecode };

  bool running() const noexcept { return phase != Phase::kQueued; }
  std::int64_t token_count() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t pending() const noexcept { return token_count() - computed; }
  std::int64_t held() const noexcept { return static_cast<std::int64_t>(blocks.size()); }

  Arrival arrival;  // of its request
  std::uint64_t id = 0;
  std::int64_t rank = 0;
  std::int64_t prompt_count = 0;
  std::vector<Token> tokens;
  std::uint64_t digest = 0;  // of all tokens

  Phase phase = Phase::kQueued;
  std::int32_t row = -1;
  std::vector<std::int32_t> blocks;
  std::int64_t promised = 0;
  std::int64_t computed = 0;
  std::int64_t planned = 0;  // tokens in the uncommitted step
  std::int64_t waited_steps = 0;
  std::int64_t passed = 0;   // by others since it last ran
  std::int64_t sat_out = 0;  // steps in a row, because it needs a block

  bool ran = false;
  bool paused = false;

  // In the plan that is looked at.
  bool held_back = false;
  bool admitted = false;
  bool is_new = false;             // and never ran before
  bool forked = false;             // at the end of another sample's prompt
  std::int64_t begins_with = 0;    // blocks of another sample
  std::int64_t taken_at_once = 0;  // blocks reserved for it

  Receipt receipt;  // filled in as things happen
  std::int64_t computed_peak = 0;
};

// What the samples of a request have in common.
struct ModelledRequest {
  Arrival arrival;
  std::int64_t live = 0;
  bool in_step = false;
  Receipt receipt;  // of samples that have ended
  BlockNanoseconds held_time = 0;
  BlockNanoseconds promised_time = 0;
  // The peak is one of these: the order of events inside a plan is not known.
  std::int64_t peak_least = 0;
  std::int64_t peak_most = 0;
};

struct ModelCounts {
  std::int64_t computed = 0;
  std::int64_t recomputed = 0;
  std::int64_t preemptions = 0;
  std::int64_t preemptions_max = 0;  // of one sequence
  std::int64_t chunks = 0;           // parts of a prompt that did not finish it
  std::int64_t forks = 0;            // samples that began at the end of another's prompt
  std::int64_t late_forks = 0;       // samples that began in the blocks of one that ran
  std::int64_t copies = 0;           // of blocks
  std::int64_t ends[6] = {};         // by EndReason
  std::int64_t passes_max = 0;
  std::int64_t held_for_memory = 0;  // waited because memory would not have lasted
  std::int64_t wait_steps_max = 0;
  std::int64_t sat_out = 0;  // steps of running sequences that waited for a block
};

// How far into the queue the scheduler looks in one step.
inline constexpr std::int64_t kLookahead = 8;

// After so many steps of both kinds the scheduler looks at decoding alone.
inline constexpr std::int64_t kDecodeNews = 64;

class Model {
 public:
  Model(const EngineSettings& settings, const Text& text, Nanoseconds now);

  void accept(const Arrival& arrival, std::span<const Token> prompt, bool accepted,
              const StepReport& report);
  void plan(const StepPlanView& plan, const StepReport& report, Nanoseconds now);
  // `given[i]` are the tokens handed in for the i-th wanted logits.
  void commit(const std::vector<std::vector<Token>>& given, const StepReport& report,
              Nanoseconds now);
  void abandon(const StepReport& report, Nanoseconds now);
  void end(std::span<const std::uint64_t> ids, EndReason reason, const StepReport& report,
           Nanoseconds now);

  void pause(std::span<const std::uint64_t> ids, bool paused, Nanoseconds now);

  // Compares every balance and statement; call it when the reports of all calls were handed in.
  void check_books(const Engine& engine) const;

  const std::map<std::uint64_t, Modelled>& live() const noexcept { return live_; }
  const ModelCounts& counts() const noexcept { return counts_; }
  // Most steps it can take until everything live has ended, if nothing new comes: each step
  // computes at least one token.
  std::int64_t steps_to_end() const;

 private:
  struct Planned {
    std::uint64_t id = 0;
    bool wants_logits = false;
  };
  // Whom a preempted sequence's row belonged to until then.
  struct Former {
    std::uint64_t id = 0;
    std::int32_t row = 0;
    std::int64_t held = 0;
    std::vector<std::int32_t> blocks;
  };

  // model.cc: life, time and books.
  void pass_time(Nanoseconds now);
  std::int64_t blocks_for(std::int64_t tokens) const;
  std::int64_t blocks_to_admit(const Modelled& sequence, std::int64_t shared) const;
  // Blocks in the tables of a request, each once.
  std::int64_t held_by(std::uint64_t request) const;
  std::vector<const Modelled*> samples_of(std::uint64_t request) const;
  // How many tables a block stands in; `before` leaves out samples that begin at the end of the
  // prompt that is being written.
  std::int64_t tables_with(std::int32_t block, bool before = false) const;
  std::int64_t last_token(const Modelled& sequence) const;
  bool is_protected(const Modelled& sequence) const;
  // Whether `a` goes before `b`.
  static bool before(const Modelled& a, const Modelled& b) noexcept;
  std::int64_t free_blocks() const;
  std::int64_t running() const;
  Modelled& find(std::uint64_t id);
  // The reason for which the sequence ends with its last token, or 0.
  std::int32_t end_reason(const Modelled& sequence) const;
  void take_tokens(std::uint64_t id, std::span<const Token> tokens, const StepReport& report);
  void finish(std::uint64_t id, EndReason reason, const StepReport& report);
  void finish_one(std::uint64_t id, EndReason reason, const StepReport& report);
  void close(std::uint64_t request, const Modelled& last, const StepReport& report);
  void begin_report() noexcept;
  void end_step();
  void end_report(const StepReport& report) const;
  void check_tables(const Engine& engine) const;

  // model_order.cc: whose turn it is.
  void lift(bool of_plan = false);
  void count_service();
  std::vector<Modelled*> queue();
  bool has_several_tenants(std::span<Modelled* const> queue) const;
  void check_order(const StepPlanView& plan, const StepReport& report);
  void check_all_who_fit(std::span<Modelled* const> queue, std::int64_t room, std::int64_t rows);

  // model_forecast.cc: whether memory is expected to last; by the same arithmetic, which has tests
  // of its own, of what the model knows of each sequence.
  MemoryMember member_of(const Modelled& sequence);
  MemoryMember member_of_running(const Modelled& running);
  // Of those that ran when admissions were looked at.
  struct Foreseen {
    double held = 0.0;
    std::int64_t running = 0;
    std::int64_t going_on = 0;
  };
  Foreseen foresee(MemoryForecast& forecast);
  void learn_length(const Modelled& ended, EndReason reason);
  bool has_backlog(TenantId tenant) const;
  void check_prefill_room(const StepPlanView& plan) const;
  void check_prefill_shares(std::int64_t budget) const;
  std::int64_t check_shares_of(std::span<const Modelled* const> one_tenants,
                               std::int64_t budget) const;

  // model_victims.cc: decode tokens are chosen once more, one block after the other, to see who has
  // to give some.
  struct Standing {
    Modelled* sequence = nullptr;
    std::vector<std::int32_t> blocks;
    std::int64_t promised = 0;

    double listed() const noexcept {
      return static_cast<double>(blocks.size()) + static_cast<double>(promised);
    }
  };
  using Standings = std::vector<Standing>;
  void foretell_decodes(const StepPlanView& plan, const StepReport& report);
  bool sits_out(const Modelled& sequence, const StepPlanView& plan, const StepReport& report) const;
  bool should_wait(const Standings& all, std::size_t needy,
                   std::span<const Modelled* const> chosen);
  Standings standings();
  std::int64_t missing(const Standings& all, const Standing& one, std::int64_t tokens) const;
  void take_block(const Standings& all, Standing& one) const;
  void check_victim(const Standings& all, std::size_t needy, const Modelled& victim);
  std::array<int, 3> kind_of(const Standings& all, const Standing& one, const Standing& needy);
  double price_of(const Standing& one, std::int64_t kept_blocks, double wanted) const;
  double wanted_blocks(const Standings& all);
  double chance_to_go_on(const Modelled& sequence, std::int64_t tokens);

  // model_plan.cc: the rules of a plan, in the order in which they are looked at.
  void check_preemption_was_needed(const StepReport& report) const;
  void preempt(const StepReport& report);
  void note_held_back();
  const Modelled* source_of(const Modelled& sequence) const;
  std::int64_t shareable(const Modelled& sequence) const;
  void admit(const StepReport& report);
  void follow_deltas(const StepPlanView& plan);
  void follow_delta(Modelled& owner, std::int32_t index, std::int32_t block,
                    const StepPlanView& plan, std::size_t& copies);
  void check_forks(const StepPlanView& plan, std::size_t logits);
  bool may_fork(const Modelled& sample, std::int64_t running) const;
  void check_blocks() const;
  void follow_sequences(const StepPlanView& plan);
  void follow_sequence(const StepPlanView& plan, std::size_t index, std::size_t& logits);
  void check_decode_shares(const StepPlanView& plan, const StepReport& report) const;

  const EngineSettings settings_;
  const Text text_;
  const std::int64_t tokens_max_;
  Nanoseconds now_;
  std::map<std::uint64_t, Modelled> live_;
  std::map<std::uint64_t, ModelledRequest> requests_;  // by the id of the first sample
  std::vector<Planned> step_;
  std::vector<Modelled*> by_row_;  // running ones, while a plan is looked at
  std::vector<Former> former_;
  std::map<std::uint64_t, std::int64_t> held_before_;  // by request
  std::int64_t releasing_ = 0;
  // What each tenant was given, and the time that the least of those who wait have reached.
  std::map<std::uint32_t, std::int64_t> service_;
  std::int64_t service_time_ = 0;
  // Steps with prompts beside decoding since the last one without; none yet counts as many.
  std::int64_t since_decode_ = kDecodeNews;
  std::int64_t step_decodes_ = 0;  // tokens of the uncommitted step
  std::int64_t step_prefills_ = 0;
  OutputLengths everybody_;
  std::map<std::uint32_t, OutputLengths> lengths_;  // by tenant
  RecomputeGovernor governor_;
  // How long steps take, by the same arithmetic, of what the model knows of each.
  StepTimeModel step_time_;
  StepWork step_work_;
  Nanoseconds planned_at_ = 0;
  std::map<std::uint32_t, BlockNanoseconds> closed_time_;  // by tenant
  ModelCounts counts_;
  // How much of the report was explained.
  std::size_t tokens_explained_ = 0;
  std::size_t receipts_explained_ = 0;
};

}  // namespace kvledger::simulation
