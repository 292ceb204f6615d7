// Append and paged attention, in every instruction set and KV format, against the reference.

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "core/cpu/kv_kernels.h"
#include "tests/check_throws.h"
#include "tests/kernels/kv_harness.h"

namespace kvledger::testing {
namespace {

using cpu::CpuKvKernels;
using cpu::InstructionSet;
using cpu::ThreadPool;

// Largest difference to the reference. Values are at most 1 in size and a query reads what was
// stored, so a format's own rounding is on both sides; but a key that lies within rounding of a
// tie between two bf16 numbers may be stored as the other one.
double tolerance(KvFormat format) {
  return format == KvFormat::kBf16 ? 2e-3 : 2e-5;
}

std::string describe(InstructionSet set, const KvCase& shape) {
  return std::string(cpu::name(set)) + " " + std::string(name(shape.format)) + " head_dim " +
         std::to_string(shape.head_dim) + " kv_heads " + std::to_string(shape.kv_heads) +
         " group " + std::to_string(shape.group) + " block_tokens " +
         std::to_string(shape.block_tokens);
}

using Chunk = KvHarness::Chunk;

// Compares outputs of one step with the reference: every token of short chunks, of long ones the
// first, the last and every 41st.
void check_step(KvHarness& harness, const KvCase& shape, CpuKvKernels& kernels,
                const std::vector<Chunk>& chunks) {
  const auto outputs = harness.step(kernels, chunks);
  double worst = 0;
  for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
    std::size_t at = 0;
    for (const Chunk& chunk : chunks) {
      for (std::int64_t i = 0; i < chunk.tokens; ++i) {
        const std::int64_t position = harness.length(chunk.sequence) - chunk.tokens + i;
        if (chunk.tokens > 100 && i % 41 != 0 && i != chunk.tokens - 1) {
          at += static_cast<std::size_t>(harness.output_width());
          continue;
        }
        for (std::int32_t head = 0; head < shape.kv_heads * shape.group; ++head) {
          for (const double want : harness.expected(chunk.sequence, position, layer, head)) {
            const double got = outputs[static_cast<std::size_t>(layer)][at++];
            worst = std::isfinite(got) ? std::max(worst, std::abs(got - want)) : INFINITY;
          }
        }
      }
    }
  }
  CHECK(worst < tolerance(shape.format));
}

void check_shape(InstructionSet set, const KvCase& shape, std::int64_t longest) {
  CAPTURE(describe(set, shape));
  ThreadPool pool(2);
  CpuKvKernels kernels(set, pool);
  KvHarness harness(shape, 4, longest + 40, 7);
  // Ragged: one long prompt, one short, one sequence that has no token yet; then decode tokens and
  // a chunk in one step; then only decode.
  check_step(harness, shape, kernels, {{0, longest}, {1, 5}});
  check_step(harness, shape, kernels, {{1, 1}, {0, 1}, {2, 17}});
  check_step(harness, shape, kernels, {{2, 1}, {0, 1}, {3, 1}, {1, 13}});
  check_step(harness, shape, kernels, {{3, 1}, {2, 1}, {1, 1}, {0, 1}});
}

std::vector<float> all_outputs(const std::vector<KvHarness::Outputs>& layers) {
  std::vector<float> all;
  for (const auto& outputs : layers) {
    all.insert(all.end(), outputs.begin(), outputs.end());
  }
  return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Outputs of every position of sequence 0, computed in chunks of the given size, with neighbours.
std::vector<std::vector<float>> outputs_by_position(const KvCase& shape, InstructionSet set,
                                                    int threads, std::int64_t length,
                                                    std::int64_t chunk, bool neighbours) {
  ThreadPool pool(threads);
  CpuKvKernels kernels(set, pool);
  KvHarness harness(shape, 3, length, 11);
  std::vector<std::vector<float>> result;
  while (harness.length(0) < length) {
    const std::int64_t tokens = std::min(chunk, length - harness.length(0));
    std::vector<Chunk> chunks;
    if (neighbours && harness.length(1) + 3 <= length) {
      chunks.push_back({1, 3});
    }
    chunks.push_back({0, tokens});
    if (neighbours && harness.length(2) < length) {
      chunks.push_back({2, 1});
    }
    const std::size_t before = neighbours && chunks.front().sequence == 1 ? 3 : 0;
    const auto layers = harness.step(kernels, chunks);
    const auto width = static_cast<std::size_t>(harness.output_width());
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      std::vector<float> row;
      for (const auto& outputs : layers) {
        const auto first = outputs.begin() + static_cast<std::ptrdiff_t>((before + t) * width);
        row.insert(row.end(), first, first + static_cast<std::ptrdiff_t>(width));
      }
      result.push_back(std::move(row));
    }
  }
  return result;
}

}  // namespace

