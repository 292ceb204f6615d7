// Rotary embedding, and storing a token's key and value in its slot.
//
// The key goes into its K tile transposed: dimension d of slot s lands beside dimension d of the
// tile's other slots (see kv_format.h). That scatters one key over the tile's cache lines, which
// attention reads in the same step anyway; bytes written per token are those of its K and V.

#include "core/cpu/isa/table.h"
#include "core/cpu/isa/vec.h"

namespace kvledger::cpu::KVL_ISA {
namespace {

constexpr int kLanes = 16;

void append_f32(const float* key, const float* value, char* region, int64_t value_offset,
                int32_t slot, int32_t tile_slots, int32_t head_dim) {
  const int32_t in_tile = slot % tile_slots;
  float* keys = reinterpret_cast<float*>(region) + int64_t{slot - in_tile} * head_dim + in_tile;
  for (int d = 0; d < head_dim; ++d) {
    keys[int64_t{d} * tile_slots] = key[d];
  }
  float* values = reinterpret_cast<float*>(region + value_offset) + int64_t{slot} * head_dim;
  memcpy(values, value, sizeof(float) * static_cast<size_t>(head_dim));
}

void append_bf16(const float* key, const float* value, char* region, int64_t value_offset,
                 int32_t slot, int32_t tile_slots, int32_t head_dim) {
  const int32_t in_tile = slot % tile_slots;
  uint16_t* keys =
      reinterpret_cast<uint16_t*>(region) + int64_t{slot - in_tile} * head_dim + 2 * in_tile;
  uint16_t* values = reinterpret_cast<uint16_t*>(region + value_offset) + int64_t{slot} * head_dim;
  for (int d = 0; d < head_dim; d += kLanes) {
    uint16_t rounded[kLanes];
    store_bf16(rounded, load(key + d));
    for (int i = 0; i < kLanes; i += 2) {
      memcpy(keys + int64_t{(d + i) / 2} * tile_slots * 2, rounded + i, 2 * sizeof(uint16_t));
    }
    store_bf16(values + d, load(value + d));
  }
}

}  // namespace

void append(const float* key, const float* value, char* region, int64_t value_offset, int32_t slot,
            int32_t tile_slots, int32_t head_dim, int32_t format) {
  if (format == 0) {
    append_f32(key, value, region, value_offset, slot, tile_slots, head_dim);
  } else {
    append_bf16(key, value, region, value_offset, slot, tile_slots, head_dim);
  }
}

void rotate(float* heads_data, int32_t heads, int32_t head_dim, const float* cosine,
            const float* sine) {
  const int half = head_dim / 2;
  for (int32_t head = 0; head < heads; ++head) {
    float* first = heads_data + int64_t{head} * head_dim;
    float* second = first + half;
    for (int i = 0; i < half; ++i) {
      const float a = first[i];
      const float b = second[i];
      first[i] = a * cosine[i] - b * sine[i];
      second[i] = b * cosine[i] + a * sine[i];
    }
  }
}

}  // namespace kvledger::cpu::KVL_ISA
