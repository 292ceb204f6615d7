#include <algorithm>

#include "tests/simulation/simulator.h"

namespace kvledger::simulation {
namespace {

// Pools of 4 to 64 blocks of 4 to 64 slots, and a load that they cannot always carry.
Case draw_mixed(Random& random) {
  Case drawn;
  EngineSettings& engine = drawn.engine;
  engine.blocks = BlockCount{random.between(4, random.chance(500) ? 16 : 64)};
  engine.slots_per_block = 1 << random.between(2, random.chance(700) ? 4 : 6);
  const std::int64_t slots = engine.blocks.value() * engine.slots_per_block;
  engine.context_tokens = std::max<std::int64_t>(2, random.between(slots / 4, 2 * slots));
  engine.end_of_text = {1, 2};
  SchedulerSettings& scheduler = engine.scheduler;
  scheduler.sequences_max = random.between(1, 12);
  scheduler.token_budget = scheduler.sequences_max + random.between(0, 64);
  scheduler.aging_per_priority = random.between(0, 5'000'000'000);
  scheduler.overtakes_max = random.between(0, 16);
  scheduler.step_time_max = random.chance(300) ? random.between(1, 100'000'000) : 0;
  scheduler.step_stretch = random.chance(300) ? random.between(1, 5000) : 0;
  scheduler.prefill_time_max = random.chance(500) ? random.between(1, 100'000'000) : 0;
  scheduler.prefill_least = random.between(1, 20);
  scheduler.forecast = random.chance(600);
  scheduler.wait_steps_max = random.chance(500) ? random.between(1, 4) : random.between(0, 16);
  drawn.text.seed = random.next();
  drawn.text.vocabulary = static_cast<Token>(random.between(3, 300));
  drawn.started_at = random.between(-1'000'000'000'000, 1'000'000'000'000);
  // Some clocks tick in days, so that block-time needs more than 64 bits.
  drawn.tick_max = random.chance(200) ? 100'000'000'000'000 : random.between(0, 50'000'000);
  drawn.live_max = random.between(2, 24);
  drawn.prompt_max = std::max<std::int64_t>(1, random.between(1, slots / 2));
  drawn.output_max = random.between(1, 2 * slots);
  drawn.priority_max = random.chance(500) ? random.between(0, kPriorityMax) : 0;
  drawn.tenants = random.between(1, 4);
  drawn.samples_max = random.chance(300) ? random.between(2, 6) : 1;
  drawn.arrival = random.between(20, 900);
  drawn.cancel = random.between(0, 60);
  drawn.cancel_in_step = random.between(0, 60);
  drawn.abandon = random.chance(300) ? 5 : 0;
  drawn.unusable_logits = random.chance(300) ? 5 : 0;
  drawn.clock_back = random.chance(500) ? random.between(1, 30) : 0;
  drawn.ignore_end_of_text = random.between(0, 1000);
  drawn.pause = random.chance(500) ? random.between(1, 200) : 0;
  drawn.output_unset = random.between(0, 100);
  drawn.own_step_time = random.chance(300) ? random.between(1, 1000) : 0;
  drawn.tokens_per_commit_max = random.chance(150) ? 4 : 1;
  return drawn;
}

void lean_towards_thrash(Random& random, Case& drawn) {
  drawn.engine.blocks = BlockCount{random.between(4, 12)};
  drawn.engine.slots_per_block = 4;
  const std::int64_t slots = drawn.engine.blocks.value() * 4;
  drawn.engine.context_tokens = 2 * slots;
  drawn.engine.scheduler.sequences_max = random.between(4, 12);
  drawn.engine.scheduler.token_budget = drawn.engine.scheduler.sequences_max + slots;
  drawn.engine.scheduler.forecast = random.chance(400);
  drawn.prompt_max = std::max<std::int64_t>(1, slots / 4);
  drawn.output_max = slots;
  drawn.live_max = 12;
  drawn.arrival = 900;
  drawn.cancel = random.between(0, 10);
  drawn.cancel_in_step = drawn.cancel;
  drawn.ignore_end_of_text = 1000;
}

void lean_towards_chunks(Random& random, Case& drawn) {
  SchedulerSettings& scheduler = drawn.engine.scheduler;
  scheduler.token_budget = scheduler.sequences_max + random.between(0, 4);
  const std::int64_t slots = drawn.engine.blocks.value() * drawn.engine.slots_per_block;
  drawn.engine.context_tokens = 2 * slots;
  drawn.prompt_max = std::max<std::int64_t>(random.between(slots / 2, slots), 8);
  drawn.output_max = random.between(1, 20);
}

}  // namespace

Case draw_case(Random& random, Arm arm) {
  Case drawn = draw_mixed(random);
  const std::int64_t slots = drawn.engine.blocks.value() * drawn.engine.slots_per_block;
  switch (arm) {
    case Arm::kMixed:
      break;
    case Arm::kThrash:
      lean_towards_thrash(random, drawn);
      break;
    case Arm::kChunks:
      lean_towards_chunks(random, drawn);
      break;
    case Arm::kCancels:
      drawn.cancel = 300;
      drawn.cancel_in_step = 400;
      drawn.arrival = 900;
      break;
    case Arm::kAdmission:
      drawn.engine.context_tokens = 2 * slots;
      drawn.prompt_max = slots + slots / 8 + 1;
      drawn.live_max = 16;
      drawn.arrival = 500;
      break;
    case Arm::kEdges:
      drawn.prompt_min = drawn.engine.slots_per_block - 1;
      drawn.prompt_max = drawn.prompt_min;
      drawn.engine.context_tokens = 2 * slots;
      drawn.output_max = slots;
      drawn.arrival = 0;
      drawn.ignore_end_of_text = 1000;
      break;
    case Arm::kSpeculation:
      drawn.tokens_per_commit_max = 2 * drawn.engine.slots_per_block + 1;
      break;
    case Arm::kFailures:
      drawn.abandon = random.between(5, 100);
      drawn.unusable_logits = random.between(5, 50);
      break;
    case Arm::kSamples:
      drawn.samples_max = random.between(2, kSamplesMax);
      drawn.live_max = 24;
      drawn.arrival = 500;
      break;
    case Arm::kNearEnd:
      drawn.engine.context_tokens = slots + random.between(-2, 2);
      drawn.prompt_max = slots + 2;
      drawn.ignore_end_of_text = 900;
      drawn.output_unset = 500;
      break;
  }
  return drawn;
}

}  // namespace kvledger::simulation
