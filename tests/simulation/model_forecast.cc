#include <algorithm>
#include <set>

#include "tests/simulation/model.h"

namespace kvledger::simulation {

MemoryMember Model::member_of(const Modelled& sequence) {
  const auto lengths = lengths_.try_emplace(sequence.arrival.tenant.value(), &everybody_).first;
  MemoryMember member;
  member.lengths = &lengths->second;
  member.made = sequence.token_count() - sequence.prompt_count;
  member.more_max = last_token(sequence) - sequence.token_count();
  member.growth_max = is_protected(sequence)
                          ? 0
                          : std::max<std::int64_t>(0, blocks_for(last_token(sequence) - 1) -
                                                          blocks_for(sequence.token_count()));
  for (const Modelled* sample : samples_of(sequence.arrival.id.value())) {
    member.copies += sample->held_back ? 1 : 0;
  }
  const bool ends_in_block = sequence.prompt_count % settings_.slots_per_block != 0;
  member.copied = ends_in_block ? member.copies - 1 : 0;
  return member;
}

// Of what its request's samples had together before anybody was admitted it has an equal part.
MemoryMember Model::member_of_running(const Modelled& running) {
  MemoryMember member = member_of(running);
  std::set<std::int32_t> blocks;
  std::int64_t promised = 0;
  std::int64_t sharing = 0;
  for (const Modelled* sample : samples_of(running.arrival.id.value())) {
    if (sample->running() && !sample->admitted) {
      blocks.insert(sample->blocks.begin(), sample->blocks.end());
      promised += sample->promised;
      ++sharing;
    }
  }
  const auto held = static_cast<std::int64_t>(blocks.size()) + promised;
  member.held = static_cast<double>(held) / static_cast<double>(sharing);
  member.more_max = std::max<std::int64_t>(1, member.more_max);
  if (running.paused) {
    member.lengths = nullptr;
  }
  return member;
}

Model::Foreseen Model::foresee(MemoryForecast& forecast) {
  std::vector<const Modelled*> ran;
  for (const auto& [id, sequence] : live_) {
    if (sequence.running() && !sequence.admitted) {
      ran.push_back(&sequence);
    }
  }
  std::sort(ran.begin(), ran.end(), [](const auto* a, const auto* b) { return before(*a, *b); });
  Foreseen foreseen;
  for (const Modelled* sequence : ran) {
    const MemoryMember member = member_of_running(*sequence);
    if (!sequence->paused || is_protected(*sequence)) {
      forecast.add(member);
    }
    foreseen.held += member.held;
    ++foreseen.running;
    foreseen.going_on += sequence->paused ? 0 : 1;
  }
  return foreseen;
}

void Model::learn_length(const Modelled& ended, EndReason reason) {
  const std::int64_t tokens = ended.token_count() - ended.prompt_count;
  if (tokens == 0 || reason == EndReason::kFailed) {
    return;
  }
  const auto own = lengths_.try_emplace(ended.arrival.tenant.value(), &everybody_).first;
  for (OutputLengths* lengths : {&own->second, &everybody_}) {
    if (reason == EndReason::kStop) {
      lengths->note_end(tokens);
    } else {
      lengths->note_cut(tokens);
    }
  }
}

}  // namespace kvledger::simulation
