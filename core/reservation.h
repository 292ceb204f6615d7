// A claim on blocks that nobody else can take any more.
//
// Its life: BlockPool::reserve makes it, acquire() turns one promised block after another into a
// held one, forfeit() gives the rest back, and then it is settled. It moves but does not copy, so
// a claim has one owner. Destroying one that still claims blocks would leak them, and is a broken
// invariant that shows itself at once.

#pragma once

#include "core/types.h"

namespace kvledger {

class BlockPool;

class Reservation {
 public:
  // Claims nothing.
  Reservation() noexcept = default;
  Reservation(Reservation&& other) noexcept;
  // The target must be settled.
  Reservation& operator=(Reservation&& other);
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() noexcept(false);

  BlockCount remaining() const noexcept { return remaining_; }

  // Takes one of the promised blocks; there must be one.
  BlockId acquire();
  // Gives back what was not acquired.
  void forfeit();
  // Gives back some of it.
  void forfeit(BlockCount count);

 private:
  friend class BlockPool;
  Reservation(BlockPool& pool, RequestAccount account, BlockCount count) noexcept;

  BlockPool* pool_ = nullptr;
  RequestAccount account_;
  BlockCount remaining_;
};

}  // namespace kvledger
