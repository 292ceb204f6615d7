#include "core/cpu/likeliest.h"

#include "core/check.h"

namespace kvledger::cpu {

void likeliest(InstructionSet set, const ConstMatrix& logits, std::span<std::int32_t> tokens) {
  KVL_CHECK_GE(logits.columns, 1);
  KVL_CHECK_EQ(logits.rows, static_cast<std::int64_t>(tokens.size()));
  const KernelTable& table = kernel_table(set);
  std::int64_t row = 0;
  for (std::int32_t& token : tokens) {
    token = table.likeliest(logits.data + row * logits.stride, logits.columns);
    ++row;
  }
}

}  // namespace kvledger::cpu
