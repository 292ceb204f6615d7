// y = x W^T for one tile of 32 outputs, with weights in any packed format.
//
// Each output is one chain of multiply-adds over the inputs in order, in f32, starting from zero:
// its value depends on its row of x and on the weights, not on how many rows there are or in which
// format the weights are kept. Up to kRowsMax rows share each weight while it is in a register;
// more rows than that read weights that were dequantized once into a scratch buffer.
//
// Bytes moved for a few rows: the packed weights, once. Operations: 2 x rows x inputs x 32, plus
// for q4_1 three instructions to dequantize 16 weights.

#include "core/cpu/isa/table.h"
#include "core/cpu/isa/vec.h"
#include "core/cpu/weight_format.h"

namespace kvledger::cpu::KVL_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kCacheLine = 64;
// How far ahead of the weights in use the next ones are fetched. The hardware's own prefetching
// stops at every page; without this, reading and multiplying take turns.
constexpr int64_t kPrefetchBytes = 3072;

// A format reads 16 outputs, starting at lane `lane` of the tile, of `kStep` inputs at a time:
// begin() loads what a group of 32 inputs shares, load() the packed inputs, weight<j>() gives the
// j-th of them as floats.
struct PackedF32 {
  static constexpr int kStep = 1;
  using Packed = F32;
  struct Scales {};
  KVL_INLINE Scales begin(const char*, int) { return {}; }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return KVL_ISA::load(reinterpret_cast<const float*>(group) + input * kTileOutputs + lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales&) {
    return packed;
  }
};

struct PackedBf16 {
  static constexpr int kStep = 2;
  using Packed = U32;
  struct Scales {};
  KVL_INLINE Scales begin(const char*, int) { return {}; }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return KVL_ISA::load(reinterpret_cast<const uint32_t*>(group) + input / 2 * kTileOutputs +
                         lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales&) {
    return j == 0 ? bf16_low(packed) : bf16_high(packed);
  }
};

struct PackedF16 {
  static constexpr int kStep = 1;
  using Packed = F32;
  struct Scales {};
  KVL_INLINE Scales begin(const char*, int) { return {}; }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return load_f16(reinterpret_cast<const uint16_t*>(group) + input * kTileOutputs + lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales&) {
    return packed;
  }
};

struct PackedQ8_0 {
  static constexpr int kStep = 4;
  using Packed = U32;
  struct Scales {
    F32 d;
  };
  KVL_INLINE Scales begin(const char* group, int lane) {
    return {load_f16(reinterpret_cast<const uint16_t*>(group) + lane)};
  }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return KVL_ISA::load(reinterpret_cast<const uint32_t*>(group + 2 * kTileOutputs) +
                         input / 4 * kTileOutputs + lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales& scales) {
    return mul(scales.d, signed_byte<j>(packed));
  }
};

// d (q - 8) and d q + m alike are one multiply-add: products of an f16 and four bits are exact.
struct PackedQ4_0 {
  static constexpr int kStep = 8;
  using Packed = U32;
  struct Scales {
    F32 d;
    F32 m;
  };
  KVL_INLINE Scales begin(const char* group, int lane) {
    const F32 d = load_f16(reinterpret_cast<const uint16_t*>(group) + lane);
    return {d, mul(d, splat(-8.0F))};
  }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return KVL_ISA::load(reinterpret_cast<const uint32_t*>(group + 2 * kTileOutputs) +
                         input / 8 * kTileOutputs + lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales& scales) {
    return fma(scales.d, nibble<j>(packed), scales.m);
  }
};

struct PackedQ4_1 {
  static constexpr int kStep = 8;
  using Packed = U32;
  using Scales = PackedQ4_0::Scales;
  KVL_INLINE Scales begin(const char* group, int lane) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
    return {load_f16(halves + lane), load_f16(halves + kTileOutputs + lane)};
  }
  KVL_INLINE Packed load(const char* group, int input, int lane) {
    return KVL_ISA::load(reinterpret_cast<const uint32_t*>(group + 4 * kTileOutputs) +
                         input / 8 * kTileOutputs + lane);
  }
  template <int j>
  KVL_INLINE F32 weight(Packed packed, const Scales& scales) {
    return fma(scales.d, nibble<j>(packed), scales.m);
  }
};

constexpr int64_t group_bytes(WeightFormat format) {
  return kTileGroupBytes[static_cast<int>(format)];
}

KVL_INLINE void prefetch_group(const char* group, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kCacheLine) {
    prefetch(group + kPrefetchBytes + line);
  }
}

