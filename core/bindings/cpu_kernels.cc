#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/bindings/bindings.h"
#include "core/cpu/kv_kernels.h"
#include "core/cpu/likeliest.h"
#include "core/cpu/packed_weight.h"
#include "core/cpu/row_kernels.h"

namespace py = pybind11;

namespace kvledger::bindings {
namespace {

using cpu::ConstMatrix;
using cpu::InstructionSet;
using cpu::Matrix;
using cpu::PackedWeight;

constexpr const char* kContiguousFloats = "scales and angles are contiguous float32";

InstructionSet set_named(const std::string& text) {
  const std::vector<InstructionSet> supported = cpu::supported_instruction_sets();
  if (text == "auto") {
    return supported.back();
  }
  const std::optional<InstructionSet> set = cpu::instruction_set_named(text);
  require(set.has_value(), "unknown instruction set; known are auto, portable, avx2 and avx512");
  for (const InstructionSet candidate : supported) {
    if (candidate == *set) {
      return candidate;
    }
  }
  throw py::value_error("this machine does not run the instruction set " + text);
}

// One thread pool with the kernels that share it. Matrices come as the address of their first
// float, rows, columns and floats from one row to the next.
class CpuKernels {
 public:
  CpuKernels(int threads, const std::string& instruction_set)
      : set_(set_named(instruction_set)),
        pool_(checked_threads(threads)),
        rows_(set_, pool_),
        kv_(set_, pool_) {}

  std::string instruction_set() const { return std::string(cpu::name(set_)); }
  int threads() const noexcept { return pool_.threads(); }
  void barriers(std::int64_t rounds) { pool_.barriers(rounds); }
  cpu::RowKernels& rows() noexcept { return rows_; }
  cpu::CpuKvKernels& kv() noexcept { return kv_; }

 private:
  static int checked_threads(int threads) {
    require(threads >= 1 && threads <= 1024, "threads must be from 1 to 1024");
    return threads;
  }

  InstructionSet set_;
  cpu::ThreadPool pool_;
  cpu::RowKernels rows_;
  cpu::CpuKvKernels kv_;
};

template <class T>
T* at_address(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);  // of memory that the caller owns
}

// Work below this many floats is over before the GIL could be taken again.
constexpr std::int64_t kReleaseGilAbove = 1 << 14;

template <class Work>
void maybe_without_gil(std::int64_t floats, Work&& work) {
  if (floats > kReleaseGilAbove) {
    const py::gil_scoped_release release;
    work();
  } else {
    work();
  }
}

std::unique_ptr<PackedWeight> make_weight(const std::string& format, std::int64_t outputs,
                                          std::int64_t inputs) {
  const std::optional<cpu::WeightFormat> known = cpu::weight_format_named(format);
  require(known.has_value(), "unknown weight format");
  require(outputs >= 1 && inputs >= 1, "a weight has at least one output and one input");
  require(inputs % cpu::kInputsMultiple == 0, "the inputs of a weight are a multiple of 32");
  return std::make_unique<PackedWeight>(*known, outputs, inputs);
}

void set_weight_rows(PackedWeight& weight, std::int64_t first, const Array<std::uint8_t>& stored,
                     const Array<std::int64_t>& order) {
  const std::int64_t row_bytes = cpu::stored_row_bytes(weight.format(), weight.inputs()).value();
  require(stored.size() % row_bytes == 0, "stored bytes are not whole rows");
  const std::int64_t rows = stored.size() / row_bytes;
  require(first >= 0 && rows <= weight.outputs() - first, "more rows than the weight has outputs");
  require(order.size() == 0 || order.size() == rows, "order names another number of rows");
  for (const std::int64_t row : as_span(order)) {
    require(row >= 0 && row < rows, "order names a row that is not stored");
  }
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(stored.data()),
                                         static_cast<std::size_t>(stored.size()));
  const std::span<const std::int64_t> order_span = as_span(order);
  const py::gil_scoped_release release;
  weight.set_rows(first, bytes, order_span);
}

void bind_weight(py::module_& module) {
  py::class_<PackedWeight>(module, "PackedWeight",
                           "Weights of a linear layer, packed; see core/cpu/packed_weight.h.")
      .def(py::init(&make_weight), py::arg("format"), py::arg("outputs"), py::arg("inputs"))
      .def("set_rows", &set_weight_rows, py::arg("first"), py::arg("stored").noconvert(),
           py::arg("order").noconvert())
      .def_property_readonly("format",
                             [](const PackedWeight& w) { return std::string(name(w.format())); })
      .def_property_readonly("outputs", &PackedWeight::outputs)
      .def_property_readonly("inputs", &PackedWeight::inputs)
      .def_property_readonly("bytes", [](const PackedWeight& w) { return w.bytes().value(); });
}

