// The likeliest token of each row of logits: what every greedy sequence takes.
//
// A token is the first of its row's largest logits. A row whose largest logit is not finite, or
// that holds NaN anywhere, has none. Any thread may call this; it works alone, without a pool.

#pragma once

#include <cstdint>
#include <span>

#include "core/cpu/instruction_set.h"
#include "core/cpu/row_kernels.h"

namespace kvledger::cpu {

// Stands where a row has no likeliest token.
inline constexpr std::int32_t kUnusableRow = -1;

// tokens[i] = place of the largest float of row i, or kUnusableRow. A row has at least one column.
void likeliest(InstructionSet set, const ConstMatrix& logits, std::span<std::int32_t> tokens);

}  // namespace kvledger::cpu
