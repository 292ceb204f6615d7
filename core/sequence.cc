#include "core/sequence.h"

#include <utility>

namespace kvledger {

Sequence::Sequence(const Arrival& arrival, std::vector<Token> prompt, RequestAccount ledger_account)
    : id(arrival.id),
      tenant(arrival.tenant),
      account(ledger_account),
      priority(arrival.priority),
      prompt_count(static_cast<std::int64_t>(prompt.size())),
      output_tokens_max(arrival.output_tokens_max),
      ignore_end_of_text(arrival.ignore_end_of_text),
      arrived_at(arrival.arrived_at),
      tokens(std::move(prompt)),
      activity_since(arrival.arrived_at) {}

void Sequence::spend(Nanoseconds now, Activity next) noexcept {
  const Nanoseconds spent = now > activity_since ? now - activity_since : 0;
  switch (activity) {
    case Activity::kQueued:
      times.queued += spent;
      break;
    case Activity::kPrefill:
      times.prefill += spent;
      break;
    case Activity::kDecode:
      times.decode += spent;
      break;
  }
  activity = next;
  activity_since += spent;
}

}  // namespace kvledger