void bind_weight_kernels(py::class_<CpuKernels>& kernels) {
  kernels
      .def(
          "linear",
          [](CpuKernels& self, const PackedWeight& weight, std::uintptr_t x, std::int64_t rows,
             std::int64_t x_stride, std::uintptr_t y, std::int64_t y_stride, bool accumulate) {
            const py::gil_scoped_release release;
            self.rows().linear(
                weight, ConstMatrix{at_address<const float>(x), rows, weight.inputs(), x_stride},
                Matrix{at_address<float>(y), rows, weight.outputs(), y_stride}, accumulate);
          },
          "y = x W^T, or y += x W^T.")
      .def(
          "embed",
          [](CpuKernels& self, const PackedWeight& weight, const Array<std::int32_t>& ids,
             std::uintptr_t out, std::int64_t out_stride) {
            for (const std::int32_t id : as_span(ids)) {
              require(id >= 0 && id < weight.outputs(), "token id outside the vocabulary");
            }
            const std::span<const std::int32_t> id_span = as_span(ids);
            const Matrix matrix{at_address<float>(out), ids.size(), weight.inputs(), out_stride};
            maybe_without_gil(matrix.rows * matrix.columns,
                              [&] { self.rows().embed(weight, id_span, matrix); });
          },
          "out[i] = row ids[i] of the weight, as floats.")
      .def(
          "unpack",
          [](CpuKernels& self, const PackedWeight& weight) {
            py::array_t<float> out({weight.outputs(), weight.inputs()});
            const Matrix matrix{out.mutable_data(), weight.outputs(), weight.inputs(),
                                weight.inputs()};
            {
              const py::gil_scoped_release release;
              self.rows().unpack(weight, matrix);
            }
            return out;
          },
          "float32 [outputs, inputs]: the weights dequantized.");
}

void bind_row_kernels(py::class_<CpuKernels>& kernels) {
  kernels
      .def(
          "rms_norm",
          [](CpuKernels& self, std::uintptr_t x, std::int64_t rows, std::int64_t x_stride,
             const py::array& weight, float epsilon, std::uintptr_t out, std::int64_t out_stride) {
            const auto scale = span_of<float>(weight, kContiguousFloats);
            const auto columns = static_cast<std::int64_t>(scale.size());
            maybe_without_gil(rows * columns, [&] {
              self.rows().rms_norm(ConstMatrix{at_address<const float>(x), rows, columns, x_stride},
                                   scale, epsilon,
                                   Matrix{at_address<float>(out), rows, columns, out_stride});
            });
          },
          "out = x * weight / sqrt(mean(x^2) + epsilon), row by row.")
      .def(
          "head_norm",
          [](CpuKernels& self, std::uintptr_t x, std::int64_t rows, std::int64_t columns,
             std::int64_t x_stride, const py::array& weight, float epsilon) {
            const auto scale = span_of<float>(weight, kContiguousFloats);
            require(!scale.empty() && columns % static_cast<std::int64_t>(scale.size()) == 0,
                    "the columns are not whole heads");
            maybe_without_gil(rows * columns, [&] {
              self.rows().head_norm(Matrix{at_address<float>(x), rows, columns, x_stride}, scale,
                                    epsilon);
            });
          },
          "The same for each head of a row, in place; a head is as long as the weight.")
      .def(
          "silu_multiply",
          [](CpuKernels& self, std::uintptr_t x, std::int64_t rows, std::int64_t columns,
             std::int64_t x_stride, std::uintptr_t out, std::int64_t out_stride) {
            maybe_without_gil(rows * columns, [&] {
              self.rows().silu_multiply(
                  ConstMatrix{at_address<const float>(x), rows, 2 * columns, x_stride},
                  Matrix{at_address<float>(out), rows, columns, out_stride});
            });
          },
          "out = silu(first `columns` of x) * next `columns` of x.");
}

// Rows of floats with nothing between the floats of a row; a copy where they lie otherwise.
py::array with_whole_rows(const py::array& x) {
  constexpr py::ssize_t kBytes = sizeof(float);
  const bool whole = x.shape(1) == 1 || x.strides(1) == kBytes;
  const bool apart = x.shape(0) <= 1 || x.strides(0) % kBytes == 0;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x.data()) % alignof(float) == 0;
  if (whole && apart && aligned) {
    return x;
  }
  py::array_t<float> copy({x.shape(0), x.shape(1)});
  copy[py::ellipsis()] = x;
  return copy;
}

