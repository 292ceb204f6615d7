// Decides what the model computes next: continuous batching under one token budget per step.
//
// Decode tokens are budgeted first; prefill chunks fill what is left, but only as far as keeps the
// step's expected time under a limit (step_time.h): while somebody decodes, for that one's sake,
// and otherwise for who may come meanwhile.
//
// The prompts of a step are one tenant's, of the one that was given least (fair_queue.h); others
// only fill it as far as a step has to be filled to be worth its fixed cost. Within a
// tenant half of the budget belongs to the oldest prompt, the rest goes to the shortest first, and
// what nobody wants returns to the oldest: a long prompt cannot hold up a short one, and short ones
// cannot starve it.
//
// Order. Tenants wait in the order of what they were given. Within a tenant a sequence's rank is
// its arrival time plus its priority times `aging_per_priority`, fixed at arrival: a request of
// lower urgency counts as having arrived later, so it waits longer but not forever, and a preempted
// sequence keeps its place.
//
// Admission. A waiting sequence is admitted when blocks for all its tokens can be reserved, one
// block stays free for every running sequence to grow into, and memory is expected to last: with
// outputs as long as they use to be (output_lengths.h) those that run and it will at no time hold
// more than there is, with a margin (memory_forecast.h) that grows while much is computed twice
// (recompute_governor.h). If nobody goes on it is admitted whatever is expected: nothing else would
// ever change that. One that does not fit, now or later, may be overtaken by `overtakes_max`
// others, then nobody passes it.
//
// Preemption. When a sequence needs a block and none is free, one behind it gives its blocks back
// and will be recomputed; if there is none behind it, it steps back itself. Which one is a matter
// of price (scheduler_victims.cc): the time that computing it again is expected to take, for each
// of its blocks that comes back and is of use. Of use are as many as those that decode are expected
// to take while each makes a block's tokens, less what comes back by itself meanwhile. Who is
// expected to be among the latter is spared if there is anybody else, and so are tenants that hold
// less than half of what the one in need holds: few lose no blocks to who has many. Of equals the
// newest goes.
//
// Or it waits: it sits out the step and keeps its blocks, where those who go on in this step are
// more likely than not to give some back within `wait_steps_max` steps, and so many tokens of its
// own are cheaper than computing a victim again. Nobody waits for who is paused, nor longer than
// that in a row, nor the first who decodes.
//
// Prices know what the sequence's own tenant shares: what others of it hold as well does not come
// back, and needs not be computed again. Between tenants they do not, nor what shared scopes have:
// there it is as if nothing had been cached or shared, so that nobody's loss tells what another
// has.
//
// After `preemptions_max` times a sequence returns only with everything reserved that it can ever
// need, and is no victim again. So there is no deadlock, whatever the prices are: whoever may not
// be preempted never needs a block, the first of the others may preempt all the rest one after the
// other, and any one sequence fits alone. The first never waits, so every step has somebody who
// goes on. There is no starvation either: each preemption uses up one of those that its victim puts
// up with, so there are at most `preemptions_max` for each sequence, and then it goes on to its
// end; and between two of its tokens a sequence waits for `wait_steps_max` steps at most. What is
// expected holds up nobody for ever: those that run end, and when none does the first is admitted.
//
// Samples. The samples of a request wait in the queue like other sequences, but only one of them
// while none has computed the prompt: the rest are held back (request.h). When the step that
// completes the prompt is planned, those held back begin in it at once, as far as there is room and
// nobody waits before them: they take the same logits and share all blocks. Who comes later, or
// comes back after a preemption, shares what it can and computes the rest.
//
// Reuse. A sequence begins with what the prefix index has of it (prefix_cache.h), and looks again
// before each chunk of its prompt. While another computes its very next block and completes it in
// this step, it waits for it: one step. Order and shares go by what a sequence would have to
// compute if nothing were cached, so that nobody's place tells what others have cached.
//
// Shares. Who waits for room in its own tenant's share, now or later, is passed by, and holds up
// nobody. Who has a guarantee waits for what its own sequences will need, not for others'; who fits
// into what is left of its tenant's guarantee passes everybody (both for as many tenants and
// requests as a step looks at). A tenant's sequences take no more
// blocks than its share, and never those that others have guaranteed (pool_shares.h); who needs one
// beyond its tenant's limit preempts only its tenant's, and nobody preempts a tenant that holds no
// more than its guarantee.
//
// Pausing. A paused sequence keeps its place and its blocks but is not planned. When somebody else
// needs a block it is the first victim, wherever it stands: who does not take tokens should not
// cost anybody else theirs.
//
// A plan costs O(tokens in it + sequences running), and as much again for each preemption, times
// the logarithm of a sequence's blocks; nothing grows with the pool or with history. A
// forecast is made in plans that could admit somebody, at so many points for each that runs.
// One thread at a time.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/fair_queue.h"
#include "core/memory_forecast.h"
#include "core/prefix_cache.h"
#include "core/recompute_governor.h"
#include "core/request.h"
#include "core/sequence.h"
#include "core/sequence_blocks.h"
#include "core/step_books.h"
#include "core/step_plan.h"
#include "core/step_report.h"
#include "core/step_time.h"
#include "core/types.h"

