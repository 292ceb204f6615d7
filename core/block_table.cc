#include "core/block_table.h"

#include "core/check.h"

namespace kvledger {

BlockTables::BlockTables(std::int64_t rows, BlockCount width)
    : width_(width),
      entries_(static_cast<std::size_t>(rows * width.value())),
      lengths_(static_cast<std::size_t>(rows)) {
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
  KVL_CHECK_EQ(checked_at(lengths_, row.value()), 0);
  return row;
}

void BlockTables::give_back(TableRow row) {
  KVL_CHECK_EQ(checked_at(lengths_, row.value()), 0);
  KVL_CHECK_LT(free_rows_.size(), lengths_.size());
  free_rows_.push_back(row);
}

void BlockTables::append(TableRow row, BlockId block) {
  std::int64_t& length = checked_at(lengths_, row.value());
  KVL_CHECK_LT(length, width_.value());
  const std::int64_t entry = std::int64_t{row.value()} * width_.value() + length;
  entries_[static_cast<std::size_t>(entry)] = static_cast<std::int32_t>(block.value());
  ++length;
}

void BlockTables::clear(TableRow row) { checked_at(lengths_, row.value()) = 0; }

BlockCount BlockTables::length(TableRow row) const { return BlockCount{checked_at(lengths_, row.value())}; }

BlockId BlockTables::at(TableRow row, std::int64_t index) const {
  KVL_CHECK_LT(index, checked_at(lengths_, row.value()));
  const std::int64_t entry = std::int64_t{row.value()} * width_.value() + index;
  return BlockId{static_cast<std::uint32_t>(entries_[static_cast<std::size_t>(entry)])};
}

}  // namespace kvledger