// A wrong stride, tile or mask in any shape of heads would show as a difference to the reference.
TEST_CASE("attention equals the reference for every format, head size and grouping") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const KvFormat format : kKvFormats) {
      for (const std::int32_t head_dim : {64, 80, 96, 128, 256}) {
        KvCase shape;
        shape.format = format;
        shape.head_dim = head_dim;
        check_shape(set, shape, 45);
      }
      for (const std::int32_t group : {1, 3, 7, 8, 9, 16}) {
        KvCase shape;
        shape.format = format;
        shape.group = group;
        check_shape(set, shape, 45);
      }
    }
  }
}

// Blocks smaller than a register, and larger than a unit's tile, would break the slot arithmetic.
TEST_CASE("attention equals the reference for every block size") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const KvFormat format : kKvFormats) {
      for (const std::int32_t block_tokens : {8, 16, 32, 64, 128, 256}) {
        KvCase shape;
        shape.format = format;
        shape.block_tokens = block_tokens;
        shape.kv_heads = 1;
        check_shape(set, shape, 70);
      }
    }
  }
}

// A mistake in merging units, or in cutting long contexts into items, shows only past one unit.
TEST_CASE("attention equals the reference over several units") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const KvFormat format : kKvFormats) {
      KvCase shape;
      shape.format = format;
      shape.kv_heads = 1;
      shape.layers = 1;
      check_shape(set, shape, 2 * CpuKvKernels::kUnitKeys + 77);
    }
  }
}

// If the batch, the chunking or the threads changed a bit, the same seed would not give the same
// tokens, and a preempted sequence would go on differently.
TEST_CASE("outputs do not depend on chunks, neighbours or threads, bit for bit") {
  const std::int64_t length = CpuKvKernels::kUnitKeys + 90;
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const KvFormat format : kKvFormats) {
      KvCase shape;
      shape.format = format;
      shape.layers = 1;
      CAPTURE(describe(set, shape));
      const auto whole = outputs_by_position(shape, set, 1, length, length, false);
      for (const std::int64_t chunk : {1, 7, 64, 257}) {
        for (const int threads : {1, 2, 3}) {
          const bool neighbours = threads != 1;
          const auto cut = outputs_by_position(shape, set, threads, length, chunk, neighbours);
          std::size_t different = 0;
          for (std::size_t p = 0; p < whole.size(); ++p) {
            different += same_bits(whole[p], cut[p]) ? 0 : 1;
          }
          CAPTURE(chunk);
          CAPTURE(threads);
          CHECK(different == 0);
        }
      }
    }
  }
}

// 512-bit and 256-bit kernels do the same operations in the same order; a difference would mean
// that one of them does not do what its source says.
TEST_CASE("AVX2 and AVX-512 agree bit for bit") {
  const auto sets = cpu::supported_instruction_sets();
  if (sets.back() != InstructionSet::kAvx512) {
    MESSAGE("skipped: this machine has no AVX-512");
    return;
  }
  KvCase shape;
  shape.format = KvFormat::kBf16;
  KvHarness wide(shape, 2, 100, 3);
  KvHarness narrow(shape, 2, 100, 3);
  ThreadPool pool(1);
  CpuKvKernels avx512(InstructionSet::kAvx512, pool);
  CpuKvKernels avx2(InstructionSet::kAvx2, pool);
  const std::vector<Chunk> chunks = {{0, 50}, {1, 1}};
  CHECK(same_bits(all_outputs(wide.step(avx512, chunks)), all_outputs(narrow.step(avx2, chunks))));
}