namespace kvledger {

struct SchedulerSettings {
  // Most tokens in one step; at least `sequences_max`, so that every running sequence can decode.
  std::int64_t token_budget = 0;
  // Most sequences running at once.
  std::int64_t sequences_max = 0;
  // What one level of priority is worth in waiting time.
  Nanoseconds aging_per_priority = 5'000'000'000;
  std::int64_t overtakes_max = 16;
  std::int64_t preemptions_max = 3;
  // Longest step while somebody decodes who has no limit of its own; 0 is no limit of this kind.
  Nanoseconds step_time_max = 0;
  // The same as a multiple of what decoding alone would take, in thousandths; 0 is no limit.
  std::int64_t step_stretch = 0;
  // Longest step in which nobody decodes, or only tenants that wait for more and were given more
  // than who is computed; 0 is no limit. Only as long as several tenants come (kOthersStay): short
  // steps are for whoever comes meanwhile, and cost a tenant that is alone.
  Nanoseconds prefill_time_max = 0;
  // Prompt tokens that a step takes even where they break the limit: prompts must not starve.
  std::int64_t prefill_least = 4;
  // Whether admission looks ahead; false is for comparison.
  bool forecast = true;
  // Whether victims are chosen by their price, and not the newest; false is for comparison.
  bool priced_victims = true;
  // Steps that a sequence waits for blocks before it takes somebody's; 0 is for comparison.
  std::int64_t wait_steps_max = 16;
};

// Tokens that one sequence computes in a step.
struct Chunk {
  Sequence* sequence = nullptr;
  std::int64_t tokens = 0;
  // Of a sample that begins at the end of its prompt: the tokens that another computed for it.
  std::int64_t of_source = 0;
};

class Scheduler {
 public:
  // `tokens_max` is the most tokens a sequence may reach; it fits in the pool alone.
  Scheduler(const SchedulerSettings& settings, std::int32_t slots_per_block,
            std::int64_t tokens_max, BlockPool& pool, BlockTables& tables, PrefixCache& cache);

  // Adds the samples of a new request to the queue. The scheduler keeps their addresses until
  // remove(). It takes the memory for all that can happen to them; nothing else here allocates.
  void enqueue(Request& request);

  // Fills `plan` with the next step and says in `report` who was admitted or preempted.
  void schedule(Nanoseconds now, StepPlan& plan, StepReport& report);

  // Takes a sequence out, waiting or running, of its request too, and gives its blocks back: at
  // once, or by way of `releasing` if an uncommitted step may still touch them.
  void remove(Sequence& sequence);

  // Learns that a sample has computed its request's prompt: the others need not wait any longer.
  void prompt_computed(Request& request) { arrange(request); }

  // Takes a sequence out of planning, or back into it; nothing if it is so already.
  void pause(Sequence& sequence);
  void resume(Sequence& sequence);

  // Books that the step of the last schedule() took `elapsed` until `now`; how long steps take is
  // learnt from those that were computed to their end.
  void observe(Nanoseconds elapsed, Nanoseconds now, bool is_whole) noexcept;
  // Learns that the step computed so many tokens of a sequence, some of them again.
  void count_work(std::int64_t computed, std::int64_t again) { governor_.count(computed, again); }

