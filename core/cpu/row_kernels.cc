#include "core/cpu/row_kernels.h"

#include <algorithm>
#include <atomic>

#include "core/check.h"

namespace kvledger::cpu {
namespace {

// Fewer rows than this are not worth splitting: each part would dequantize the weights again.
constexpr std::int64_t kRowsPerPart = 96;
// Items per thread that let threads end together.
constexpr std::int64_t kItemsPerThread = 8;
// Rows that one item of a row-wise operation takes.
constexpr std::int64_t kRowsPerItem = 8;

constexpr std::int64_t kFloatsPerLine = 16;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

RowKernels::RowKernels(InstructionSet set, ThreadPool& pool)
    : table_(kernel_table(set)), pool_(pool) {}

void RowKernels::reserve_scratch(std::int64_t inputs) {
  if (inputs > scratch_inputs_) {
    scratch_inputs_ = inputs;
    scratch_.resize(
        static_cast<std::size_t>(pool_.threads() * inputs * kTileOutputs + kFloatsPerLine));
  }
}

float* RowKernels::scratch(int thread, std::int64_t inputs) {
  KVL_CHECK_LE(inputs, scratch_inputs_);
  const auto address = reinterpret_cast<std::uintptr_t>(scratch_.data());
  const std::uintptr_t aligned = (address + 63) / 64 * 64;
  return reinterpret_cast<float*>(aligned) + thread * scratch_inputs_ * kTileOutputs;
}

void RowKernels::linear(const PackedWeight& weight, const ConstMatrix& x, const Matrix& y,
                        bool accumulate) {
  KVL_CHECK_EQ(x.columns, weight.inputs());
  KVL_CHECK_EQ(y.columns, weight.outputs());
  KVL_CHECK_EQ(x.rows, y.rows);
  if (x.rows == 0) {
    return;
  }
  reserve_scratch(weight.inputs());
  const std::int64_t tiles = weight.tiles();
  const std::int64_t wanted = ceil_div(kItemsPerThread * pool_.threads(), tiles);
  const std::int64_t parts = std::clamp(x.rows / kRowsPerPart, std::int64_t{1}, wanted);
  const std::int64_t part_rows = ceil_div(x.rows, parts);
  pool_.run(tiles * parts, [&](std::int64_t item, int thread) {
    const std::int64_t tile = item / parts;
    const std::int64_t row = item % parts * part_rows;
    LinearItem part;
    part.tile = weight.tile(tile);
    part.format = static_cast<std::int32_t>(weight.format());
    part.inputs = weight.inputs();
    part.outputs = std::min<std::int64_t>(kTileOutputs, weight.outputs() - tile * kTileOutputs);
    part.x = x.data + row * x.stride;
    part.x_stride = x.stride;
    part.rows = std::min(part_rows, x.rows - row);
    part.y = y.data + row * y.stride + tile * kTileOutputs;
    part.y_stride = y.stride;
    part.accumulate = accumulate;
    part.scratch = scratch(thread, weight.inputs());
    if (part.rows > 0) {
      table_.linear(part);
    }
  });
}

void RowKernels::embed(const PackedWeight& weight, std::span<const std::int32_t> ids,
                       const Matrix& out) {
  KVL_CHECK_EQ(out.columns, weight.inputs());
  KVL_CHECK_EQ(out.rows, static_cast<std::int64_t>(ids.size()));
  for (const std::int32_t id : ids) {
    KVL_CHECK_GE(id, 0);
    KVL_CHECK_LT(std::int64_t{id}, weight.outputs());
  }
  pool_.run(out.rows, [&](std::int64_t row, int) {
    const std::int64_t id = ids[static_cast<std::size_t>(row)];
    table_.unpack_row(weight.tile(id / kTileOutputs), static_cast<std::int32_t>(weight.format()),
                      weight.inputs(), static_cast<std::int32_t>(id % kTileOutputs),
                      out.data + row * out.stride);
  });
}

void RowKernels::unpack(const PackedWeight& weight, const Matrix& out) {
  KVL_CHECK_EQ(out.columns, weight.inputs());
  KVL_CHECK_EQ(out.rows, weight.outputs());
  reserve_scratch(weight.inputs());
  pool_.run(weight.tiles(), [&](std::int64_t tile, int thread) {
    float* columns = scratch(thread, weight.inputs());
    table_.unpack_tile(weight.tile(tile), static_cast<std::int32_t>(weight.format()),
                       weight.inputs(), columns);
    const std::int64_t first = tile * kTileOutputs;
    const std::int64_t outputs = std::min<std::int64_t>(kTileOutputs, weight.outputs() - first);
    for (std::int64_t output = 0; output < outputs; ++output) {
      float* row = out.data + (first + output) * out.stride;
      for (std::int64_t input = 0; input < weight.inputs(); ++input) {
        row[input] = columns[input * kTileOutputs + output];
      }
    }
  });
}

std::uint64_t RowKernels::read_memory(std::span<const std::byte> bytes) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  const auto size = static_cast<std::int64_t>(bytes.size());
  std::atomic<std::uint64_t> sum{0};
  pool_.run(ceil_div(size, kPiece), [&](std::int64_t item, int) {
    const std::int64_t first = item * kPiece;
    sum.fetch_add(table_.read(bytes.data() + first, std::min(kPiece, size - first)),
                  std::memory_order_relaxed);
  });
  return sum.load();
}

void RowKernels::rms_norm(const ConstMatrix& x, std::span<const float> weight, float epsilon,
                          const Matrix& out) {
  KVL_CHECK_EQ(x.columns, static_cast<std::int64_t>(weight.size()));
  KVL_CHECK_EQ(x.columns, out.columns);
  KVL_CHECK_EQ(x.rows, out.rows);
  pool_.run(ceil_div(x.rows, kRowsPerItem), [&](std::int64_t item, int) {
    const std::int64_t last = std::min((item + 1) * kRowsPerItem, x.rows);
    for (std::int64_t row = item * kRowsPerItem; row < last; ++row) {
      table_.rms_norm(x.data + row * x.stride, weight.data(), epsilon, x.columns,
                      out.data + row * out.stride);
    }
  });
}

void RowKernels::head_norm(const Matrix& x, std::span<const float> weight, float epsilon) {
  const auto head_dim = static_cast<std::int64_t>(weight.size());
  KVL_CHECK_GE(head_dim, 1);
  KVL_CHECK_EQ(x.columns % head_dim, 0);
  pool_.run(ceil_div(x.rows, kRowsPerItem), [&](std::int64_t item, int) {
    const std::int64_t last = std::min((item + 1) * kRowsPerItem, x.rows);
    for (std::int64_t row = item * kRowsPerItem; row < last; ++row) {
      for (std::int64_t column = 0; column < x.columns; column += head_dim) {
        float* head = x.data + row * x.stride + column;
        table_.rms_norm(head, weight.data(), epsilon, head_dim, head);
      }
    }
  });
}

void RowKernels::silu_multiply(const ConstMatrix& x, const Matrix& out) {
  KVL_CHECK_EQ(x.columns, 2 * out.columns);
  KVL_CHECK_EQ(x.rows, out.rows);
  pool_.run(ceil_div(x.rows, kRowsPerItem), [&](std::int64_t item, int) {
    const std::int64_t last = std::min((item + 1) * kRowsPerItem, x.rows);
    for (std::int64_t row = item * kRowsPerItem; row < last; ++row) {
      const float* gate = x.data + row * x.stride;
      table_.silu_multiply(gate, gate + out.columns, out.columns, out.data + row * out.stride);
    }
  });
}

}  // namespace kvledger::cpu
