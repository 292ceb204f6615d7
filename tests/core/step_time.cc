#include "core/step_time.h"

#include <cmath>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr Nanoseconds kMicrosecond = 1000;
constexpr Nanoseconds kMillisecond = 1'000'000;

// A machine whose steps take exactly what the model assumes.
struct Machine {
  Nanoseconds step = 2 * kMillisecond;
  Nanoseconds decode_token = 500 * kMicrosecond;
  Nanoseconds prefill_token = kMillisecond;
  Nanoseconds thousand_keys = 100 * kMicrosecond;

  Nanoseconds time(const StepWork& work) const {
    return step + work.decode_tokens * decode_token + work.prefill_tokens * prefill_token +
           (work.decode_keys + work.prefill_keys) * thousand_keys / 1000;
  }
};

StepWork decoding(std::int64_t tokens, std::int64_t context) {
  return StepWork{tokens, tokens * context, 0, 0};
}

StepWork with_prompt(StepWork work, std::int64_t computed, std::int64_t tokens) {
  work.prefill_tokens = tokens;
  work.prefill_keys = keys_of_chunk(computed, tokens);
  return work;
}

// What a server sees: some decoding, then prompts of growing position beside it.
void teach(StepTimeModel& model, const Machine& machine) {
  for (int i = 0; i < 200; ++i) {
    const StepWork work = decoding(1 + i % 16, 100 + 37 * (i % 23));
    model.observe(work, machine.time(work));
  }
  for (int i = 0; i < 100; ++i) {
    const StepWork work =
        with_prompt(decoding(1 + i % 16, 300), 64 * std::int64_t{i}, 8 + 8 * (i % 9));
    model.observe(work, machine.time(work));
  }
}

bool within(Nanoseconds value, Nanoseconds expected, double share) {
  return std::abs(static_cast<double>(value - expected)) <= share * static_cast<double>(expected);
}

}  // namespace

TEST_CASE("the time of decoding is learnt") {
  // If this fails, steps are limited to something that has nothing to do with this machine.
  StepTimeModel model;
  CHECK(model.decode_time(8, 8000) == 0);
  const Machine machine;
  teach(model, machine);
  for (const std::int64_t tokens : {1, 4, 16, 32}) {
    for (const std::int64_t context : {100, 1000, 4000}) {
      const StepWork work = decoding(tokens, context);
      CHECK(
          within(model.decode_time(work.decode_tokens, work.decode_keys), machine.time(work), 0.1));
    }
  }
}

TEST_CASE("decoding alone is asked for before it is known, and again when that was long ago") {
  // If this fails, a server that is never without prompts takes them a few tokens at a time, for it
  // never learns what it may compare with; or limits its steps by what was true an hour ago.
  StepTimeModel model;
  const Machine machine;
  CHECK(model.needs_decode());
  const StepWork both = with_prompt(decoding(4, 100), 0, 16);
  model.observe(with_prompt(StepWork{}, 0, 16), machine.time(both));
  model.observe(both, machine.time(both));
  CHECK(model.needs_decode());
  model.observe(decoding(4, 100), machine.time(decoding(4, 100)));
  for (int i = 0; i < 64; ++i) {
    CHECK_FALSE(model.needs_decode());
    model.observe(with_prompt(StepWork{}, 0, 16), machine.time(both));  // says nothing about it
    model.observe(both, machine.time(both));
  }
  CHECK(model.needs_decode());
}

TEST_CASE("the chosen chunk fills the room and does not break it") {
  // If this fails, streams stutter behind prompts, or prompts wait although there is time.
  StepTimeModel model;
  const Machine machine;
  teach(model, machine);
  for (const std::int64_t computed : {0, 500, 4000}) {
    for (const Nanoseconds room : {10 * kMillisecond, 40 * kMillisecond, 90 * kMillisecond}) {
      const std::int64_t chosen = model.prefill_within(room, computed, 4096);
      const StepWork work = with_prompt(StepWork{}, computed, chosen);
      CHECK(within(machine.time(work) - machine.step, room, 0.15));
    }
  }
}

TEST_CASE("a chunk grows only from what was seen") {
  // If this fails, the first prompt that meets running streams stops them for as long as it likes.
  StepTimeModel model;
  CHECK(model.prefill_within(1000 * kMillisecond, 0, 4096) == 32);
  const Machine machine;
  std::int64_t chunk = 32;
  for (int i = 0; i < 5; ++i) {
    const StepWork work = with_prompt(StepWork{}, 0, chunk);
    model.observe(work, machine.time(work));
    const std::int64_t next = model.prefill_within(1'000'000 * kMillisecond, 0, 4096);
    CHECK(next == 2 * chunk);
    chunk = next;
  }
  CHECK(model.prefill_within(1'000'000 * kMillisecond, 0, 100) == 100);
}