  // What all steps did, and how careful that has made it; any thread may read them.
  const StepBooks& books() const noexcept { return books_; }
  const RecomputeGovernor& governor() const noexcept { return governor_; }

  // The chunks of the last schedule(), in the order of its plan.
  const std::vector<Chunk>& chunks() const noexcept { return chunks_; }
  std::int64_t running() const noexcept { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t waiting() const noexcept {
    return static_cast<std::int64_t>(queue_.size()) + parked_;
  }

  // How long another tenant is expected again.
  static constexpr Nanoseconds kOthersStay = 60'000'000'000;
  // Prompt tokens that a step may always have; with fewer it is not worth its fixed cost.
  static constexpr std::int64_t kChunkLeast = 32;

  // Blocks that hold `tokens` tokens of a sequence.
  BlockCount blocks_for(std::int64_t tokens) const noexcept { return blocks_.blocks_for(tokens); }

 private:
  struct Candidate;

  // Waiting sequences looked at in one step. More would only help when this many in a row do not
  // fit, and would make a step's cost depend on the length of the queue.
  static constexpr std::size_t kLookahead = 8;
  // Sequences found to have no room in their tenant's share; in one step no more are looked for.
  static constexpr std::size_t kAtLimitMax = 128;

  // The phases of schedule(), in the order they run.
  std::int64_t choose_decode(Nanoseconds now, StepPlan& plan, StepReport& report);
  void collect_prefill(StepPlan& plan);
  void collect_guaranteed(std::int64_t rows);
  bool is_at_limit(TenantId tenant) const noexcept;
  BlockCount promised_to(TenantId tenant) const noexcept;
  BlockCount promised_to_all() const noexcept;
  void find_waiters();
  struct Forecast;
  bool lasts_in_pool(const Candidate& next);
  bool lasts_in_share(const Candidate& next);
  bool lasts(Forecast& forecast, const Candidate& next, BlockCount room, double deviations);
  void choose(const Candidate& waiting);
  void foresee(Forecast& forecast);
  bool is_in(const Forecast& forecast, TenantId tenant) const noexcept;
  MemoryMember member_of(const Sequence& sequence) const;
  MemoryMember member_of_running(const Sequence& running) const;
  MemoryMember member_of_waiting(const Candidate& waiting) const;
  void learn_length(const Sequence& ended);
  bool may_run(TenantId tenant) const noexcept;
  void note_tenants(Nanoseconds now) noexcept;
  std::int64_t prefill_room(std::int64_t budget, Nanoseconds now) const;
  Nanoseconds decode_limit() const noexcept;
  std::int64_t decode_room(std::int64_t budget, Nanoseconds longest) const;
  std::int64_t computed_by_first() const;
  bool decodes_are_protected() const;
  void note_oldest() noexcept;
  void note_work() noexcept;
  void count_service();
  void admit_chosen(Nanoseconds now, StepPlan& plan, StepReport& report);
  void emit(Nanoseconds now, StepPlan& plan, StepReport& report);
  struct Leader;
  void fork_samples(const Leader& leader, Nanoseconds now, StepPlan& plan, StepReport& report);
  bool may_fork(const Sequence& sample) const;
  void run(Sequence& sequence, Nanoseconds now, std::int64_t shared_tokens,
           std::int64_t reused_tokens, StepReport& report);

  void join_queue(Sequence& sequence);
  void leave_queue(Sequence& sequence);
  // Holds back the samples that wait for another to compute the prompt, and no others.
  void arrange(Request& request);
  // What came of a sequence that needs blocks.
  enum class Growth : std::uint8_t { kHasAll, kWaits, kNobodyBehind };
  Growth grow(std::size_t& index, std::int64_t tokens, Nanoseconds now, StepPlan& plan,
              StepReport& report);
  void collect_victims(std::size_t index);
  std::size_t choose_victim();
  bool should_wait(const Sequence& needy) const;
  bool would_help(const Sequence& victim, const Sequence& other) const;
  void list_blocks() noexcept;
  BlockCount listed_blocks(const Sequence& sequence) const;
  BlockCount staying_blocks(const Sequence& sequence) const;
  double chance_to_go_on(const Sequence& sequence, std::int64_t tokens) const;
  bool ends_soon(const Sequence& sequence) const;
  double wanted_blocks() const;
  double price(const Sequence& victim, BlockCount staying, double wanted) const;
  BlockCount room_for(TenantId tenant) const;
  void preempt(Sequence& victim, const Sequence& needy, Nanoseconds now, StepReport& report);
  StepBooks::Preempted note_reason(Sequence& victim, const Sequence& needy);
  void book_delays(Nanoseconds prefill, Nanoseconds now) noexcept;
  BlockCount blocks_to_admit(const Sequence& sequence, std::int64_t shared_tokens) const;
  bool is_protected(const Sequence& sequence) const noexcept;
  void leave_running(Sequence& sequence);

  // A sequence that may compute prompt tokens in this step.
  struct Candidate {
    Sequence* sequence = nullptr;
    // Another sample, and how many of its tokens it would begin with.
    const Sequence* source = nullptr;
    std::int64_t shared = 0;
    // What the prefix index has for it, and how many tokens these are.
    PrefixMatch match;
    std::int64_t reused = 0;
    // Blocks that it takes from what is available if it is admitted.
    BlockCount needed;
    std::int64_t tokens = 0;  // its share of the budget
    // Another candidate that is about to compute its next block.
    const Sequence* waits_for = nullptr;

    std::int64_t computed() const noexcept { return sequence->computed + shared + reused; }
    std::int64_t pending() const noexcept { return sequence->token_count() - computed(); }
    // What would be pending if nothing had been cached.
    std::int64_t listed() const noexcept { return pending() + reused + sequence->reused_now; }
  };
  using Candidates = std::span<Candidate>;

  void share_prefill_budget(std::int64_t budget);
  std::int64_t fill_of(Candidates one_tenants, std::int64_t tokens) const;
  static std::int64_t share_among(Candidates one_tenants, std::int64_t budget);
  std::int64_t give_waiters(Candidates one_tenants, std::int64_t budget);
  static bool is_shorter(const Candidate& a, const Candidate& b) noexcept;
  Candidate candidate(Sequence& waiting);
  bool is_candidate(const Sequence& sequence) const noexcept;
  bool begin(const Candidate& candidate, Nanoseconds now, StepPlan& plan, StepReport& report);
  bool completes_next_block(const Sequence& sequence) const noexcept;

  const SchedulerSettings settings_;
  // A sample whose prompt is complete with this step, and the plan's token at its end.
  struct Leader {
    const Sequence* sequence = nullptr;
    std::int32_t token = 0;
    std::int64_t tokens = 0;  // of its chunk
  };

  const std::int64_t slots_per_block_;
  BlockPool& pool_;
  BlockTables& tables_;
  PrefixCache& cache_;
  SequenceBlocks blocks_;

  FairQueue queue_;                  // of those that wait
  std::int64_t parked_ = 0;          // waiting, and paused or held back: in no list
  std::vector<Sequence*> running_;   // by rank
  std::int64_t paused_running_ = 0;  // of them

  // Used within one schedule(), kept to avoid allocation.
  std::vector<Candidate> candidates_;
  std::vector<Sequence*> passed_over_;
  std::vector<std::size_t> victims_;  // of the best kind, the newest first
  std::vector<Sequence*> at_limit_;   // that have no room in their own tenant's share
  std::vector<Chunk> chunks_;
  std::vector<Leader> leaders_;
  std::size_t decode_chunks_ = 0;
  const TenantLine* last_line_ = nullptr;      // of the tenant that was looked at last
  Nanoseconds others_until_ = 0;               // as long as several tenants are expected
  std::vector<const TenantLine*> backlogged_;  // tenants of candidates

  // What is expected of the pool, or of one tenant's sequences; made in a step when it is asked
  // for.
  struct Forecast {
    explicit Forecast(std::int64_t slots_per_block) : memory(slots_per_block) {}

    MemoryForecast memory;
    std::optional<TenantId> tenant;
    bool is_made = false;
    double held = 0.0;          // by those that ran already
    std::int64_t going_on = 0;  // sequences that are not paused
  };
  Forecast pool_forecast_;
  Forecast share_forecast_;
  RecomputeGovernor governor_;

  StepTimeModel step_time_;
  StepWork work_;  // of the last schedule()
  StepBooks books_;
  std::array<bool, StepBooks::kWaits> waited_{};  // for what somebody waits in this step
};

}  // namespace kvledger