// Rows of x by threes: two addressing modes reach the second and third from the first.
template <int kRows>
struct Inputs {
  const float* base[(kRows + 2) / 3];
  int64_t stride;

  KVL_INLINE Inputs at(const float* x, int64_t stride) {
    Inputs inputs;
    for (int i = 0; i < (kRows + 2) / 3; ++i) {
      inputs.base[i] = x + int64_t{3} * i * stride;
    }
    inputs.stride = stride;
    return inputs;
  }
  __attribute__((always_inline)) F32 operator()(int row, int64_t input) const {
    return splat(base[row / 3][row % 3 * stride + input]);
  }
};

// Vectors of 16 outputs that are computed side by side. A single row makes one chain of additions
// a vector, each of which waits for the one before: with few registers too, it takes two.
template <int kRows>
constexpr int kVectors = kRows == 1 ? 2 : kWeightVectors;

// One step of kStep inputs: every weight vector meets every row.
template <class Format, int kRows, int... j>
KVL_INLINE void multiply_step(const char* group, int input, int lane,
                              const typename Format::Scales (&scales)[kVectors<kRows>],
                              const Inputs<kRows>& x, int64_t column,
                              F32 (&total)[kRows][kVectors<kRows>], Numbers<j...>) {
  typename Format::Packed packed[kVectors<kRows>];
  for (int v = 0; v < kVectors<kRows>; ++v) {
    packed[v] = Format::load(group, input, lane + v * kLanes);
  }
  const auto one_input = [&](auto weight_of, int offset) __attribute__((always_inline)) {
    F32 weight[kVectors<kRows>];
    for (int v = 0; v < kVectors<kRows>; ++v) {
      weight[v] = weight_of(v);
    }
    for (int r = 0; r < kRows; ++r) {
      const F32 value = x(r, column + offset);
      for (int v = 0; v < kVectors<kRows>; ++v) {
        total[r][v] = fma(value, weight[v], total[r][v]);
      }
    }
  };
  (one_input([&](int v) __attribute__((
                 always_inline)) { return Format::template weight<j>(packed[v], scales[v]); },
             j),
   ...);
}

// kRows rows times kVectors<kRows> x 16 outputs at `lane`.
template <class Format, WeightFormat kFormat, int kRows>
KVL_INLINE void multiply(const LinearItem& item, const float* x_rows, int lane,
                         F32 (&total)[kRows][kVectors<kRows>]) {
  const Inputs<kRows> x = Inputs<kRows>::at(x_rows, item.x_stride);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors<kRows>; ++v) {
      total[r][v] = zero();
    }
  }
  const char* group = static_cast<const char*>(item.tile);
  for (int64_t first = 0; first < item.inputs; first += kGroupInputs) {
    if (lane == 0 && item.rows <= kRowsMax) {  // otherwise they are read again and again
      prefetch_group(group, group_bytes(kFormat));
    }
    typename Format::Scales scales[kVectors<kRows>];
    for (int v = 0; v < kVectors<kRows>; ++v) {
      scales[v] = Format::begin(group, lane + v * kLanes);
    }
    for (int input = 0; input < kGroupInputs; input += Format::kStep) {
      multiply_step<Format, kRows>(group, input, lane, scales, x, first + input, total,
                                   typename Count<Format::kStep>::Type{});
    }
    group += group_bytes(kFormat);
  }
}

KVL_INLINE void write(float* y, F32 total, int64_t outputs, bool accumulate) {
  if (outputs >= kLanes) {
    store(y, accumulate ? add(load(y), total) : total);
    return;
  }
  alignas(64) float lanes[kLanes];
  store(lanes, total);
  for (int64_t i = 0; i < outputs; ++i) {
    y[i] = accumulate ? y[i] + lanes[i] : lanes[i];
  }
}

template <class Format, WeightFormat kFormat, int kRows>
void multiply_rows(const LinearItem& item, int64_t row) {
  const float* x = item.x + row * item.x_stride;
  float* y = item.y + row * item.y_stride;
  for (int lane = 0; lane < kTileOutputs && lane < item.outputs; lane += kVectors<kRows> * kLanes) {
    F32 total[kRows][kVectors<kRows>];
    multiply<Format, kFormat, kRows>(item, x, lane, total);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors<kRows>; ++v) {
        const int first = lane + v * kLanes;
        if (first < item.outputs) {
          write(y + r * item.y_stride + first, total[r][v], item.outputs - first, item.accumulate);
        }
      }
    }
  }
}

template <class Format, WeightFormat kFormat>
struct ByRows {
  using Function = void (*)(const LinearItem&, int64_t);
  Function function[kRowsMax + 1];

