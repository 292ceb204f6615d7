// Row-wise operations in every instruction set.

#include <cmath>
#include <numeric>

#include "core/cpu/row_kernels.h"
#include "tests/check_throws.h"
#include "tests/kernels/reference.h"

namespace kvledger::testing {
namespace {

using cpu::ConstMatrix;
using cpu::InstructionSet;
using cpu::Matrix;
using cpu::RowKernels;
using cpu::ThreadPool;

}  // namespace

// Rows whose length is no multiple of a register have a tail that is easily forgotten.
TEST_CASE("rms_norm equals the reference") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(2);
    RowKernels kernels(set, pool);
    for (const std::int64_t length : {1, 15, 16, 17, 576, 577}) {
      Random random(4);
      const std::int64_t rows = 19;
      const std::vector<float> x = random_floats(random, rows * length, 3.0F);
      const std::vector<float> weight = random_floats(random, length, 2.0F);
      std::vector<float> out(static_cast<std::size_t>(rows * length), NAN);
      kernels.rms_norm(ConstMatrix{x.data(), rows, length, length}, weight, 1e-5F,
                       Matrix{out.data(), rows, length, length});
      double worst = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* row = x.data() + r * length;
        const double squares = std::inner_product(row, row + length, row, 0.0);
        const double scale = 1.0 / std::sqrt(squares / static_cast<double>(length) + 1e-5);
        for (std::int64_t i = 0; i < length; ++i) {
          const double want = row[i] * scale * weight[static_cast<std::size_t>(i)];
          worst = std::max(worst, std::abs(out[static_cast<std::size_t>(r * length + i)] - want));
        }
      }
      CHECK(worst < 2e-6);
    }
  }
}

// e^x far from zero must neither overflow nor turn into NaN on the way.
TEST_CASE("silu_multiply equals the reference over the whole range of floats") {
  const std::vector<float> gates = {0.0F,   1.0F,  -1.0F,  20.0F, -20.0F, 87.0F,
                                    -87.0F, 90.0F, -90.0F, 1e4F,  -1e4F,  3e38F};
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(1);
    RowKernels kernels(set, pool);
    Random random(8);
    std::vector<float> gate = random_floats(random, 1001, 30.0F);
    gate.insert(gate.end(), gates.begin(), gates.end());
    const auto columns = static_cast<std::int64_t>(gate.size());
    std::vector<float> x = gate;
    const std::vector<float> up = random_floats(random, columns, 1.0F);
    x.insert(x.end(), up.begin(), up.end());
    std::vector<float> out(gate.size(), NAN);
    kernels.silu_multiply(ConstMatrix{x.data(), 1, 2 * columns, 2 * columns},
                          Matrix{out.data(), 1, columns, columns});
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double silu = gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i])));
      const double want = silu * up[i];
      CAPTURE(gate[i]);
      CHECK(std::abs(out[i] - want) <= 1e-6 * std::abs(want) + 1e-30);
    }
  }
}

// The yardstick of every bandwidth figure must read all bytes.
TEST_CASE("read_memory sums every word") {
  std::vector<std::uint64_t> words(1 << 19);
  std::iota(words.begin(), words.end(), std::uint64_t{1});
  const std::uint64_t want = (std::uint64_t{1} << 18) * ((std::uint64_t{1} << 19) + 1);
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    ThreadPool pool(2);
    RowKernels kernels(set, pool);
    CHECK(kernels.read_memory(std::as_bytes(std::span<const std::uint64_t>(words))) == want);
  }
}

}  // namespace kvledger::testing
