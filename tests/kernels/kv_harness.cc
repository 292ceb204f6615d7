#include "tests/kernels/kv_harness.h"

#include <cmath>
#include <cstring>
#include <utility>

namespace kvledger::testing {
namespace {

constexpr float kScoreSpread = 4.0F;  // so that the softmax is neither flat nor a single peak

}  // namespace

KvHarness::KvHarness(const KvCase& shape, std::int64_t sequences, std::int64_t tokens_max,
                     std::uint64_t seed)
    : shape_(shape),
      layout_(KvGeometry{shape.layers, shape.kv_heads, shape.head_dim}, shape.block_tokens),
      blocks_per_sequence_(layout_.blocks_for(tokens_max, shape.format).value()),
      arena_(
          Arena::take(ByteCount{layout_.block_bytes().value() * blocks_per_sequence_ * sequences})),
      view_(paged_view(layout_, shape.format, arena_->data())),
      tables_(static_cast<std::size_t>(blocks_per_sequence_ * sequences)),
      lengths_(static_cast<std::size_t>(sequences), 0),
      tokens_max_(tokens_max) {
  std::memset(arena_->data(), 0xff, static_cast<std::size_t>(arena_->size().value()));
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    tables_[i] = static_cast<std::int32_t>(i);
  }
  Random random(seed);
  for (std::size_t i = tables_.size(); i > 1; --i) {
    std::swap(tables_[i - 1],
              tables_[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  make_angles();
}

KvHarness::KvHarness(const KvCase& shape, std::byte* memory, std::vector<std::int32_t> blocks)
    : shape_(shape),
      layout_(KvGeometry{shape.layers, shape.kv_heads, shape.head_dim}, shape.block_tokens),
      blocks_per_sequence_(static_cast<std::int64_t>(blocks.size())),
      view_(paged_view(layout_, shape.format, memory)),
      tables_(std::move(blocks)),
      lengths_(1, 0),
      tokens_max_(blocks_per_sequence_ * layout_.slots_per_block(shape.format)) {
  make_angles();
}

void KvHarness::make_angles() {
  const std::int64_t half = shape_.head_dim / 2;
  for (std::int64_t position = 0; position < tokens_max_; ++position) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double exponent = static_cast<double>(i) / static_cast<double>(half);
      const double angle = static_cast<double>(position) * std::pow(1000.0, -exponent);
      cosine_.push_back(static_cast<float>(std::cos(angle)));
      sine_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

// Queries, keys and values of one token before rotation.
std::vector<float> KvHarness::heads_of(std::int64_t sequence, std::int64_t position,
                                       std::int32_t layer) const {
  Random random(static_cast<std::uint64_t>((sequence * 100'003 + position) * 31 + layer));
  const std::int64_t heads = std::int64_t{shape_.kv_heads} * (shape_.group + 2);
  std::vector<float> values = random_floats(random, heads * shape_.head_dim, 1.0F);
  const std::int64_t queries = std::int64_t{shape_.kv_heads} * shape_.group * shape_.head_dim;
  for (std::int64_t i = 0; i < queries; ++i) {
    values[static_cast<std::size_t>(i)] *= kScoreSpread;
  }
  // A key that stands out now and then, and a value of another size.
  if (position % 7 == 3) {
    for (std::int64_t i = queries; i < queries + shape_.head_dim; ++i) {
      values[static_cast<std::size_t>(i)] *= 3.0F;
    }
  }
  return values;
}

KvHarness::Tokens KvHarness::advance(const std::vector<Chunk>& chunks) {
  Tokens tokens;
  for (const Chunk& chunk : chunks) {
    std::int64_t& length = lengths_[static_cast<std::size_t>(chunk.sequence)];
    for (std::int64_t i = 0; i < chunk.tokens; ++i) {
      tokens.positions.push_back(static_cast<std::int32_t>(length + i));
    }
    length += chunk.tokens;
    tokens.query_start.push_back(static_cast<std::int32_t>(tokens.positions.size()));
    tokens.context_length.push_back(static_cast<std::int32_t>(length));
    tokens.rows.push_back(static_cast<std::int32_t>(chunk.sequence));
  }
  return tokens;
}

std::vector<KvHarness::Outputs> KvHarness::step(cpu::CpuKvKernels& kernels,
                                                const std::vector<Chunk>& chunks) {
  const Tokens tokens = advance(chunks);
  BatchView batch;
  batch.sequences = static_cast<std::int64_t>(chunks.size());
  batch.tokens = static_cast<std::int64_t>(tokens.positions.size());
  batch.query_start = tokens.query_start.data();
  batch.context_length = tokens.context_length.data();
  batch.rows = tokens.rows.data();
  batch.positions = tokens.positions.data();
  batch.block_tables = tables_.data();
  batch.table_width = blocks_per_sequence_;
  const std::int32_t heads = shape_.kv_heads * shape_.group;
  kernels.begin_step(view_, batch, heads);
  std::vector<Outputs> outputs;
  for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
    std::vector<float> qkv;
    for (std::size_t s = 0; s < chunks.size(); ++s) {
      for (std::int32_t t = tokens.query_start[s]; t < tokens.query_start[s + 1]; ++t) {
        const auto row =
            heads_of(chunks[s].sequence, tokens.positions[static_cast<std::size_t>(t)], layer);
        qkv.insert(qkv.end(), row.begin(), row.end());
      }
    }
    const std::int64_t stride = std::int64_t{heads + 2 * shape_.kv_heads} * shape_.head_dim;
    const QkvView view{qkv.data(), stride, heads};
    kernels.kv_append(layer, RotaryView{cosine_.data(), sine_.data(), tokens_max_}, view);
    Outputs out(static_cast<std::size_t>(batch.tokens * output_width()), NAN);
    kernels.paged_attention(layer, view, 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
                            out.data(), output_width());
    outputs.push_back(std::move(out));
  }
  return outputs;
}

// One head turned by the angles of its position.
std::vector<float> KvHarness::turned(const float* head, std::int64_t position) const {
  const std::int32_t half = shape_.head_dim / 2;
  std::vector<float> result(static_cast<std::size_t>(shape_.head_dim));
  for (std::int32_t i = 0; i < half; ++i) {
    const double a = head[i];
    const double b = head[half + i];
    const double c = cosine_[static_cast<std::size_t>(position * half + i)];
    const double s = sine_[static_cast<std::size_t>(position * half + i)];
    result[static_cast<std::size_t>(i)] = static_cast<float>(a * c - b * s);
    result[static_cast<std::size_t>(half + i)] = static_cast<float>(b * c + a * s);
  }
  return result;
}

// Keys, turned, and values of one token in the format they are stored in.
std::vector<float> KvHarness::stored_row(std::int64_t sequence, std::int64_t position,
                                         std::int32_t layer) const {
  const std::int64_t dim = shape_.head_dim;
  const std::int64_t queries = std::int64_t{shape_.kv_heads} * shape_.group;
  const std::vector<float> row = heads_of(sequence, position, layer);
  std::vector<float> stored;
  for (std::int32_t head = 0; head < shape_.kv_heads; ++head) {
    const std::vector<float> key = turned(row.data() + (queries + head) * dim, position);
    stored.insert(stored.end(), key.begin(), key.end());
  }
  stored.insert(stored.end(), row.begin() + (queries + shape_.kv_heads) * dim, row.end());
  for (float& value : stored) {
    value = stored_as(shape_.format, value);
  }
  return stored;
}

std::vector<double> KvHarness::expected(std::int64_t sequence, std::int64_t position,
                                        std::int32_t layer, std::int32_t head) {
  const std::int32_t dim = shape_.head_dim;
  const std::int32_t kv_head = head / shape_.group;
  std::vector<std::vector<float>>& stored = stored_[{sequence, layer}];
  for (auto p = static_cast<std::int64_t>(stored.size()); p <= position; ++p) {
    stored.push_back(stored_row(sequence, p, layer));
  }
  std::vector<const float*> keys;
  std::vector<const float*> values;
  for (std::int64_t p = 0; p <= position; ++p) {
    const float* row = stored[static_cast<std::size_t>(p)].data();
    keys.push_back(row + kv_head * dim);
    values.push_back(row + (shape_.kv_heads + kv_head) * dim);
  }
  const std::vector<float> row = heads_of(sequence, position, layer);
  const std::vector<float> query = turned(row.data() + head * dim, position);
  return attention(query.data(), keys, values, dim, 1.0F / std::sqrt(static_cast<float>(dim)));
}

}  // namespace kvledger::testing
