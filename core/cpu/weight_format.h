// How the weights of a linear layer lie in memory once packed, and the arithmetic they stand for.
//
// Outputs are packed in tiles of 32. Within a tile the same input of all outputs lies side by
// side, so one vector register holds 16 outputs and an input is broadcast to all of them:
//
//   f32    [input][32]                          the weight itself
//   bf16   [input / 2][32] dwords               two inputs each, the even one in the low half
//   f16    [input][32] halves
//
// and for each 32 inputs
//
//   q8_0   [32] f16 d, [8][32] dwords of 4 signed bytes           w = d q
//   q4_0   [32] f16 d, [4][32] dwords of 8 nibbles                w = d (q - 8)
//   q4_1   [32] f16 d, [32] f16 m, [4][32] dwords of 8 nibbles    w = d q + m
//
// The quantized formats are those of GGUF with their numbers rearranged, not rounded again. Every
// kernel turns them into the same floats that dequantizing them first would give, and multiplies
// in the same order, so a layer's result does not depend on how its weights are kept.

#pragma once

#include <stdint.h>

namespace kvledger::cpu {

enum class WeightFormat : int32_t {
  kF32 = 0,
  kBf16 = 1,
  kF16 = 2,
  kQ8_0 = 3,
  kQ4_0 = 4,
  kQ4_1 = 5,
};

// Outputs in a tile.
constexpr int kTileOutputs = 32;
// Inputs that share a scale in the quantized formats.
constexpr int kGroupInputs = 32;
// Every layer's number of inputs is a multiple of this.
constexpr int kInputsMultiple = 32;

// Bytes that 32 inputs of one tile take, by format.
constexpr int64_t kTileGroupBytes[] = {
    32 * 32 * 4, 32 * 32 * 2, 32 * 32 * 2, 32 * 2 + 32 * 32, 32 * 2 + 16 * 32, 32 * 4 + 16 * 32,
};

}  // namespace kvledger::cpu
