#include "core/types.h"

#include <type_traits>
#include <unordered_set>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

template <class A, class B>
concept Comparable = requires(A a, B b) { a == b; };
template <class A, class B>
concept Addable = requires(A a, B b) { a + b; };

}  // namespace

TEST_CASE("numbers of different kinds do not mix") {
  // If this fails, the compiler lets a row pass for a block, or bytes for blocks.
  static_assert(!Comparable<BlockId, TableRow>);
  static_assert(!Comparable<SequenceId, StepId>);
  static_assert(!Comparable<BlockCount, ByteCount>);
  static_assert(!Addable<BlockCount, ByteCount>);
  static_assert(!std::is_convertible_v<TenantId, RequestAccount>);
  static_assert(!std::is_constructible_v<TenantId, RequestAccount>);
  static_assert(!std::is_constructible_v<BlockCount, ByteCount>);
  CHECK(true);
}

TEST_CASE("bare numbers go in and come out only where it is written") {
  // If this fails, a count silently becomes an id, or an index a count.
  static_assert(!std::is_convertible_v<std::uint32_t, BlockId>);
  static_assert(!std::is_convertible_v<BlockId, std::uint32_t>);
  static_assert(!std::is_convertible_v<std::int64_t, BlockCount>);
  static_assert(!std::is_convertible_v<BlockCount, std::int64_t>);
  CHECK(BlockId{7}.value() == 7);
  CHECK(BlockCount{-7}.value() == -7);
}

TEST_CASE("ids compare but do not calculate") {
  // If this fails, somebody can add one to a block id and get somebody else's block.
  static_assert(!Addable<BlockId, BlockId>);
  static_assert(!Addable<SequenceId, SequenceId>);
  CHECK(BlockId{1} < BlockId{2});
  CHECK(SequenceId{5} == SequenceId{5});
  CHECK(SequenceId{5} != SequenceId{6});
  CHECK(SequenceId{0xffffffffffffffff} > SequenceId{1});
}

TEST_CASE("quantities of one kind add and subtract, below zero as well") {
  // If this fails, balances drift.
  BlockCount count{5};
  count += BlockCount{3};
  CHECK(count == BlockCount{8});
  count -= BlockCount{10};
  CHECK(count == BlockCount{-2});
  CHECK(BlockCount{4} + BlockCount{6} == BlockCount{10});
  CHECK(BlockCount{4} - BlockCount{6} == BlockCount{-2});
  CHECK(BlockCount{-1} < BlockCount{0});
}

TEST_CASE("a number costs what it holds and starts at zero") {
  // If this fails, arrays of ids that kernels read have another layout, or start with garbage.
  static_assert(sizeof(BlockId) == 4);
  static_assert(sizeof(TableRow) == 4);
  static_assert(sizeof(SequenceId) == 8);
  static_assert(sizeof(BlockCount) == 8);
  static_assert(std::is_trivially_copyable_v<BlockId>);
  static_assert(std::is_trivially_copyable_v<BlockCount>);
  CHECK(BlockId{}.value() == 0);
  CHECK(ByteCount{}.value() == 0);
}

TEST_CASE("bytes go past 32 bits") {
  // If this fails, a pool of more than 4 GB is addressed wrongly.
  const ByteCount block{std::int64_t{64} << 20};
  ByteCount sum;
  for (int i = 0; i < 100; ++i) {
    sum += block;
  }
  CHECK(sum.value() == 6'710'886'400);
}

TEST_CASE("ids hash, so they can be keys") {
  // If this fails, equal ids are found as different sequences.
  std::unordered_set<SequenceId> ids = {SequenceId{1}, SequenceId{2}, SequenceId{1}};
  CHECK(ids.size() == 2);
  CHECK(ids.contains(SequenceId{2}));
  CHECK_FALSE(ids.contains(SequenceId{3}));
}
