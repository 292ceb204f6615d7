#include <pybind11/stl.h>

#include <memory>
#include <new>
#include <string>

#include "core/arena.h"
#include "core/bindings/bindings.h"
#include "core/cpu/block_copy.h"
#include "core/kernels.h"
#include "core/kv_format.h"

namespace py = pybind11;

namespace kvledger::bindings {
namespace {

KvFormat format_named(const std::string& text) {
  const std::optional<KvFormat> format = kv_format_named(text);
  require(format.has_value(), "unknown KV format; known are f32 and bf16");
  return *format;
}

KvLayout make_layout(std::int32_t layers, std::int32_t kv_heads, std::int32_t head_dim,
                     std::int32_t block_tokens) {
  require(layers >= 1 && kv_heads >= 1, "layers and kv_heads must be at least 1");
  require(is_head_dim(head_dim), "head_dim must be a multiple of 16 from 16 to 256");
  require(is_block_tokens(block_tokens), "block_tokens must be a power of two from 8 to 256");
  return KvLayout(KvGeometry{layers, kv_heads, head_dim}, block_tokens);
}

// The arena and its layout, seen in one format.
class KvMemory {
 public:
  KvMemory(const KvLayout& layout, const std::string& format, std::int64_t blocks)
      : layout_(layout), format_(format_named(format)), blocks_(blocks) {
    require(blocks >= 1, "blocks must be at least 1");
    std::optional<Arena> arena = Arena::take(ByteCount{layout.block_bytes().value() * blocks});
    if (!arena) {
      throw std::bad_alloc();
    }
    arena_ = std::make_unique<Arena>(std::move(*arena));
  }

  KvView view() const noexcept { return paged_view(layout_, format_, arena_->data()); }

  // The same bytes as [layer][token]: every layer's blocks side by side, as memory without paging
  // would be. For comparison in benchmarks.
  KvView contiguous_view() const noexcept {
    KvView view = paged_view(layout_, format_, arena_->data());
    view.block_stride = layout_.layer_bytes().value();
    view.layer_stride = layout_.layer_bytes().value() * blocks_;
    return view;
  }

  void copy_blocks(const Array<std::int32_t>& source, const Array<std::int32_t>& target) const {
    require(source.size() == target.size(), "block arrays differ in length");
    for (py::ssize_t i = 0; i < source.size(); ++i) {
      require(is_block(source.at(i)) && is_block(target.at(i)) && source.at(i) != target.at(i),
              "a block cannot be copied from or to there");
    }
    const py::gil_scoped_release unlocked;
    kvledger::copy_blocks(arena_->data(), layout_.block_bytes(), as_span(source), as_span(target));
  }

  const KvLayout& layout() const noexcept { return layout_; }
  std::int64_t blocks() const noexcept { return blocks_; }
  std::string format() const { return std::string(name(format_)); }
  Arena& arena() const noexcept { return *arena_; }

 private:
  bool is_block(std::int32_t block) const noexcept { return block >= 0 && block < blocks_; }

  KvLayout layout_;
  KvFormat format_;
  std::int64_t blocks_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace

void bind_kv_memory(py::module_& module) {
  py::class_<KvLayout>(module, "KvLayout", "Bytes of KV memory; see core/kv_format.h.")
      .def(py::init(&make_layout), py::kw_only(), py::arg("layers"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("block_tokens"))
      .def_property_readonly("block_bytes",
                             [](const KvLayout& l) { return l.block_bytes().value(); })
      .def_property_readonly("region_bytes",
                             [](const KvLayout& l) { return l.region_bytes().value(); })
      .def_property_readonly("block_tokens", &KvLayout::block_tokens)
      .def_property_readonly("layers", [](const KvLayout& l) { return l.geometry().layers; })
      .def_property_readonly("kv_heads", [](const KvLayout& l) { return l.geometry().kv_heads; })
      .def_property_readonly("head_dim", [](const KvLayout& l) { return l.geometry().head_dim; })
      .def("slots_per_block",
           [](const KvLayout& l, const std::string& format) {
             return l.slots_per_block(format_named(format));
           })
      .def("tile_slots",
           [](const KvLayout& l, const std::string& format) {
             return l.tile_slots(format_named(format));
           })
      .def("value_offset",
           [](const KvLayout& l, const std::string& format) {
             return l.value_offset(format_named(format)).value();
           })
      .def("token_bytes", [](const KvLayout& l, const std::string& format) {
        return l.token_bytes(format_named(format)).value();
      });
  py::class_<KvView>(module, "KvView", "KV memory as kernels see it; see core/kernels.h.");
  py::class_<KvMemory>(module, "KvMemory", "The arena of all blocks, taken at once.")
      .def(py::init<const KvLayout&, const std::string&, std::int64_t>(), py::arg("layout"),
           py::arg("format"), py::arg("blocks"), py::call_guard<py::gil_scoped_release>(),
           "Raises MemoryError if the system has not enough.")
      .def("view", &KvMemory::view, py::keep_alive<0, 1>())
      .def("copy_blocks", &KvMemory::copy_blocks, py::arg("source").noconvert(),
           py::arg("target").noconvert(),
           "Copies block source[i] to block target[i], one after the other.")
      .def("contiguous_view", &KvMemory::contiguous_view, py::keep_alive<0, 1>())
      .def_property_readonly("layout", [](const KvMemory& m) { return m.layout(); })
      .def_property_readonly("blocks", &KvMemory::blocks)
      .def_property_readonly("format", &KvMemory::format)
      .def_property_readonly("bytes", [](const py::object& self) {
        const Arena& arena = self.cast<const KvMemory&>().arena();
        return py::array_t<std::uint8_t>(arena.size().value(),
                                         reinterpret_cast<std::uint8_t*>(arena.data()), self);
      });
  std::vector<std::string> formats;
  for (const KvFormat format : kKvFormats) {
    formats.emplace_back(name(format));
  }
  module.attr("KV_FORMATS") = py::tuple(py::cast(formats));
}

}  // namespace kvledger::bindings
