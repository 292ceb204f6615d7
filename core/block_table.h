// Which blocks hold a sequence's tokens, in token order, for every running sequence.
//
// The tables are rows of one array of fixed size, taken at the start:
//
//              index 0   1   2   ...          width - 1
//   row 0        17   4  90    -    -    -    -            length 3
//   row 1         -   -   -    -    -    -    -            free
//   row 2         8   -   -    -    -    -    -            length 1
//
// Kernels read the rows in place; a step plan names the rows it uses and lists what changed in
// them. What stands past a row's length is never read. One thread at a time may write; kernels of
// a step may read while the step is uncommitted, because nothing they read changes before.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace kvledger {

class BlockTables {
 public:
  // `rows` sequences of at most `width` blocks.
  BlockTables(std::int64_t rows, BlockCount width);

  // A row of length 0. There must be a free one. All that follows is for rows taken.
  TableRow take_row();
  // Gives a row back; its length must be 0.
  void give_back(TableRow row);
  std::int64_t free_rows() const noexcept { return static_cast<std::int64_t>(free_rows_.size()); }

  void append(TableRow row, BlockId block);
  // Puts another block in place of one.
  void replace(TableRow row, std::int64_t index, BlockId block);
  // Forgets the row's blocks. What lies in the row stays: a kernel may still be reading it.
  void clear(TableRow row);
  BlockCount length(TableRow row) const;
  BlockId at(TableRow row, std::int64_t index) const;

  // For kernels: entry (row, index) lies at data()[row * width + index].
  const std::int32_t* data() const noexcept { return entries_.data(); }
  std::int64_t rows() const noexcept { return static_cast<std::int64_t>(lengths_.size()); }
  BlockCount width() const noexcept { return width_; }

 private:
  static constexpr std::int64_t kFree = -1;

  std::size_t entry(TableRow row, std::int64_t index) const;
  std::int64_t& taken(TableRow row);
  std::int64_t taken(TableRow row) const;

  BlockCount width_;
  std::vector<std::int32_t> entries_;
  std::vector<std::int64_t> lengths_;  // kFree for a row that nobody has
  std::vector<TableRow> free_rows_;
};

}  // namespace kvledger
