#include "core/fair_queue.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/make_room.h"

namespace kvledger {

FairQueue::FairQueue(std::int64_t credit) : credit_(credit) {
  KVL_CHECK_GE(credit, 0);
  places_.reserve(kLookMax);
}

// By service, then by who came first.
bool TenantLine::GoesBefore::operator()(const TenantLine* a, const TenantLine* b) const noexcept {
  if (a->service_ != b->service_) {
    return a->service_ < b->service_;
  }
  return a != b && ByRank{}(*a->waiting_.begin(), *b->waiting_.begin());
}

TenantLine& FairQueue::enter(TenantId tenant) {
  // A node comes out of a set of its kind; there is no other way to make one.
  TenantLine::Waiting maker;
  Sequence* nobody = nullptr;
  make_room(spare_, spare_.size() + size_ + 1);
  make_room(due_, by_tenant_.size() + 1);
  maker.insert(nobody);
  const auto [found, is_new] = by_tenant_.try_emplace(tenant, tenant, lengths_);
  TenantLine& line = found->second;
  if (is_new) {
    try {
      TenantLine::Lines lines;
      lines.insert(&line);
      line.node_ = lines.extract(lines.begin());
    } catch (...) {
      by_tenant_.erase(found);
      throw;
    }
  }
  spare_.push_back(maker.extract(maker.begin()));
  return line;
}

void FairQueue::leave() {
  KVL_CHECK(!spare_.empty());
  spare_.pop_back();
}

void FairQueue::insert(Sequence& sequence) {
  TenantLine& line = *sequence.line;
  KVL_CHECK(!spare_.empty());
  TenantLine::Waiting::node_type node = std::move(spare_.back());
  spare_.pop_back();
  node.value() = &sequence;
  if (line.waits()) {
    unlink(line);
  } else {
    lift(line);
  }
  line.waiting_.insert(std::move(node));
  link(line);
  ++size_;
}

void FairQueue::extract(Sequence& sequence) {
  TenantLine& line = *sequence.line;
  KVL_CHECK(line.waits());
  unlink(line);
  TenantLine::Waiting::node_type node = line.waiting_.extract(&sequence);
  KVL_CHECK(!node.empty());
  spare_.push_back(std::move(node));
  if (line.waits()) {
    link(line);
  }
  --size_;
}

void FairQueue::link(TenantLine& line) {
  lines_.insert(std::move(line.node_));
}

void FairQueue::unlink(TenantLine& line) {
  line.node_ = lines_.extract(&line);
  KVL_CHECK(!line.node_.empty());
}

void FairQueue::give(TenantLine& line, std::int64_t service) {
  if (line.due_ == 0 && service > 0) {
    due_.push_back(&line);
  }
  line.due_ += service;
}

void FairQueue::lift(TenantLine& line) {
  const std::int64_t least = time_ - credit_;
  if (line.service_ >= least) {
    return;
  }
  const bool is_linked = line.waits();
  if (is_linked) {
    unlink(line);
  }
  line.service_ = least;
  if (is_linked) {
    link(line);
  }
}

void FairQueue::count(const std::vector<const TenantLine*>& backlogged) {
  // The counters as they were when the step was chosen.
  const bool waits = !backlogged.empty();
  std::int64_t reached = waits ? backlogged.front()->service_ : 0;
  for (const TenantLine* line : backlogged) {
    reached = std::min(reached, line->service_);
  }
  for (TenantLine* line : due_) {
    const bool is_linked = line->waits();
    if (is_linked) {
      unlink(*line);
    }
    line->service_ += std::exchange(line->due_, 0);
    if (is_linked) {
      link(*line);
    }
    reached = waits ? reached : std::max(reached, line->service_);
  }
  due_.clear();
  time_ = std::max(time_, reached);
}

bool FairQueue::Cursor::Place::operator<(const Place& other) const noexcept {
  return service != other.service ? service > other.service : ByRank{}(*other.at, *at);
}

FairQueue::Cursor::Cursor(FairQueue& queue) noexcept
    : lines_(queue.lines_), fresh_(queue.lines_.begin()), places_(queue.places_) {
  places_.clear();
}

Sequence* FairQueue::Cursor::next() {
  if (last_.line != nullptr && last_.at != last_.line->waiting_.end()) {
    places_.push_back(last_);
    std::push_heap(places_.begin(), places_.end());
  }
  last_ = Place{};
  if (looked_at_ == kLookMax) {
    return nullptr;
  }
  Place fresh;
  if (fresh_ != lines_.end()) {
    fresh = Place{(*fresh_)->service_, *fresh_, (*fresh_)->waiting_.begin()};
  }
  if (fresh.line != nullptr && (places_.empty() || places_.front() < fresh)) {
    last_ = fresh;
    ++fresh_;
  } else if (!places_.empty()) {
    std::pop_heap(places_.begin(), places_.end());
    last_ = places_.back();
    places_.pop_back();
  } else {
    return nullptr;
  }
  ++looked_at_;
  Sequence* sequence = *last_.at++;
  last_.service += sequence->token_count();
  return sequence;
}

void FairQueue::Cursor::skip_tenant() {
  last_ = Place{};
}

}  // namespace kvledger
