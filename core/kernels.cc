#include "core/kernels.h"

namespace kvledger {

KvView paged_view(const KvLayout& layout, KvFormat format, std::byte* base) noexcept {
  KvView view;
  view.base = base;
  view.block_stride = layout.block_bytes().value();
  view.layer_stride = layout.layer_bytes().value();
  view.region_stride = layout.region_bytes().value();
  view.value_offset = layout.value_offset(format).value();
  view.slots_per_block = layout.slots_per_block(format);
  view.tile_slots = layout.tile_slots(format);
  view.layers = layout.geometry().layers;
  view.kv_heads = layout.geometry().kv_heads;
  view.head_dim = layout.geometry().head_dim;
  view.format = format;
  return view;
}

}  // namespace kvledger