  template <int... kCounts>
  static constexpr ByRows make(Numbers<kCounts...>) {
    return {{nullptr, &multiply_rows<Format, kFormat, kCounts + 1>...}};
  }
};

template <class Format, WeightFormat kFormat>
constexpr ByRows<Format, kFormat> kByRows =
    ByRows<Format, kFormat>::make(typename Count<kRowsMax>::Type{});

template <class Format, int... j>
KVL_INLINE void unpack_step(const char* group, int input, int lane,
                            const typename Format::Scales& scales, float* out, Numbers<j...>) {
  const typename Format::Packed packed = Format::load(group, input, lane);
  (store(out + (input + j) * kTileOutputs + lane, Format::template weight<j>(packed, scales)), ...);
}

// Dequantizes `inputs` inputs of a tile to [inputs][32] floats.
template <class Format, WeightFormat kFormat>
void unpack_inputs(const char* group, int64_t inputs, float* out) {
  for (int64_t first = 0; first < inputs; first += kGroupInputs) {
    prefetch_group(group, group_bytes(kFormat));
    for (int lane = 0; lane < kTileOutputs; lane += kLanes) {
      const typename Format::Scales scales = Format::begin(group, lane);
      for (int input = 0; input < kGroupInputs; input += Format::kStep) {
        unpack_step<Format>(group, input, lane, scales, out, typename Count<Format::kStep>::Type{});
      }
    }
    group += group_bytes(kFormat);
    out += kGroupInputs * kTileOutputs;
  }
}

template <class Format, WeightFormat kFormat>
void multiply_all(const LinearItem& item) {
  if (item.rows <= kRowsMax) {
    kByRows<Format, kFormat>.function[item.rows](item, 0);
    return;
  }
  LinearItem unpacked = item;
  if constexpr (kFormat != WeightFormat::kF32) {
    unpack_inputs<Format, kFormat>(static_cast<const char*>(item.tile), item.inputs, item.scratch);
    unpacked.tile = item.scratch;
  }
  // Passes of equal size: a last one of a few rows would leave the multipliers idle.
  const int64_t passes = (item.rows + kRowsMax - 1) / kRowsMax;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = item.rows * pass / passes;
    const int64_t last = item.rows * (pass + 1) / passes;
    kByRows<PackedF32, WeightFormat::kF32>.function[last - first](unpacked, first);
  }
}

// Calls `call` with the format's two template arguments.
#define KVL_BY_FORMAT(format, call)            \
  switch (static_cast<WeightFormat>(format)) { \
    case WeightFormat::kF32:                   \
      call(PackedF32, WeightFormat::kF32);     \
      break;                                   \
    case WeightFormat::kBf16:                  \
      call(PackedBf16, WeightFormat::kBf16);   \
      break;                                   \
    case WeightFormat::kF16:                   \
      call(PackedF16, WeightFormat::kF16);     \
      break;                                   \
    case WeightFormat::kQ8_0:                  \
      call(PackedQ8_0, WeightFormat::kQ8_0);   \
      break;                                   \
    case WeightFormat::kQ4_0:                  \
      call(PackedQ4_0, WeightFormat::kQ4_0);   \
      break;                                   \
    case WeightFormat::kQ4_1:                  \
      call(PackedQ4_1, WeightFormat::kQ4_1);   \
      break;                                   \
  }

}  // namespace

void linear(const LinearItem& item) {
#define KVL_CALL(Format, kFormat) multiply_all<Format, kFormat>(item)
  KVL_BY_FORMAT(item.format, KVL_CALL)
#undef KVL_CALL
}

void unpack_tile(const void* tile, int32_t format, int64_t inputs, float* out) {
#define KVL_CALL(Format, kFormat) \
  unpack_inputs<Format, kFormat>(static_cast<const char*>(tile), inputs, out)
  KVL_BY_FORMAT(format, KVL_CALL)
#undef KVL_CALL
}

void unpack_row(const void* tile, int32_t format, int64_t inputs, int32_t output, float* out) {
  const char* group = static_cast<const char*>(tile);
  alignas(64) float weights[kGroupInputs * kTileOutputs];
  for (int64_t first = 0; first < inputs; first += kGroupInputs) {
    unpack_tile(group, format, kGroupInputs, weights);
    for (int i = 0; i < kGroupInputs; ++i) {
      out[first + i] = weights[i * kTileOutputs + output];
    }
    group += kTileGroupBytes[format];
  }
}

}  // namespace kvledger::cpu::KVL_ISA
