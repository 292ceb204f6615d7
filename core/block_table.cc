#include "core/block_table.h"

#include "core/check.h"

namespace kvledger {

BlockTables::BlockTables(std::int64_t rows, BlockCount width)
    : width_(width),
      entries_(static_cast<std::size_t>(rows * width.value())),
      lengths_(static_cast<std::size_t>(rows), kFree) {
  KVL_CHECK_GT(rows, 0);
  KVL_CHECK_GT(width.value(), 0);
  free_rows_.reserve(lengths_.size());
  for (std::int64_t row = rows; row-- > 0;) {
    free_rows_.push_back(TableRow{static_cast<std::uint32_t>(row)});
  }
}

TableRow BlockTables::take_row() {
  KVL_CHECK(!free_rows_.empty());
  const TableRow row = free_rows_.back();
  free_rows_.pop_back();
  std::int64_t& length = checked_at(lengths_, row.value());
  KVL_CHECK_EQ(length, kFree);
  length = 0;
  return row;
}

void BlockTables::give_back(TableRow row) {
  std::int64_t& length = taken(row);
  KVL_CHECK_EQ(length, 0);
  length = kFree;
  free_rows_.push_back(row);
}

void BlockTables::append(TableRow row, BlockId block) {
  std::int64_t& length = taken(row);
  KVL_CHECK_LT(length, width_.value());
  const std::int64_t entry = std::int64_t{row.value()} * width_.value() + length;
  entries_[static_cast<std::size_t>(entry)] = static_cast<std::int32_t>(block.value());
  ++length;
}

void BlockTables::replace(TableRow row, std::int64_t index, BlockId block) {
  entries_[entry(row, index)] = static_cast<std::int32_t>(block.value());
}

void BlockTables::clear(TableRow row) {
  taken(row) = 0;
}

BlockCount BlockTables::length(TableRow row) const {
  return BlockCount{taken(row)};
}

BlockId BlockTables::at(TableRow row, std::int64_t index) const {
  return BlockId{static_cast<std::uint32_t>(entries_[entry(row, index)])};
}

std::size_t BlockTables::entry(TableRow row, std::int64_t index) const {
  KVL_CHECK_GE(index, 0);
  KVL_CHECK_LT(index, taken(row));
  return static_cast<std::size_t>(std::int64_t{row.value()} * width_.value() + index);
}

std::int64_t& BlockTables::taken(TableRow row) {
  std::int64_t& length = checked_at(lengths_, row.value());
  KVL_CHECK_NE(length, kFree);
  return length;
}

std::int64_t BlockTables::taken(TableRow row) const {
  const std::int64_t length = checked_at(lengths_, row.value());
  KVL_CHECK_NE(length, kFree);
  return length;
}

}  // namespace kvledger
