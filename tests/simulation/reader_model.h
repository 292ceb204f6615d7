// What becomes of sequences that begin with what the index has, predicted: the model's answer to
// each call that the scheduler makes for one.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/sequence.h"
#include "tests/simulation/books_model.h"
#include "tests/simulation/index_model.h"

namespace kvledger::simulation {

class ReaderModel {
 public:
  struct Entry {
    IndexModel::Place place;
    std::uint64_t id = 0;
  };
  // A sequence as it should be.
  struct Reader {
    std::uint64_t id = 0;
    std::uint64_t request = 0;
    std::uint32_t tenant = 0;
    PrefixScopes scopes;
    std::vector<Token> tokens;
    std::int64_t prompt = 0;
    bool runs = false;
    std::int64_t computed = 0;
    std::int64_t reserved = 0;
    std::vector<std::uint32_t> table;
    std::vector<Entry> path;
    std::int64_t own_from = 0;
    std::int64_t filled_from = -1;
    std::int64_t twice_from = -1;
    bool path_ends = false;
    std::int64_t reused_now = 0;
    std::int64_t reused_own = 0;
    std::int64_t reused_shared = 0;
  };
  struct Match {
    std::int64_t blocks = 0;
    std::int64_t cached = 0;
    std::int64_t tail = 0;
    std::uint64_t source = 0;  // a node's id
  };

  ReaderModel(std::int64_t blocks, std::int64_t slots, bool by_age)
      : books(blocks), index(books, slots, by_age), slots_(slots) {}

  Reader& arrive(const Reader& reader);
  // `room` is how many nodes a sequence's path has memory for.
  Match match(Reader& waiting, std::size_t room);
  void begin(Reader& waiting, const Match& match, std::int64_t needed);
  void share(const Reader& from, Reader& to, std::int64_t tokens, std::int64_t needed);
  // Whether it takes what others computed; then takes all that there is of it.
  bool catch_up(Reader& running, std::size_t room);
  bool reserve(Reader& running, std::int64_t count);
  // A block to write into next.
  void take(Reader& running);
  std::int64_t missing(const Reader& running, std::int64_t tokens) const;
  void exchange_twice(Reader& running);
  void insert(Reader& running, std::size_t room);
  void give_back(Reader& running);
  void stay(const Reader& ended);
  void discard(std::uint64_t request);
  std::int64_t purge(std::uint32_t scope);

  BooksModel books;
  IndexModel index;
  std::map<std::uint64_t, Reader> readers;
  std::set<std::uint64_t> in_step;  // requests
  std::int64_t inserted = 0;
  std::int64_t reused = 0;
  std::int64_t staying() const { return static_cast<std::int64_t>(staying_.size()); }

 private:
  struct Staying {
    std::uint32_t scope;
    Entry entry;
    std::uint32_t block;
  };

  std::uint32_t scope_at(const Reader& reader, std::int64_t index) const;
  std::uint32_t owner_at(const Reader& reader, std::int64_t index) const;
  std::int64_t border(const Reader& reader) const;
  // Where the block `index` of a reader would stand behind its path.
  IndexModel::Place place_of(const Reader& reader, std::int64_t index) const;
  IndexModel::Node* known(const Entry& entry) { return index.find(entry.place, entry.id); }
  // The node for the next block behind the path, if it has a block.
  IndexModel::Node* next_filled(const Reader& reader);
  std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + slots_ - 1) / slots_; }
  bool must_copy(const Reader& reader) const;
  std::uint32_t adopt(Reader& reader, std::int64_t index);
  void count(Reader& reader, std::int64_t index, std::int64_t tokens);
  bool insert_one(Reader& reader);
  bool is_beyond_a_sibling(const Reader& reader, std::uint32_t block) const;

  const std::int64_t slots_;
  std::vector<Staying> staying_;
};

}  // namespace kvledger::simulation
