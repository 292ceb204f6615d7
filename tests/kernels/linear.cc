// Linear layers in every instruction set and weight format.

#include <cmath>
#include <cstring>
#include <string>

#include "core/cpu/row_kernels.h"
#include "tests/check_throws.h"
#include "tests/kernels/reference.h"

namespace kvledger::testing {
namespace {

using cpu::ConstMatrix;
using cpu::InstructionSet;
using cpu::Matrix;
using cpu::PackedWeight;
using cpu::RowKernels;
using cpu::ThreadPool;
using cpu::WeightFormat;

constexpr WeightFormat kFormats[] = {WeightFormat::kF32,  WeightFormat::kBf16, WeightFormat::kF16,
                                     WeightFormat::kQ8_0, WeightFormat::kQ4_0, WeightFormat::kQ4_1};

double half_value(std::uint16_t half) {
  const int exponent = half >> 10 & 31;
  const double fraction = half & 1023;
  const double magnitude =
      exponent == 0 ? fraction * 0x1p-24 : (1024 + fraction) * std::ldexp(1.0, exponent - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

struct Stored {
  std::vector<std::byte> bytes;  // as GGUF stores them
  std::vector<double> values;    // what they stand for, [outputs][inputs]
};

template <class T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof(value));
}

// A random half in the range of real scales, subnormals and negatives among them.
std::uint16_t random_half(Random& random) {
  const auto sign = static_cast<std::uint16_t>(random.below(2) << 15);
  return static_cast<std::uint16_t>(sign | random.below(14 << 10));
}

// One group of 32 weights, written down from the definition of the format.
void append_group(WeightFormat format, Random& random, Stored& stored) {
  const auto nibbles = [&](double d, double m) {
    int numbers[32];
    for (int& number : numbers) {
      number = static_cast<int>(random.below(16));
    }
    for (int i = 0; i < 16; ++i) {
      append(stored.bytes, static_cast<std::uint8_t>(numbers[i] | numbers[i + 16] << 4));
    }
    for (const int number : numbers) {
      stored.values.push_back(static_cast<float>(d * number + m));
    }
  };
  if (format == WeightFormat::kQ4_0 || format == WeightFormat::kQ4_1) {
    const std::uint16_t d = random_half(random);
    append(stored.bytes, d);
    double m = -8.0 * half_value(d);
    if (format == WeightFormat::kQ4_1) {
      const std::uint16_t half = random_half(random);
      append(stored.bytes, half);
      m = half_value(half);
    }
    nibbles(half_value(d), m);
    return;
  }
  const std::uint16_t d = random_half(random);
  if (format == WeightFormat::kQ8_0) {
    append(stored.bytes, d);
  }
  for (int i = 0; i < 32; ++i) {
    const float value = random.uniform();
    if (format == WeightFormat::kF32) {
      append(stored.bytes, value);
      stored.values.push_back(value);
    } else if (format == WeightFormat::kBf16) {
      const float rounded = rounded_to_bf16(value);
      std::uint32_t bits;
      std::memcpy(&bits, &rounded, sizeof(bits));
      append(stored.bytes, static_cast<std::uint16_t>(bits >> 16));
      stored.values.push_back(rounded);
    } else if (format == WeightFormat::kF16) {
      const std::uint16_t half = random_half(random);
      append(stored.bytes, half);
      stored.values.push_back(half_value(half));
    } else {
      const auto number = static_cast<std::int8_t>(random.below(256) - 128);
      append(stored.bytes, number);
      stored.values.push_back(half_value(d) * number);
    }
  }
}

Stored random_weights(WeightFormat format, std::int64_t outputs, std::int64_t inputs,
                      std::uint64_t seed) {
  Random random(seed);
  Stored stored;
  for (std::int64_t i = 0; i < outputs * inputs / 32; ++i) {
    append_group(format, random, stored);
  }
  return stored;
}

PackedWeight packed(WeightFormat format, const Stored& stored, std::int64_t outputs,
                    std::int64_t inputs) {
  PackedWeight weight(format, outputs, inputs);
  weight.set_rows(0, stored.bytes);
  return weight;
}

std::vector<float> run(RowKernels& kernels, const PackedWeight& weight, const std::vector<float>& x,
                       std::int64_t rows) {
  std::vector<float> y(static_cast<std::size_t>(rows * weight.outputs()), NAN);
  kernels.linear(weight, ConstMatrix{x.data(), rows, weight.inputs(), weight.inputs()},
                 Matrix{y.data(), rows, weight.outputs(), weight.outputs()}, false);
  return y;
}

}  // namespace

// A number in the wrong place of a packed tile would change the sums.
TEST_CASE("x W^T equals the reference in every format, whatever the number of rows") {
  const std::int64_t inputs = 96;
  const std::int64_t outputs = 70;  // two tiles and part of a third
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(2);
    RowKernels kernels(set, pool);
    for (const WeightFormat format : kFormats) {
      const Stored stored = random_weights(format, outputs, inputs, 3);
      const PackedWeight weight = packed(format, stored, outputs, inputs);
      for (const std::int64_t rows : {1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 24, 29, 200}) {
        Random random(5);
        const std::vector<float> x = random_floats(random, rows * inputs, 1.0F);
        const std::vector<float> y = run(kernels, weight, x, rows);
        double worst = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t o = 0; o < outputs; ++o) {
            double want = 0;
            double size = 0;
            for (std::int64_t i = 0; i < inputs; ++i) {
              const double term = static_cast<double>(x[static_cast<std::size_t>(r * inputs + i)]) *
                                  stored.values[static_cast<std::size_t>(o * inputs + i)];
              want += term;
              size += std::abs(term);
            }
            const double got = y[static_cast<std::size_t>(r * outputs + o)];
            worst = std::max(worst, std::abs(got - want) / (size + 1e-30));
          }
        }
        CAPTURE(std::string(cpu::name(set)) + " " + std::string(cpu::name(format)));
        CAPTURE(rows);
        CHECK(worst < 1e-6);
      }
    }
  }
}

