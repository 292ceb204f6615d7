// The KV kernels on the CPU: how a step's attention is cut into items for the thread pool.
//
// An item is a tile of query tokens of one sequence, in some kv heads, over a run of keys. A decode
// token takes all heads together, for their regions lie side by side in a block. Keys are taken in
// units of `kUnitKeys` at absolute positions; each unit is summed up by itself and units
// are merged from the first to the last. A tile that would keep one thread busy while others wait
// is cut into items of some consecutive units each, and the units are merged afterwards in the same
// order: the cut decides who works, never what comes out.
//
// The plan is made once per step and serves all layers. One thread at a time may call.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/cpu/instruction_set.h"
#include "core/cpu/thread_pool.h"
#include "core/kernels.h"

namespace kvledger::cpu {

class CpuKvKernels final : public KvKernels {
 public:
  // Keys that are summed up together.
  static constexpr std::int64_t kUnitKeys = 512;

  // `pool` outlives this object.
  CpuKvKernels(InstructionSet set, ThreadPool& pool);
  ~CpuKvKernels() override;

  void begin_step(const KvView& kv, const BatchView& batch, std::int32_t heads) override;
  void kv_append(std::int32_t layer, const RotaryView& rotary, const QkvView& qkv) override;
  void paged_attention(std::int32_t layer, const QkvView& qkv, float scale, float* out,
                       std::int64_t out_row_stride) override;

 private:
  // Query tokens of one sequence that go through attention together.
  struct Tile {
    std::int64_t sequence = 0;
    std::int64_t first_token = 0;  // in the step
    std::int64_t tokens = 0;
    std::int64_t first_position = 0;
    std::int64_t keys = 0;  // that its last token reads
    std::int32_t heads_per_item = 1;
    bool split = false;
    std::int64_t parts_offset = 0;  // where its parts start, in rows
    std::int64_t units() const noexcept { return (keys + kUnitKeys - 1) / kUnitKeys; }
    std::int64_t cost() const noexcept { return tokens * keys; }
  };
  struct Item {
    std::int64_t tile = 0;
    // Units of a split tile; they follow each other in memory's eyes as well.
    std::int64_t first_unit = 0;
    std::int64_t last_unit = 0;  // one past
    std::int32_t first_head = 0;
    std::int32_t heads = 1;  // kv heads
  };
  struct Workspace;
  struct Call;  // one layer's arguments

  void plan_tiles();
  void plan_heads();
  void plan_items();
  void plan_slots();
  // Query rows of a tile in one kv head.
  std::int32_t rows(const Tile& tile) const noexcept;
  // Where a split tile keeps what it found in one unit and kv head.
  AttentionPart part_of(const Tile& tile, std::int64_t unit, std::int32_t kv_head) noexcept;
  void gather_queries(const Call& call, const Item& item, Workspace& workspace) const;
  void attend_unit(const Call& call, const Item& item, std::int64_t unit,
                   const Workspace& workspace, const AttentionPart& part) const;
  std::int64_t cuts(const Tile& tile) const noexcept;
  void run_item(const Call& call, const Item& item, Workspace& workspace);
  void merge_split(const Call& call, const Item& item);
  void write_rows(const Call& call, const Item& item, const AttentionPart& part) const;

  const KernelTable& table_;
  ThreadPool& pool_;
  KvView kv_;
  BatchView batch_;
  std::int32_t heads_ = 0;
  std::int32_t group_ = 0;  // query heads per kv head

  std::vector<Tile> tiles_;  // the costliest first
  std::vector<Item> items_;
  std::vector<Item> merges_;
  std::vector<std::int64_t> slots_;  // of each token: block * slots_per_block + slot

  // Parts of split tiles.
  std::vector<float> part_maximum_;
  std::vector<float> part_sum_;
  std::vector<float> part_weighted_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;  // by thread
};

}  // namespace kvledger::cpu
