#include "core/cpu/kv_kernels.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger::cpu {
namespace {

constexpr std::int64_t kHeadDimMax = 256;
constexpr std::int64_t kTokensPerAppend = 4;
// A tile that costs more than this part of a thread's fair share is split.
constexpr std::int64_t kSplitsPerThread = 4;
// Items for each thread that a split tile is cut into: every item begins with memory that nobody
// has fetched yet, so there are only as many as balance needs.
constexpr std::int64_t kCutsPerThread = 2;
// With fewer items than this for each thread, kv heads go apart.
constexpr std::int64_t kItemsPerThread = 2;

}  // namespace

// What one thread needs for one item.
struct CpuKvKernels::Workspace {
  alignas(64) float queries[kAttentionRowsMax * kHeadDimMax];
  alignas(64) float weighted[2][kAttentionRowsMax * kHeadDimMax];
  float maximum[2][kAttentionRowsMax];
  float sum[2][kAttentionRowsMax];
  std::int64_t limits[kAttentionRowsMax];

  AttentionPart part(int i) noexcept { return AttentionPart{maximum[i], sum[i], weighted[i]}; }
};

struct CpuKvKernels::Call {
  std::int32_t layer;
  const QkvView& qkv;
  float scale;
  float* out;
  std::int64_t out_row_stride;
};

CpuKvKernels::CpuKvKernels(InstructionSet set, ThreadPool& pool)
    : table_(kernel_table(set)), pool_(pool) {
  for (int thread = 0; thread < pool.threads(); ++thread) {
    workspaces_.push_back(std::make_unique<Workspace>());
  }
}

CpuKvKernels::~CpuKvKernels() = default;

void CpuKvKernels::begin_step(const KvView& kv, const BatchView& batch, std::int32_t heads) {
  KVL_CHECK_LE(std::int64_t{kv.head_dim}, kHeadDimMax);
  KVL_CHECK_EQ(heads % kv.kv_heads, 0);
  KVL_CHECK_LE(heads / kv.kv_heads, kAttentionRowsMax);
  kv_ = kv;
  batch_ = batch;
  heads_ = heads;
  group_ = heads / kv.kv_heads;
  plan_tiles();
  plan_heads();
  plan_items();
  plan_slots();
}

void CpuKvKernels::plan_tiles() {
  tiles_.clear();
  const std::int64_t tokens_max = std::max(1, kAttentionRowsMax / group_);
  std::int64_t total = 0;
  for (std::int64_t s = 0; s < batch_.sequences; ++s) {
    const std::int64_t begin = batch_.query_start[s];
    const std::int64_t end = batch_.query_start[s + 1];
    const std::int64_t before = batch_.context_length[s] - (end - begin);
    KVL_CHECK_GE(before, 0);
    for (std::int64_t token = begin; token < end; token += tokens_max) {
      Tile tile;
      tile.sequence = s;
      tile.first_token = token;
      tile.tokens = std::min(tokens_max, end - token);
      tile.first_position = before + (token - begin);
      tile.keys = tile.first_position + tile.tokens;
      total += tile.cost();
      tiles_.push_back(tile);
    }
  }
  const std::int64_t share = total * kv_.kv_heads / (kSplitsPerThread * pool_.threads());
  std::int64_t part_rows = 0;
  for (Tile& tile : tiles_) {
    tile.split = pool_.threads() > 1 && tile.units() > 1 && tile.cost() > share;
    if (tile.split) {
      tile.parts_offset = part_rows;
      part_rows += tile.units() * kv_.kv_heads * rows(tile);
    }
  }
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });
  const auto grow = [](std::vector<float>& floats, std::int64_t size) {
    floats.resize(std::max(floats.size(), static_cast<std::size_t>(size)));
  };
  grow(part_maximum_, part_rows);
  grow(part_sum_, part_rows);
  grow(part_weighted_, part_rows * kv_.head_dim);
}

// How many kv heads an item takes: as many as its rows allow, unless threads would be idle.
void CpuKvKernels::plan_heads() {
  std::int64_t items = 0;
  for (Tile& tile : tiles_) {
    tile.heads_per_item = std::clamp(kAttentionRowsMax / rows(tile), 1, kv_.kv_heads);
    const std::int64_t groups = (kv_.kv_heads + tile.heads_per_item - 1) / tile.heads_per_item;
    items += groups * (tile.split ? cuts(tile) : 1);
  }
  if (items < kItemsPerThread * pool_.threads() && pool_.threads() > 1) {
    for (Tile& tile : tiles_) {
      tile.heads_per_item = 1;
    }
  }
}

std::int64_t CpuKvKernels::cuts(const Tile& tile) const noexcept {
  return std::min(tile.units(), kCutsPerThread * pool_.threads());
}

