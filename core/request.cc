#include "core/request.h"

#include "core/sequence.h"

namespace kvledger {
namespace {

bool is_running(const Sequence& sequence) noexcept {
  return sequence.state == Sequence::State::kRunning;
}

}  // namespace

void PreemptionReasons::add(const PreemptionReasons& more) noexcept {
  own += more.own;
  others += more.others;
  itself += more.itself;
  paused += more.paused;
}

const Sequence* Request::source() const noexcept {
  for (const Sequence* sample : samples) {
    if (is_running(*sample) && sample->computed >= sample->prompt_count) {
      return sample;
    }
  }
  return nullptr;
}

const Sequence* Request::carrier() const noexcept {
  const Sequence* best = nullptr;
  for (const Sequence* sample : samples) {
    if (sample->paused) {
      continue;
    }
    const bool better =
        best == nullptr || (is_running(*sample) && !is_running(*best)) ||
        (is_running(*sample) == is_running(*best) && sample->computed > best->computed);
    best = better ? sample : best;
  }
  return best;
}

void Request::absorb(const Sequence& ended) noexcept {
  output_tokens += ended.output_count();
  computed_tokens += ended.computed_tokens;
  recomputed_tokens += ended.recomputed_tokens;
  shared_tokens += ended.shared_tokens;
  reused_own += ended.reused_own;
  reused_shared += ended.reused_shared;
  preemptions += ended.preemptions;
  preempted_for.add(ended.preempted_for);
  const std::int64_t outputs = ended.output_count();
  uncached_tokens += outputs * ended.prompt_count + outputs * (outputs - 1) / 2;
}

}  // namespace kvledger
