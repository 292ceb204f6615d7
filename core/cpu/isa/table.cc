#include "core/cpu/isa/table.h"

#include "core/cpu/isa/vec.h"

namespace kvledger::cpu::KVL_ISA {

void attend(const AttentionItem& item);
void merge(const AttentionPart& part, const AttentionPart& later, int32_t rows, int32_t head_dim);
void normalize(const AttentionPart& part, int32_t row, int32_t head_dim, float* out);
void append(const float* key, const float* value, char* region, int64_t value_offset, int32_t slot,
            int32_t tile_slots, int32_t head_dim, int32_t format);
void rotate(float* heads_data, int32_t heads, int32_t head_dim, const float* cosine,
            const float* sine);
void linear(const LinearItem& item);
void unpack_tile(const void* tile, int32_t format, int64_t inputs, float* out);
void unpack_row(const void* tile, int32_t format, int64_t inputs, int32_t output, float* out);
void rms_norm(const float* x, const float* weight, float epsilon, int64_t length, float* out);
void silu_multiply(const float* gate, const float* up, int64_t length, float* out);
int32_t likeliest(const float* x, int64_t length);
uint64_t read(const void* data, int64_t bytes);

const KernelTable& table() {
  static constexpr KernelTable kTable = {
      &attend,      &append,     &rotate,   &merge,         &normalize, &linear,
      &unpack_tile, &unpack_row, &rms_norm, &silu_multiply, &likeliest, &read,
  };
  return kTable;
}

}  // namespace kvledger::cpu::KVL_ISA
