// Usage: simulation [--seeds N] [--steps M] [--seed S]
//
// Runs seeds S, S + 1, ... S + N - 1 with M steps each. A failure prints its seed and its step and
// ends with status 1; `--seed S` alone, with the same M, runs that seed again, step by step the
// same.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/simulation/simulator.h"

namespace {

using namespace kvledger;
using namespace kvledger::simulation;

struct Options {
  std::uint64_t seed = 1;
  std::int64_t seeds = 1;
  std::int64_t steps = 5000;
};

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    char* end = nullptr;
    const std::int64_t value = i + 1 < argc ? std::strtoll(argv[i + 1], &end, 10) : -1;
    if (value < 0 || *end != '\0') {
      return std::nullopt;
    }
    const std::string flag = argv[i];
    if (flag == "--seed") {
      options.seed = static_cast<std::uint64_t>(value);
    } else if (flag == "--seeds") {
      options.seeds = value;
    } else if (flag == "--steps") {
      options.steps = value;
    } else {
      return std::nullopt;
    }
  }
  return options;
}

double percent(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

void print(const char* title, const Outcome& outcome) {
  const ModelCounts& counts = outcome.counts;
  const auto l = [](std::int64_t value) { return static_cast<long long>(value); };
  std::printf("%-12s %8lld steps %7lld accepted %6lld refused %7lld chunks\n", title,
              l(outcome.steps), l(outcome.accepted), l(outcome.refused), l(counts.chunks));
  std::printf(
      "%-12s %8lld preemptions (at most %lld of one sequence), %.1f %% of tokens "
      "recomputed, %lld sat out, passed at most %lld times, waited at most %lld steps\n",
      "", l(counts.preemptions), l(counts.preemptions_max),
      percent(counts.recomputed, counts.computed), l(counts.sat_out), l(counts.passes_max),
      l(counts.wait_steps_max));
  std::printf(
      "%-12s %8lld cancelled waiting, %lld in prefill, %lld in a step; %lld steps "
      "abandoned, %lld commits of many tokens\n",
      "", l(outcome.cancelled_waiting), l(outcome.cancelled_in_prefill),
      l(outcome.cancelled_in_step), l(outcome.abandoned), l(outcome.commits_of_many));
  std::printf("%-12s %8lld samples began with another, %lld later, %lld blocks copied\n", "",
              l(counts.forks), l(counts.late_forks), l(counts.copies));
}

// Shorter runs of an arm may miss what it is for.
constexpr std::int64_t kStepsToReach = 5000;

// A run that meant to reach something and did not has tested nothing.
bool reached(Arm arm, const Outcome& outcome) {
  switch (arm) {
    case Arm::kThrash:
    case Arm::kEdges:
      return outcome.counts.preemptions > 0 && outcome.counts.recomputed > 0;
    case Arm::kChunks:
      return outcome.counts.chunks > 0;
    case Arm::kCancels:
      return outcome.cancelled_in_step > 0 && outcome.cancelled_waiting > 0 &&
             outcome.cancelled_in_prefill > 0;
    case Arm::kAdmission:
      return outcome.refused > 0 && outcome.counts.wait_steps_max > 0;
    case Arm::kSpeculation:
      return outcome.commits_of_many > 0;
    case Arm::kFailures:
      return outcome.abandoned > 0 && outcome.counts.ends[5] > 0;
    case Arm::kNearEnd:
      return outcome.counts.ends[3] > 0;
    case Arm::kSamples:
      return outcome.counts.forks > 0 && outcome.counts.late_forks > 0 && outcome.counts.copies > 0;
    case Arm::kMixed:
      return outcome.counts.ends[1] > 0 && outcome.counts.ends[2] > 0;
  }
  return false;
}

// Runs one seed; nothing if it failed, which is then on stderr.
std::optional<Outcome> run_seed(std::uint64_t seed, std::int64_t steps) {
  std::unique_ptr<Simulator> simulator;
  try {
    simulator = std::make_unique<Simulator>(seed);
    return simulator->run(steps);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "seed %llu (%s) failed at step %lld: %s\n",
                 static_cast<unsigned long long>(seed), name(arm_of(seed)),
                 simulator ? static_cast<long long>(simulator->step()) : 0, failure.what());
    // Its books are broken; taking it down would fail again and hide the first failure.
    static_cast<void>(simulator.release());
    return std::nullopt;
  }
}

// Prints what each arm came to; false if one missed what it is for.
bool print_arms(const std::vector<Outcome>& arms) {
  bool complete = true;
  for (std::int64_t i = 0; i < kArms; ++i) {
    const Arm arm = static_cast<Arm>(i);
    const Outcome& outcome = arms[static_cast<std::size_t>(i)];
    if (outcome.steps > 0) {
      print(name(arm), outcome);
    }
    if (outcome.steps >= kStepsToReach && !reached(arm, outcome)) {
      std::fprintf(stderr, "the arm '%s' never reached what it is for\n", name(arm));
      complete = false;
    }
  }
  return complete;
}

int run(const Options& options) {
  std::vector<Outcome> arms(static_cast<std::size_t>(kArms));
  Outcome all;
  for (std::int64_t i = 0; i < options.seeds; ++i) {
    const std::uint64_t seed = options.seed + static_cast<std::uint64_t>(i);
    const std::optional<Outcome> outcome = run_seed(seed, options.steps);
    if (!outcome) {
      return 1;
    }
    arms[static_cast<std::size_t>(arm_of(seed))].add(*outcome);
    all.add(*outcome);
  }
  const bool complete = print_arms(arms);
  print("all", all);
  static constexpr const char* kEnds[] = {"", "stop", "length", "context", "cancelled", "failed"};
  std::printf("%lld seeds from %llu, recomputed %lld of %lld tokens, ends:",
              static_cast<long long>(options.seeds), static_cast<unsigned long long>(options.seed),
              static_cast<long long>(all.counts.recomputed),
              static_cast<long long>(all.counts.computed));
  for (std::size_t i = 1; i < std::size(kEnds); ++i) {
    std::printf(" %s %lld", kEnds[i], static_cast<long long>(all.counts.ends[i]));
  }
  std::printf(", digest %016llx\n", static_cast<unsigned long long>(all.digest));
  return complete ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<Options> options = parse(argc, argv);
  if (!options) {
    std::fprintf(stderr, "usage: simulation [--seeds N] [--steps M] [--seed S]\n");
    return 2;
  }
  set_check_handler([](const CheckFailure& failure) { throw Violation(failure.message()); });
  return run(*options);
}