// If a row's result depended on how many rows there are, batches would change the tokens.
TEST_CASE("a row's result does not depend on the other rows, bit for bit") {
  const std::int64_t inputs = 64;
  const std::int64_t outputs = 64;
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool one(1);
    ThreadPool three(3);
    RowKernels alone(set, one);
    RowKernels together(set, three);
    for (const WeightFormat format : kFormats) {
      const PackedWeight weight =
          packed(format, random_weights(format, outputs, inputs, 9), outputs, inputs);
      Random random(1);
      const std::int64_t rows = 301;
      const std::vector<float> x = random_floats(random, rows * inputs, 1.0F);
      const std::vector<float> all = run(together, weight, x, rows);
      for (const std::int64_t row : {0, 6, 11, 12, 150, 300}) {
        const std::vector<float> just_one(x.begin() + row * inputs, x.begin() + (row + 1) * inputs);
        const std::vector<float> y = run(alone, weight, just_one, 1);
        CHECK(std::memcmp(y.data(), all.data() + row * outputs, sizeof(float) * outputs) == 0);
      }
    }
  }
}

// Keeping weights as stored must give the very tokens that dequantized weights give.
TEST_CASE("stored weights and their floats give the same results, bit for bit") {
  const std::int64_t inputs = 96;
  const std::int64_t outputs = 40;
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(1);
    RowKernels kernels(set, pool);
    for (const WeightFormat format : kFormats) {
      const PackedWeight weight =
          packed(format, random_weights(format, outputs, inputs, 21), outputs, inputs);
      std::vector<float> floats(static_cast<std::size_t>(outputs * inputs));
      kernels.unpack(weight, Matrix{floats.data(), outputs, inputs, inputs});
      PackedWeight as_floats(WeightFormat::kF32, outputs, inputs);
      as_floats.set_rows(0, std::as_bytes(std::span<const float>(floats)));
      for (const std::int64_t rows : {1, 5, 40}) {
        Random random(2);
        const std::vector<float> x = random_floats(random, rows * inputs, 1.0F);
        const std::vector<float> a = run(kernels, weight, x, rows);
        const std::vector<float> b = run(kernels, as_floats, x, rows);
        CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
      }
    }
  }
}

