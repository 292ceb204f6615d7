#include "core/sequence.h"

#include <cstddef>
#include <utility>

namespace kvledger {

Sequence::Sequence(const Arrival& arrival, std::vector<Token> prompt,
                   std::shared_ptr<Request> whose, std::uint64_t index)
    : id(arrival.id.value() + index),
      request(std::move(whose)),
      tenant(arrival.tenant),
      account(request->account),
      priority(arrival.priority),
      prompt_count(static_cast<std::int64_t>(prompt.size())),
      output_tokens_max(arrival.output_tokens_max),
      ignore_end_of_text(arrival.ignore_end_of_text),
      arrived_at(arrival.arrived_at),
      step_time_max(arrival.step_time_max),
      tokens(std::move(prompt)),
      scopes(arrival.scopes),
      activity_since(arrival.arrived_at) {}

void Sequence::spend(Nanoseconds now, Activity next) noexcept {
  const Nanoseconds spent = now > activity_since ? now - activity_since : 0;
  Nanoseconds* const kinds[] = {&times.queued, &times.prefill, &times.decode};
  if (!paused && activity == Activity::kQueued && admitted_before) {
    times.requeued += spent;
  }
  *(paused ? &times.paused : kinds[static_cast<std::size_t>(activity)]) += spent;
  activity = next;
  activity_since += spent;
}

}  // namespace kvledger
