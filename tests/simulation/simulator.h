// Drives the real engine with everything that can happen to it, in every order, from one seed, and
// lets the model look at each answer.
//
// Each seed belongs to an arm that leans towards one kind of trouble: pools far too small, prompts
// far too long, cancels in every place, steps that fail. After the steps asked for, arrivals and
// cancels stop and everything that is left must end within the steps that the model allows.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/engine.h"
#include "tests/simulation/fake_runner.h"
#include "tests/simulation/model.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

enum class Arm : std::uint8_t {
  kMixed,
  kThrash,       // many long outputs for a few blocks: must preempt
  kChunks,       // prompts of many times the token budget: must chunk
  kCancels,      // before the prompt is computed, in a step, after it: must cancel in a step
  kAdmission,    // prompts of about the whole pool, or more
  kEdges,        // all sequences cross a block edge in the same step
  kSpeculation,  // several tokens per commit
  kFailures,     // abandoned steps and unusable logits: must abandon
  kNearEnd,      // the pool and the context end where the outputs do
  kSamples,      // several samples of a prompt: must begin together, later, and copy on writing
};

inline constexpr std::int64_t kArms = 10;
const char* name(Arm arm) noexcept;

// What a seed is made of; drawn from it.
struct Case {
  EngineSettings engine;
  Text text;
  Nanoseconds started_at = 0;
  Nanoseconds tick_max = 0;
  std::int64_t live_max = 0;  // sequences at once
  std::int64_t prompt_min = 1;
  std::int64_t prompt_max = 1;
  std::int64_t output_max = 1;
  std::int64_t tokens_per_commit_max = 1;
  std::int64_t priority_max = 0;
  std::int64_t tenants = 1;
  std::int64_t samples_max = 1;
  // Chances in a thousand, each step.
  std::int64_t arrival = 0;
  std::int64_t cancel = 0;
  std::int64_t cancel_in_step = 0;
  std::int64_t abandon = 0;
  std::int64_t unusable_logits = 0;
  std::int64_t clock_back = 0;
  std::int64_t ignore_end_of_text = 0;
  std::int64_t pause = 0;          // somebody, and all paused ones go on with the same chance
  std::int64_t output_unset = 0;   // an output limit that never bites
  std::int64_t own_step_time = 0;  // arrivals with a target of their own
};

Arm arm_of(std::uint64_t seed) noexcept;
Case draw_case(Random& random, Arm arm);

// What happened in a run; adds up over runs.
struct Outcome {
  std::int64_t steps = 0;
  std::int64_t accepted = 0;
  std::int64_t refused = 0;
  std::int64_t cancelled_waiting = 0;
  std::int64_t cancelled_in_prefill = 0;  // running, its prompt not computed yet
  std::int64_t cancelled_in_step = 0;
  std::int64_t abandoned = 0;
  std::int64_t paused = 0;
  std::int64_t commits_of_many = 0;
  ModelCounts counts;
  // Of everything the engine handed out: equal for equal runs.
  std::uint64_t digest = 0;

  void add(const Outcome& other);
};

class Simulator {
 public:
  explicit Simulator(std::uint64_t seed);

  // Runs `steps` steps and then until everything has ended; throws a Violation.
  Outcome run(std::int64_t steps);
  // Runs `steps` steps and plans one more, which stays uncommitted.
  void run_and_leave(std::int64_t steps);

  std::int64_t step() const noexcept { return outcome_.steps; }
  const Case& drawn() const noexcept { return case_; }

 private:
  void one_step(bool quiet);
  void arrive();
  void cancel(bool in_step);
  void pause();
  void resume_all();
  std::uint64_t choose_victim();
  void run_step(const StepPlan& plan, bool quiet);
  std::vector<Token> make_tokens(FakeRunner::Wanted wanted, bool quiet);
  Nanoseconds tick();
  void digest(std::uint64_t value) noexcept { outcome_.digest = mix(outcome_.digest ^ value); }
  const StepReport& take_report();

  Random random_;
  const Arm arm_;
  const Case case_;
  Nanoseconds clock_;
  Engine engine_;
  Model model_;
  FakeRunner runner_;
  Outcome outcome_;
  std::uint64_t last_id_ = 0;
};

}  // namespace kvledger::simulation