class Likeliest {
 public:
  explicit Likeliest(const std::string& instruction_set) : set_(set_named(instruction_set)) {}

  py::array_t<std::int32_t> operator()(const py::array& logits) const;

 private:
  InstructionSet set_;
};

py::array_t<std::int32_t> Likeliest::operator()(const py::array& logits) const {
  if (!holds<float>(logits)) {
    throw py::type_error("logits are float32");
  }
  require(logits.ndim() == 2, "logits are [rows, vocabulary]");
  const std::int64_t columns = logits.shape(1);
  require(columns >= 1 && columns <= std::numeric_limits<std::int32_t>::max(),
          "the vocabulary must be from 1 to 2^31 - 1");
  const py::array rows = with_whole_rows(logits);
  const std::int64_t stride = rows.strides(0) / static_cast<py::ssize_t>(sizeof(float));
  const ConstMatrix matrix{static_cast<const float*>(rows.data()), rows.shape(0), columns, stride};
  py::array_t<std::int32_t> tokens(matrix.rows);
  const std::span<std::int32_t> out(tokens.mutable_data(), static_cast<std::size_t>(matrix.rows));
  maybe_without_gil(matrix.rows * columns, [&] { cpu::likeliest(set_, matrix, out); });
  return tokens;
}

void bind_kv_kernels(py::class_<CpuKernels>& kernels) {
  kernels
      .def(
          "begin_step",
          [](CpuKernels& self, const KvView& kv, const BatchView& batch, std::int32_t heads) {
            require(heads >= 1 && heads % kv.kv_heads == 0,
                    "query heads must be a multiple of KV heads");
            self.kv().begin_step(kv, batch, heads);
          },
          "Takes up a step. The view and the batch must live until the next one.")
      .def("kv_append",
           [](CpuKernels& self, std::int32_t layer, const py::array& cosine, const py::array& sine,
              std::uintptr_t qkv, std::int64_t stride, std::int32_t heads) {
             const auto cosines = span_of<float>(cosine, kContiguousFloats);
             const auto sines = span_of<float>(sine, kContiguousFloats);
             require(cosine.ndim() == 2 && sine.ndim() == 2 && cosine.shape(0) == sine.shape(0),
                     "cosine and sine are [positions, head_dim / 2]");
             const RotaryView rotary{cosines.data(), sines.data(), cosine.shape(0)};
             const py::gil_scoped_release release;
             self.kv().kv_append(layer, rotary, QkvView{at_address<float>(qkv), stride, heads});
           })
      .def("paged_attention",
           [](CpuKernels& self, std::int32_t layer, std::uintptr_t qkv, std::int64_t stride,
              std::int32_t heads, float scale, std::uintptr_t out, std::int64_t out_stride) {
             const py::gil_scoped_release release;
             self.kv().paged_attention(layer, QkvView{at_address<float>(qkv), stride, heads}, scale,
                                       at_address<float>(out), out_stride);
           });
}

}  // namespace

void bind_cpu_kernels(py::module_& module) {
  bind_weight(module);
  py::class_<CpuKernels> kernels(module, "CpuKernels",
                                 "The CPU kernels over a thread pool of their own; core/cpu/.");
  kernels
      .def(py::init<int, const std::string&>(), py::arg("threads"),
           py::arg("instruction_set") = "auto")
      .def_property_readonly("threads", &CpuKernels::threads)
      .def(
          "read_memory",
          [](CpuKernels& self, const Array<std::uint8_t>& bytes) {
            const std::span<const std::uint8_t> span = as_span(bytes);
            const py::gil_scoped_release release;
            return self.rows().read_memory(std::as_bytes(span));
          },
          "Reads all bytes once with all threads; for timing the memory. Returns a checksum.")
      .def(
          "barriers", [](CpuKernels& self, std::int64_t rounds) { self.barriers(rounds); },
          py::call_guard<py::gil_scoped_release>(),
          "Lets all threads meet `rounds` times; for timing how near they are to each other.")
      .def_property_readonly("instruction_set", &CpuKernels::instruction_set);
  bind_weight_kernels(kernels);
  bind_row_kernels(kernels);
  bind_kv_kernels(kernels);
  py::class_<Likeliest>(module, "Likeliest", "Finds the likeliest tokens; core/cpu/likeliest.h.")
      .def(py::init<const std::string&>(), py::arg("instruction_set") = "auto")
      .def("__call__", &Likeliest::operator(), py::arg("logits"),
           "int32 [rows]: the first of the largest of each row of float32 [rows, vocabulary]; -1 "
           "where the largest is not finite or one is NaN.");
}

}  // namespace kvledger::bindings
