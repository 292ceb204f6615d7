// The sequences that wait, in the order in which they are looked at: tenants by the service that
// they were given, within a tenant by rank.
//
// Every tenant has a counter of service, and the one with the least goes first (virtual token
// counters, Sheng et al., OSDI 2024). Service is counted when it is given, at list prices, so what
// others have cached changes nobody's order:
//
//   a prompt token   1, also where a shared scope had it; what its own had costs nothing
//   a prompt         kPromptLeast, if that is more: it takes a turn
//   an output token  kDecodePrice: it takes a row of a step, and memory as long as it stays; a
//                    sequence's first comes with its prompt
//
// Nobody saves up. While somebody waits who could be served, the queue's own time follows the least
// counter of these; while nobody does, all get what they ask for, so it follows the largest. Who
// comes with nothing waiting, or could not be served for its own limits, begins no more than
// `credit` before that time: it has its turn at once, for so much, and then shares. Nobody gets rid
// of what it was given by leaving either.
//
// Of two tenants that both wait all the time the one that was given less goes first, whatever their
// prompts are like; so prompts keep them within `credit` and one step of each other. What runs goes
// on: a tenant may get ahead by what its running sequences still have to say. A single tenant's
// order is that of ranks alone.
//
// enter() takes the memory for all that can happen to a sequence; nothing else here allocates.
// Costs O(log sequences + log tenants) a call. One thread at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/output_lengths.h"
#include "core/sequence.h"
#include "core/types.h"

namespace kvledger {

// The first to arrive goes first (Sequence::rank), and ids decide between equals.
struct ByRank {
  bool operator()(const Sequence* a, const Sequence* b) const noexcept {
    return a->rank != b->rank ? a->rank < b->rank : a->id < b->id;
  }
};

// What a token of output is counted as.
inline constexpr std::int64_t kDecodePrice = 2;
// What a prompt is counted as at least.
inline constexpr std::int64_t kPromptLeast = 32;

// What one tenant was given, and what of it waits.
class TenantLine {
 public:
  using Waiting = std::set<Sequence*, ByRank>;
  struct GoesBefore {
    bool operator()(const TenantLine* a, const TenantLine* b) const noexcept;
  };
  using Lines = std::set<TenantLine*, GoesBefore>;

  TenantLine(TenantId tenant, const OutputLengths& everybody) noexcept
      : lengths(&everybody), tenant_(tenant) {}

  TenantId tenant() const noexcept { return tenant_; }
  std::int64_t service() const noexcept { return service_; }
  bool waits() const noexcept { return !waiting_.empty(); }

  // The scheduler's, within one plan: who of this tenant came first of those that may be computed.
  const Sequence* oldest = nullptr;
  // The scheduler's, while it looks for a victim: blocks of those that run, as if none were shared.
  BlockCount listed;
  // How long its outputs get.
  OutputLengths lengths;

 private:
  friend class FairQueue;

  const TenantId tenant_;
  std::int64_t service_ = 0;
  std::int64_t due_ = 0;  // service that was given and is not counted yet
  Waiting waiting_;
  Lines::node_type node_;  // while it stands in no list
};

class FairQueue {
 public:
  // A look along the queue; ends with the next change of the queue.
  class Cursor {
   public:
    // The next sequence, or null. Each counts as served from then on.
    Sequence* next();
    // Leaves out what else the tenant of the last one has.
    void skip_tenant();

   private:
    friend class FairQueue;
    struct Place {
      std::int64_t service = 0;  // with what was looked at
      const TenantLine* line = nullptr;
      TenantLine::Waiting::const_iterator at;

      bool operator<(const Place& other) const noexcept;  // whether it comes later
    };

    explicit Cursor(FairQueue& queue) noexcept;

    const TenantLine::Lines& lines_;
    TenantLine::Lines::const_iterator fresh_;  // the first that was not looked at
    std::vector<Place>& places_;               // a heap of those that were
    Place last_;
    std::size_t looked_at_ = 0;
  };

  // Service that a tenant which comes with nothing waiting may be given before others.
  explicit FairQueue(std::int64_t credit);
  FairQueue(const FairQueue&) = delete;  // lines refer to its lengths
  FairQueue& operator=(const FairQueue&) = delete;

  // Makes room for one more sequence of a tenant, and returns its line, which stays where it is.
  TenantLine& enter(TenantId tenant);
  // Ends what enter() began, for a sequence that does not wait.
  void leave();

  // How long the outputs of all tenants get.
  OutputLengths& lengths() noexcept { return lengths_; }

  // Puts a sequence that entered among those that wait, or takes it out.
  void insert(Sequence& sequence);
  void extract(Sequence& sequence);

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  // Whether anybody who waits, and whose tenant `may_run`, goes before a sequence that does not.
  template <class MayRun>
  bool is_before(const Sequence& sequence, const MayRun& may_run) const;
  // Who waits, in order; no more than kLookMax of them.
  Cursor look() { return Cursor(*this); }

  // Notes what a tenant is given in the step that is planned.
  void give(TenantLine& line, std::int64_t service);
  // Lets a tenant that can be served begin no further behind than if it came now. Not while a
  // cursor is used.
  void lift(TenantLine& line);
  // Counts what was noted. `backlogged` are the tenants, one or more times, that have prompts to
  // compute and could be served, now or as soon as there is room.
  void count(const std::vector<const TenantLine*>& backlogged);

  static constexpr std::size_t kLookMax = 4096;

 private:
  void link(TenantLine& line);
  void unlink(TenantLine& line);

  const std::int64_t credit_;
  std::int64_t time_ = 0;
  std::size_t size_ = 0;
  OutputLengths lengths_;
  std::unordered_map<TenantId, TenantLine> by_tenant_;
  TenantLine::Lines lines_;  // that have somebody waiting
  // A node for every sequence that entered and does not wait.
  std::vector<TenantLine::Waiting::node_type> spare_;
  std::vector<TenantLine*> due_;  // that were given something
  std::vector<Cursor::Place> places_;
};

template <class MayRun>
bool FairQueue::is_before(const Sequence& sequence, const MayRun& may_run) const {
  const TenantLine& own = *sequence.line;
  if (own.waits() && ByRank{}(*own.waiting_.begin(), &sequence)) {
    return true;
  }
  for (const TenantLine* line : lines_) {
    if (line->service_ >= own.service_) {
      return false;
    }
    if (may_run(line->tenant_)) {
      return true;
    }
  }
  return false;
}

}  // namespace kvledger
