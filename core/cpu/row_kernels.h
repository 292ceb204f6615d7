// Linear layers and the row-wise operations between them, spread over a thread pool.
//
// Every result is a function of its own row: it does not depend on how many rows there are, on the
// number of threads, or on the format that the weights are kept in (weight_format.h). One thread
// at a time may call into one RowKernels, because calls share the pool and the scratch memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/cpu/instruction_set.h"
#include "core/cpu/packed_weight.h"
#include "core/cpu/thread_pool.h"

namespace kvledger::cpu {

// Rows of floats: row i starts at data + i * stride.
struct Matrix {
  float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
};

struct ConstMatrix {
  const float* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;
};

class RowKernels {
 public:
  // `pool` outlives this object.
  RowKernels(InstructionSet set, ThreadPool& pool);

  // y = x W^T, or y += x W^T.
  void linear(const PackedWeight& weight, const ConstMatrix& x, const Matrix& y, bool accumulate);
  // out[i] = row ids[i] of the weight, as floats.
  void embed(const PackedWeight& weight, std::span<const std::int32_t> ids, const Matrix& out);
  // All rows of the weight as floats: out is [outputs][inputs].
  void unpack(const PackedWeight& weight, const Matrix& out);
  // out = x * weight / sqrt(mean(x^2) + epsilon), row by row.
  void rms_norm(const ConstMatrix& x, std::span<const float> weight, float epsilon,
                const Matrix& out);
  // The same for each part of a row, in place: a row of x is heads of weight.size() floats.
  void head_norm(const Matrix& x, std::span<const float> weight, float epsilon);
  // Reads all bytes once and returns a checksum: what any kernel's reading is compared with.
  std::uint64_t read_memory(std::span<const std::byte> bytes);
  // out = silu(left half of x) * right half of x.
  void silu_multiply(const ConstMatrix& x, const Matrix& out);

 private:
  float* scratch(int thread, std::int64_t inputs);
  void reserve_scratch(std::int64_t inputs);

  const KernelTable& table_;
  ThreadPool& pool_;
  std::vector<float> scratch_;  // [threads][scratch_inputs_][32], grown when a layer needs more
  std::int64_t scratch_inputs_ = 0;
};

}  // namespace kvledger::cpu
