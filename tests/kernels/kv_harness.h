// Sequences that grow step by step through the KV kernels, next to a plain record of what was
// stored for each, so that every output can be compared with the naive reference.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/cpu/kv_kernels.h"
#include "core/kernels.h"
#include "tests/kernels/reference.h"

namespace kvledger::testing {

struct KvCase {
  KvFormat format = KvFormat::kF32;
  std::int32_t head_dim = 64;
  std::int32_t kv_heads = 2;
  std::int32_t group = 3;  // query heads per kv head
  std::int32_t block_tokens = 32;
  std::int32_t layers = 2;
};

class KvHarness {
 public:
  // Room for `sequences` sequences of at most `tokens_max` tokens, in blocks of shuffled order.
  // Memory that was not written is NaN in every format.
  KvHarness(const KvCase& shape, std::int64_t sequences, std::int64_t tokens_max,
            std::uint64_t seed);

  // The same over memory of the caller's, which is not filled, with these blocks for the first
  // sequence.
  KvHarness(const KvCase& shape, std::byte* memory, std::vector<std::int32_t> blocks);

  struct Chunk {
    std::int64_t sequence;
    std::int64_t tokens;
  };
  // Outputs of one layer, [token][query head][head_dim], tokens in the order of the chunks.
  using Outputs = std::vector<float>;

  // Computes the next tokens of some sequences in every layer; returns each layer's outputs.
  // What a token's queries, keys and values are depends on (sequence, position, layer) alone.
  std::vector<Outputs> step(cpu::CpuKvKernels& kernels, const std::vector<Chunk>& chunks);

  // The reference for one query head of one token.
  std::vector<double> expected(std::int64_t sequence, std::int64_t position, std::int32_t layer,
                               std::int32_t head);

  std::int64_t length(std::int64_t sequence) const {
    return lengths_[static_cast<std::size_t>(sequence)];
  }
  std::int64_t output_width() const {
    return std::int64_t{shape_.kv_heads} * shape_.group * shape_.head_dim;
  }
  const KvLayout& layout() const { return layout_; }

 private:
  struct Tokens {
    std::vector<std::int32_t> query_start{0};
    std::vector<std::int32_t> context_length;
    std::vector<std::int32_t> rows;
    std::vector<std::int32_t> positions;
  };

  void make_angles();
  Tokens advance(const std::vector<Chunk>& chunks);
  std::vector<float> heads_of(std::int64_t sequence, std::int64_t position,
                              std::int32_t layer) const;
  std::vector<float> turned(const float* head, std::int64_t position) const;
  std::vector<float> stored_row(std::int64_t sequence, std::int64_t position,
                                std::int32_t layer) const;

  KvCase shape_;
  KvLayout layout_;
  std::int64_t blocks_per_sequence_;
  std::optional<Arena> arena_;
  KvView view_;
  std::vector<std::int32_t> tables_;
  std::vector<std::int64_t> lengths_;
  std::vector<float> cosine_;
  std::vector<float> sine_;
  std::int64_t tokens_max_;
  // What the reference reads: by sequence and layer, a row of keys and values per position.
  std::map<std::pair<std::int64_t, std::int32_t>, std::vector<std::vector<float>>> stored_;
};

}  // namespace kvledger::testing