// Dequantizing must give exactly what GGUF defines, not nearly.
TEST_CASE("unpack and embed give the defined values exactly") {
  const std::int64_t inputs = 64;
  const std::int64_t outputs = 45;
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(2);
    RowKernels kernels(set, pool);
    for (const WeightFormat format : kFormats) {
      const Stored stored = random_weights(format, outputs, inputs, 33);
      const PackedWeight weight = packed(format, stored, outputs, inputs);
      std::vector<float> all(static_cast<std::size_t>(outputs * inputs));
      kernels.unpack(weight, Matrix{all.data(), outputs, inputs, inputs});
      for (std::size_t i = 0; i < all.size(); ++i) {
        REQUIRE(all[i] == static_cast<float>(stored.values[i]));
      }
      const std::vector<std::int32_t> ids = {44, 0, 31, 32, 44};
      std::vector<float> rows(ids.size() * inputs);
      kernels.embed(weight, ids, Matrix{rows.data(), 5, inputs, inputs});
      for (std::size_t i = 0; i < ids.size(); ++i) {
        CHECK(std::memcmp(rows.data() + i * inputs, all.data() + ids[i] * inputs,
                          sizeof(float) * inputs) == 0);
      }
    }
  }
}

// The residual is added after the whole sum, or the order of operations would differ by path.
TEST_CASE("accumulate adds the product to what is there") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(1);
    RowKernels kernels(set, pool);
    const Stored stored = random_weights(WeightFormat::kQ4_1, 40, 32, 4);
    const PackedWeight weight = packed(WeightFormat::kQ4_1, stored, 40, 32);
    for (const std::int64_t rows : {1, 14}) {
      Random random(6);
      const std::vector<float> x = random_floats(random, rows * 32, 1.0F);
      const std::vector<float> product = run(kernels, weight, x, rows);
      std::vector<float> y = random_floats(random, rows * 40, 1.0F);
      const std::vector<float> before = y;
      kernels.linear(weight, ConstMatrix{x.data(), rows, 32, 32}, Matrix{y.data(), rows, 40, 40},
                     true);
      for (std::size_t i = 0; i < y.size(); ++i) {
        REQUIRE(y[i] == before[i] + product[i]);
      }
    }
  }
}

// Queries and keys of a GGUF are stored in another order; a permutation that is wrong or skipped
// gives a model that talks nonsense.
TEST_CASE("set_rows stacks matrices and follows the order it is given") {
  ThreadPool pool(1);
  RowKernels kernels(InstructionSet::kPortable, pool);
  const std::vector<float> first(3 * 32, 1.0F);
  std::vector<float> second;
  for (int row = 0; row < 3; ++row) {
    second.insert(second.end(), 32, static_cast<float>(10 + row));
  }
  PackedWeight weight(WeightFormat::kF32, 6, 32);
  weight.set_rows(0, std::as_bytes(std::span<const float>(first)));
  const std::vector<std::int64_t> order = {2, 0, 1};
  weight.set_rows(3, std::as_bytes(std::span<const float>(second)), order);
  std::vector<float> out(6 * 32);
  kernels.unpack(weight, Matrix{out.data(), 6, 32, 32});
  const float expected[] = {1, 1, 1, 12, 10, 11};
  for (int row = 0; row < 6; ++row) {
    CHECK(out[static_cast<std::size_t>(row) * 32] == expected[row]);
  }
}

// What does not fit must be noticed when it is packed, not when it is read.
TEST_CASE("weights of the wrong shape break an invariant") {
  CHECK_BREAKS(PackedWeight(WeightFormat::kF32, 4, 48));
  CHECK_BREAKS(PackedWeight(WeightFormat::kF32, 0, 32));
  PackedWeight weight(WeightFormat::kF32, 2, 32);
  const std::vector<float> three(3 * 32, 0.0F);
  CHECK_BREAKS(weight.set_rows(0, std::as_bytes(std::span<const float>(three))));
  const std::vector<std::int64_t> order = {0, 2};
  CHECK_BREAKS(weight.set_rows(0, std::as_bytes(std::span<const float>(three).first(64)), order));
}

}  // namespace kvledger::testing