TEST_CASE("without room there is no chunk") {
  // If this fails, a limit that decoding alone breaks is broken further.
  StepTimeModel model;
  teach(model, Machine{});
  CHECK(model.prefill_within(0, 0, 4096) == 0);
  CHECK(model.prefill_within(-kMillisecond, 0, 4096) == 0);
}

TEST_CASE("an interruption is forgotten, a slower machine is noticed") {
  // If this fails, one hiccup shrinks prompts for minutes, or a busy machine breaks every target.
  StepTimeModel model;
  Machine machine;
  teach(model, machine);
  const StepWork work = decoding(8, 500);
  const Nanoseconds before = model.decode_time(work.decode_tokens, work.decode_keys);
  model.observe(work, 100 * machine.time(work));
  for (int i = 0; i < 50; ++i) {
    model.observe(work, machine.time(work));
  }
  CHECK(within(model.decode_time(work.decode_tokens, work.decode_keys), before, 0.1));
  for (int i = 0; i < 100; ++i) {
    model.observe(work, 3 * machine.time(work));
  }
  CHECK(within(model.decode_time(work.decode_tokens, work.decode_keys), 3 * before, 0.15));
}

TEST_CASE("a slowing machine is not blamed on contexts that are still short") {
  // If this fails, steps are expected to take ever longer while contexts grow, and prompts may
  // stretch them by as much: streams stutter more with each token.
  StepTimeModel model;
  Machine machine;
  machine.thousand_keys = 0;
  std::int64_t context = 64;
  for (int i = 0; i < 45; ++i, ++context) {
    const StepWork work = decoding(8, context);
    model.observe(work, machine.time(work) * (100 + i) / 100);
  }
  const Nanoseconds now = machine.time(decoding(8, context)) * 144 / 100;
  CHECK(model.decode_time(8, 8 * (context + 250)) <= now * 11 / 10);
}

TEST_CASE("a prompt that costs more than expected gets smaller chunks within a few steps") {
  // If this fails, a long prompt breaks the limit for as long as it takes.
  StepTimeModel model;
  Machine machine;
  teach(model, machine);
  machine.prefill_token *= 2;
  const auto chosen = [&model] { return model.prefill_within(60 * kMillisecond, 0, 4096); };
  for (int i = 0; i < 10; ++i) {
    const StepWork work = with_prompt(decoding(8, 300), 0, chosen());
    model.observe(work, machine.time(work));
  }
  const StepWork work = with_prompt(StepWork{}, 0, chosen());
  CHECK(machine.time(work) - machine.step <= 72 * kMillisecond);
}

TEST_CASE("long decoding does not wear out what is known about prompts") {
  // If this fails, the first prompt after a quiet hour meets a model that has forgotten.
  StepTimeModel model;
  const Machine machine;
  teach(model, machine);
  const std::int64_t before = model.prefill_within(50 * kMillisecond, 1000, 4096);
  const StepWork work = decoding(8, 500);
  for (int i = 0; i < 5000; ++i) {
    model.observe(work, machine.time(work));
  }
  const std::int64_t after = model.prefill_within(50 * kMillisecond, 1000, 4096);
  CHECK(std::abs(after - before) <= 2);
}

TEST_CASE("times that make no sense leave the model usable") {
  // If this fails, a clock that stood still makes chunks infinite or negative.
  StepTimeModel model;
  for (int i = 0; i < 100; ++i) {
    model.observe(with_prompt(decoding(4, 100), 0, 16), i % 2 == 0 ? 0 : -5 * kMillisecond);
    model.observe(StepWork{}, kMillisecond);
  }
  CHECK(model.decode_time(4, 400) == 0);
  const std::int64_t chosen = model.prefill_within(kMillisecond, 0, 64);
  CHECK(chosen >= 0);
  CHECK(chosen <= 64);
}

TEST_CASE("what computing tokens costs is their time, and before that is known their number") {
  // If this fails, sequences are preempted for the blocks that are dearest to compute again.
  StepTimeModel model;
  CHECK(model.cost_of(0, 1000) == 0.0);
  CHECK(model.cost_of(200, 0) > 1.9 * model.cost_of(100, 0));
  CHECK(model.cost_of(200, 0) < 2.1 * model.cost_of(100, 0));
  CHECK(model.cost_of(100, 4000) > model.cost_of(100, 0));  // for the keys that they read
  const Machine machine;
  teach(model, machine);
  CHECK(model.cost_of(0, 1000) == 0.0);
  CHECK(model.cost_of(300, 0) == doctest::Approx(300 + 4.5).epsilon(0.1));
  CHECK(model.cost_of(300, 2000) == doctest::Approx(300 + 64.5).epsilon(0.1));
}