// A kernel that reads a slot it should not would spread the NaN that stands there; here the slots
// past the end of both sequences are NaN, and so is everything of a sequence that left.
TEST_CASE("slots that were not written are never read") {
  for (const InstructionSet set : cpu::supported_instruction_sets()) {
    for (const KvFormat format : kKvFormats) {
      KvCase shape;
      shape.format = format;
      ThreadPool pool(2);
      CpuKvKernels kernels(set, pool);
      KvHarness harness(shape, 2, 64, 5);
      for (int step = 0; step < 33; ++step) {
        for (const auto& outputs : harness.step(kernels, {{0, 1}, {1, 1}})) {
          for (const float value : outputs) {
            REQUIRE(std::isfinite(value));
          }
        }
      }
    }
  }
}

// Block ids times block bytes pass 2^31 and 2^32 in any pool worth having; 32-bit arithmetic
// would land in another block. The views' strides are made so large that small ids do it.
TEST_CASE("byte offsets are 64 bits wide") {
  const std::int64_t stride = (std::int64_t{1} << 32) + 64;
  KvView view;
  view.base = nullptr;
  view.block_stride = stride;
  view.layer_stride = 4096;
  view.region_stride = 64;
  const auto offset = reinterpret_cast<std::intptr_t>(view.region(3, 2, 1));
  CHECK(offset == 3 * stride + 2 * 4096 + 64);
}

// In a pool of SmolLM2's shape, elements of blocks past 11,650 lie beyond 2^31 and bytes beyond
// 2^32. The memory is mapped but only the pages in use exist.
TEST_CASE("blocks far into a large pool are written and read like any others") {
  KvCase shape;
  shape.format = KvFormat::kBf16;
  shape.kv_heads = 3;
  shape.layers = 30;
  const std::vector<std::int32_t> far = {0, 11'649, 11'650, 11'651, 11'999};
  const std::vector<std::int32_t> near = {3, 1, 0, 2, 4};
  const KvLayout layout(KvGeometry{shape.layers, shape.kv_heads, shape.head_dim}, 32);
  const auto bytes = static_cast<std::size_t>(layout.block_bytes().value() * 12'000);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  std::optional<Arena> small = Arena::take(ByteCount{layout.block_bytes().value() * 5});
  ThreadPool pool(1);
  CpuKvKernels kernels(cpu::supported_instruction_sets().back(), pool);
  KvHarness far_harness(shape, static_cast<std::byte*>(memory), far);
  KvHarness near_harness(shape, small->data(), near);
  for (const std::int64_t tokens : {150, 1, 9}) {
    const auto far_outputs = all_outputs(far_harness.step(kernels, {{0, tokens}}));
    CHECK(same_bits(far_outputs, all_outputs(near_harness.step(kernels, {{0, tokens}}))));
  }
  for (std::size_t i = 0; i < far.size(); ++i) {
    const auto size = layout.block_bytes().value();
    const bool same =
        std::memcmp(static_cast<std::byte*>(memory) + far[i] * size, small->data() + near[i] * size,
                    static_cast<std::size_t>(size)) == 0;
    CHECK(same);
  }
  munmap(memory, bytes);
}

// Batches with padding, as a plan may contain, must not disturb their neighbours.
TEST_CASE("a sequence of no tokens is legal padding") {
  KvCase shape;
  ThreadPool pool(1);
  CpuKvKernels kernels(InstructionSet::kPortable, pool);
  KvHarness harness(shape, 3, 40, 9);
  check_step(harness, shape, kernels, {{0, 3}, {1, 0}, {2, 2}});
  check_step(harness, shape, kernels, {{1, 0}, {0, 1}});
}

// A table row that cannot hold the context would send a token into somebody else's block.
TEST_CASE("a context longer than its table row breaks an invariant") {
  KvCase shape;
  ThreadPool pool(1);
  CpuKvKernels kernels(InstructionSet::kPortable, pool);
  KvHarness harness(shape, 1, 16, 9);
  CHECK_BREAKS(harness.step(kernels, {{0, 17}}));
}

}  // namespace kvledger::testing
