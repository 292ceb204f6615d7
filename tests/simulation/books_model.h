// The pool and its books as simple as they can be: one record for each block, with everybody who
// refers to it, and every sum made anew from those.
//
// Time is booked at each tick of the clock to whoever a block stands with then. What several of a
// tenant have is divided among them at once; the nanoseconds that cannot be wait until they can, or
// for whoever leaves last. Shares with the core only the types of its answers.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/ledger.h"

namespace kvledger::simulation {

class BooksModel {
 public:
  using Time = BlockNanoseconds;
  struct Reference {
    std::uint64_t sequence;
    std::uint64_t request;
    Time due = 0;
  };
  struct Block {
    BlockState state = BlockState::kFree;  // never kReserved: that has no name yet
    std::optional<std::uint32_t> owner;    // a tenant, or a shared scope
    bool kept = false;
    bool split = false;        // among several requests of a tenant
    bool of_scope = false;     // while it is held
    bool scope_holds = false;  // it stays
    std::vector<Reference> references;
    Time undivided = 0;
  };
  struct Request {
    std::uint32_t tenant = 0;
    std::int64_t reserved = 0;
    std::int64_t peak = 0;
    Time held_time = 0;
    Time reserved_time = 0;
    Time scopes_time = 0;
    Time split_time = 0;  // paid for what it shared
    Time whole_time = 0;  // what it would have paid for that alone
  };
  struct Owner {
    Time held_time = 0;
    Time reserved_time = 0;
    Time cached_time = 0;
    Time closed_time = 0;
  };

  explicit BooksModel(std::int64_t total);

  void tick(Nanoseconds elapsed);
  void open(std::uint64_t request, std::uint32_t tenant) { requests[request].tenant = tenant; }
  Request close(std::uint64_t request);

  void reserve(std::uint64_t request, std::int64_t count);
  // The block freed last.
  std::uint32_t acquire(std::uint64_t sequence, std::uint64_t request);
  void join(std::uint64_t sequence, std::uint64_t request, std::uint32_t block);
  // Ends a reference. The last one leaves the block in `releasing` while a step runs that may touch
  // it: its request's, or that of another that had it.
  void leave(std::uint64_t sequence, std::uint32_t block, bool in_step = false);
  void open_step() { step_is_open_ = true; }
  void settle();
  void keep(std::uint32_t block, std::uint32_t owner);
  void drop(std::uint32_t block);
  void hold_for_scope(std::uint32_t block);
  void end_hold_for_scope(std::uint32_t block);

  std::int64_t count(BlockState state) const;
  std::int64_t count(BlockState state, std::uint32_t owner) const;
  std::int64_t reserved() const;
  std::int64_t reserved(std::uint32_t tenant) const;
  std::int64_t free() const { return count(BlockState::kFree) - reserved(); }
  std::int64_t live(std::uint32_t tenant) const {
    return count(BlockState::kHeld, tenant) + reserved(tenant);
  }
  // Blocks that a request alone holds, and its references to those that others hold too.
  std::int64_t alone(std::uint64_t request) const;
  std::int64_t split(std::uint64_t request) const;
  std::int64_t references(std::uint32_t block) const;

  std::vector<Block> blocks;
  std::map<std::uint64_t, Request> requests;
  std::map<std::uint32_t, Owner> owners;
  std::map<BlockState, Time> state_time;  // of the whole pool

 private:
  static void divide(Block& block);
  void give_up(std::uint32_t block, bool in_step);
  void set_free(std::uint32_t block);
  void note_peaks();

  std::vector<std::uint32_t> free_;  // the last one is taken first
  std::vector<std::uint32_t> releasing_;
  bool step_is_open_ = false;
};

}  // namespace kvledger::simulation