void CpuKvKernels::plan_items() {
  items_.clear();
  merges_.clear();
  for (std::size_t t = 0; t < tiles_.size(); ++t) {
    const Tile& tile = tiles_[t];
    const std::int64_t pieces = tile.split ? cuts(tile) : 1;
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      const std::int64_t first = tile.units() * piece / pieces;
      const std::int64_t last = tile.units() * (piece + 1) / pieces;
      for (std::int32_t head = 0; head < kv_.kv_heads; head += tile.heads_per_item) {
        const std::int32_t heads = std::min(tile.heads_per_item, kv_.kv_heads - head);
        items_.push_back(Item{static_cast<std::int64_t>(t), first, last, head, heads});
        if (tile.split && piece == 0) {
          merges_.push_back(items_.back());
        }
      }
    }
  }
}

// Where each token's keys and values go. This is the second look at the block tables: the
// scheduler checked when it handed the blocks out.
void CpuKvKernels::plan_slots() {
  slots_.resize(static_cast<std::size_t>(batch_.tokens));
  for (std::int64_t s = 0; s < batch_.sequences; ++s) {
    const std::int32_t* blocks =
        batch_.block_tables + std::int64_t{batch_.rows[s]} * batch_.table_width;
    KVL_CHECK_LE(std::int64_t{batch_.context_length[s]}, batch_.table_width * kv_.slots_per_block);
    const std::int64_t end = batch_.query_start[s + 1];
    for (std::int64_t token = batch_.query_start[s]; token < end; ++token) {
      const std::int64_t position = batch_.context_length[s] - (end - token);
      const std::int64_t block = blocks[position / kv_.slots_per_block];
      KVL_CHECK_GE(block, 0);
      slots_[static_cast<std::size_t>(token)] =
          block * kv_.slots_per_block + position % kv_.slots_per_block;
    }
  }
}

std::int32_t CpuKvKernels::rows(const Tile& tile) const noexcept {
  return static_cast<std::int32_t>(tile.tokens * group_);
}

AttentionPart CpuKvKernels::part_of(const Tile& tile, std::int64_t unit,
                                    std::int32_t kv_head) noexcept {
  const std::int64_t row = tile.parts_offset + (unit * kv_.kv_heads + kv_head) * rows(tile);
  return AttentionPart{part_maximum_.data() + row, part_sum_.data() + row,
                       part_weighted_.data() + row * kv_.head_dim};
}

void CpuKvKernels::kv_append(std::int32_t layer, const RotaryView& rotary, const QkvView& qkv) {
  KVL_CHECK_LT(layer, kv_.layers);
  KVL_CHECK_EQ(qkv.heads, heads_);
  const std::int64_t half = kv_.head_dim / 2;
  const std::int64_t items = (batch_.tokens + kTokensPerAppend - 1) / kTokensPerAppend;
  pool_.run(items, [&](std::int64_t item, int) {
    const std::int64_t last = std::min((item + 1) * kTokensPerAppend, batch_.tokens);
    for (std::int64_t token = item * kTokensPerAppend; token < last; ++token) {
      float* heads = qkv.data + token * qkv.row_stride;
      const float* keys = heads + std::int64_t{heads_} * kv_.head_dim;
      const float* values = keys + std::int64_t{kv_.kv_heads} * kv_.head_dim;
      const std::int64_t position = batch_.positions[token];
      KVL_CHECK_LT(position, rotary.positions);
      // Queries and keys lie side by side and turn by the same angles.
      table_.rotate(heads, heads_ + kv_.kv_heads, kv_.head_dim, rotary.cosine + position * half,
                    rotary.sine + position * half);
      const std::int64_t slot = slots_[static_cast<std::size_t>(token)];
      for (std::int32_t head = 0; head < kv_.kv_heads; ++head) {
        const std::int64_t offset = std::int64_t{head} * kv_.head_dim;
        std::byte* region = kv_.region(slot / kv_.slots_per_block, layer, head);
        table_.append(keys + offset, values + offset, reinterpret_cast<char*>(region),
                      kv_.value_offset, static_cast<std::int32_t>(slot % kv_.slots_per_block),
                      kv_.tile_slots, kv_.head_dim, static_cast<std::int32_t>(kv_.format));
      }
    }
  });
}

