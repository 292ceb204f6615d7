#include "core/block_table.h"

#include <set>

#include "tests/check_throws.h"

using namespace kvledger;

TEST_CASE("rows are taken once each and start empty") {
  // If this fails, two sequences share a table.
  BlockTables tables(3, BlockCount{2});
  CHECK(tables.rows() == 3);
  CHECK(tables.width() == BlockCount{2});
  CHECK(tables.free_rows() == 3);
  std::set<TableRow> taken;
  for (int i = 0; i < 3; ++i) {
    const TableRow row = tables.take_row();
    CHECK(row.value() < 3);
    CHECK(tables.length(row) == BlockCount{0});
    CHECK(taken.insert(row).second);
  }
  CHECK(tables.free_rows() == 0);
  CHECK_BREAKS(tables.take_row());
}

TEST_CASE("a row keeps its blocks in token order, apart from its neighbours") {
  // If this fails, a sequence reads the keys and values of another.
  BlockTables tables(2, BlockCount{3});
  const TableRow first = tables.take_row();
  const TableRow second = tables.take_row();
  for (const std::uint32_t block : {17U, 4U, 90U}) {
    tables.append(first, BlockId{block});
  }
  tables.append(second, BlockId{8});
  CHECK(tables.length(first) == BlockCount{3});
  CHECK(tables.length(second) == BlockCount{1});
  CHECK(tables.at(first, 0) == BlockId{17});
  CHECK(tables.at(first, 1) == BlockId{4});
  CHECK(tables.at(first, 2) == BlockId{90});
  CHECK(tables.at(second, 0) == BlockId{8});
}

TEST_CASE("kernels find entry (row, index) at row * width + index") {
  // If this fails, every kernel reads the wrong blocks.
  BlockTables tables(4, BlockCount{5});
  for (int i = 0; i < 4; ++i) {
    const TableRow row = tables.take_row();
    for (std::uint32_t index = 0; index < 5; ++index) {
      tables.append(row, BlockId{100 * row.value() + index});
    }
  }
  for (std::int32_t row = 0; row < 4; ++row) {
    for (std::int32_t index = 0; index < 5; ++index) {
      CHECK(tables.data()[row * 5 + index] == 100 * row + index);
    }
  }
}

TEST_CASE("a cleared row is empty, but what a kernel may be reading stays") {
  // If this fails, a cancel in a step pulls the table away under the kernel.
  BlockTables tables(1, BlockCount{2});
  const TableRow row = tables.take_row();
  tables.append(row, BlockId{5});
  tables.append(row, BlockId{6});
  tables.clear(row);
  tables.give_back(row);
  CHECK(tables.data()[0] == 5);
  CHECK(tables.data()[1] == 6);
  CHECK(tables.take_row() == row);
  CHECK(tables.length(row) == BlockCount{0});
  tables.append(row, BlockId{9});
  CHECK(tables.at(row, 0) == BlockId{9});
}

TEST_CASE("nothing is written or read past a row") {
  // If this fails, a long sequence overwrites the row after it.
  BlockTables tables(2, BlockCount{2});
  const TableRow row = tables.take_row();
  tables.append(row, BlockId{1});
  CHECK_BREAKS(tables.at(row, 1));
  CHECK_BREAKS(tables.at(row, -1));
  tables.append(row, BlockId{2});
  CHECK_BREAKS(tables.append(row, BlockId{3}));
  CHECK_BREAKS(tables.at(row, 2));
  CHECK_BREAKS(tables.length(TableRow{2}));
  CHECK_BREAKS(tables.append(TableRow{2}, BlockId{0}));
  CHECK_BREAKS(tables.clear(TableRow{2}));
  CHECK_BREAKS(tables.give_back(TableRow{2}));
  CHECK_BREAKS(tables.at(TableRow{2}, 0));
}

TEST_CASE("a row is given back empty") {
  // If this fails, blocks stand in a table that nobody has.
  BlockTables tables(1, BlockCount{2});
  const TableRow row = tables.take_row();
  tables.append(row, BlockId{1});
  CHECK_BREAKS(tables.give_back(row));
  tables.clear(row);
  tables.give_back(row);
  CHECK(tables.free_rows() == 1);
}

TEST_CASE("a row that is given back twice is noticed while others are taken") {
  // If this fails, the next two sequences get the same row.
  BlockTables tables(3, BlockCount{2});
  const TableRow first = tables.take_row();
  tables.take_row();
  tables.give_back(first);
  CHECK_BREAKS(tables.give_back(first));
  CHECK(tables.free_rows() == 2);
}

TEST_CASE("a row that nobody has taken cannot be used") {
  // If this fails, a sequence that lost its row writes into the next owner's.
  BlockTables tables(2, BlockCount{2});
  const TableRow row = tables.take_row();
  tables.give_back(row);
  CHECK_BREAKS(tables.append(row, BlockId{1}));
  CHECK_BREAKS(tables.clear(row));
  CHECK_BREAKS(tables.length(row));
  CHECK_BREAKS(tables.at(row, 0));
}

TEST_CASE("tables of no rows or no width break at once") {
  // If this fails, a server starts that can run nothing.
  CHECK_BREAKS(BlockTables(0, BlockCount{4}));
  CHECK_BREAKS(BlockTables(4, BlockCount{0}));
}