void CpuKvKernels::paged_attention(std::int32_t layer, const QkvView& qkv, float scale, float* out,
                                   std::int64_t out_row_stride) {
  KVL_CHECK_LT(layer, kv_.layers);
  KVL_CHECK_EQ(qkv.heads, heads_);
  const Call call{layer, qkv, scale, out, out_row_stride};
  pool_.run(static_cast<std::int64_t>(items_.size()), [&](std::int64_t item, int thread) {
    run_item(call, items_[static_cast<std::size_t>(item)],
             *workspaces_[static_cast<std::size_t>(thread)]);
  });
  pool_.run(static_cast<std::int64_t>(merges_.size()), [&](std::int64_t item, int) {
    merge_split(call, merges_[static_cast<std::size_t>(item)]);
  });
}

void CpuKvKernels::run_item(const Call& call, const Item& item, Workspace& workspace) {
  const Tile& tile = tiles_[static_cast<std::size_t>(item.tile)];
  gather_queries(call, item, workspace);
  if (tile.split) {
    for (std::int64_t unit = item.first_unit; unit < item.last_unit; ++unit) {
      attend_unit(call, item, unit, workspace, part_of(tile, unit, item.first_head));
    }
    return;
  }
  attend_unit(call, item, 0, workspace, workspace.part(0));
  for (std::int64_t unit = 1; unit < tile.units(); ++unit) {
    attend_unit(call, item, unit, workspace, workspace.part(1));
    table_.merge(workspace.part(0), workspace.part(1), item.heads * rows(tile), kv_.head_dim);
  }
  write_rows(call, item, workspace.part(0));
}

// Queries of the item, scaled: head by head, token after token with the heads of the group side
// by side.
void CpuKvKernels::gather_queries(const Call& call, const Item& item, Workspace& workspace) const {
  const Tile& tile = tiles_[static_cast<std::size_t>(item.tile)];
  const std::int64_t width = std::int64_t{group_} * kv_.head_dim;
  float* to = workspace.queries;
  for (std::int32_t head = item.first_head; head < item.first_head + item.heads; ++head) {
    for (std::int64_t t = 0; t < tile.tokens; ++t) {
      const float* from =
          call.qkv.data + (tile.first_token + t) * call.qkv.row_stride + head * width;
      for (std::int64_t i = 0; i < width; ++i) {
        to[i] = from[i] * call.scale;
      }
      to += width;
    }
  }
  for (std::int64_t t = 0; t < tile.tokens; ++t) {
    std::fill_n(workspace.limits + t * group_, group_, tile.first_position + t + 1);
  }
}

void CpuKvKernels::attend_unit(const Call& call, const Item& item, std::int64_t unit,
                               const Workspace& workspace, const AttentionPart& part) const {
  const Tile& tile = tiles_[static_cast<std::size_t>(item.tile)];
  AttentionItem work;
  work.base = reinterpret_cast<const char*>(kv_.region(0, call.layer, item.first_head));
  work.blocks = batch_.block_tables + std::int64_t{batch_.rows[tile.sequence]} * batch_.table_width;
  work.block_stride = kv_.block_stride;
  work.region_stride = kv_.region_stride;
  work.value_offset = kv_.value_offset;
  work.slots_per_block = kv_.slots_per_block;
  work.tile_slots = kv_.tile_slots;
  work.head_dim = kv_.head_dim;
  work.format = static_cast<std::int32_t>(kv_.format);
  work.begin = unit * kUnitKeys;
  work.end = std::min(tile.keys, work.begin + kUnitKeys);
  work.prefetch_end = std::min(tile.keys, item.last_unit * kUnitKeys);
  work.queries = workspace.queries;
  work.limits = workspace.limits;
  work.rows = rows(tile);
  work.kv_heads = item.heads;
  work.part = part;
  table_.attend(work);
}

void CpuKvKernels::merge_split(const Call& call, const Item& item) {
  const Tile& tile = tiles_[static_cast<std::size_t>(item.tile)];
  const std::int32_t all_rows = item.heads * rows(tile);
  const AttentionPart whole = part_of(tile, 0, item.first_head);
  for (std::int64_t unit = 1; unit < tile.units(); ++unit) {
    table_.merge(whole, part_of(tile, unit, item.first_head), all_rows, kv_.head_dim);
  }
  write_rows(call, item, whole);
}

void CpuKvKernels::write_rows(const Call& call, const Item& item, const AttentionPart& part) const {
  const Tile& tile = tiles_[static_cast<std::size_t>(item.tile)];
  for (std::int32_t row = 0; row < item.heads * rows(tile); ++row) {
    const std::int32_t kv_head = item.first_head + row / rows(tile);
    const std::int32_t in_head = row % rows(tile);
    const std::int64_t token = tile.first_token + in_head / group_;
    const std::int64_t head = kv_head * group_ + in_head % group_;
    table_.normalize(part, row, kv_.head_dim,
                     call.out + token * call.out_row_stride + head * kv_.head_dim);
  }
}

}  // namespace kvledger::cpu
