// What steps did, as arrays: core/step_books.h.

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "core/bindings/bindings.h"
#include "core/step_books.h"

namespace py = pybind11;

namespace kvledger::bindings {
namespace {

using Rows = py::array_t<std::int64_t>;

std::int64_t count_in(const StepBooks::Counter& counter) noexcept {
  return counter.load(std::memory_order_relaxed);
}

Rows phases_of(const StepBooks& books) {
  Rows rows({static_cast<py::ssize_t>(StepBooks::kPhases), py::ssize_t{5}});
  auto out = rows.mutable_unchecked<2>();
  for (std::size_t i = 0; i < StepBooks::kPhases; ++i) {
    const auto& counts = books.phase(static_cast<StepBooks::Phase>(i));
    const StepBooks::Counter* const fields[] = {&counts.steps, &counts.nanoseconds, &counts.tokens,
                                                &counts.keys, &counts.sequences};
    for (std::size_t j = 0; j < std::size(fields); ++j) {
      out(static_cast<py::ssize_t>(i), static_cast<py::ssize_t>(j)) = count_in(*fields[j]);
    }
  }
  return rows;
}

template <std::size_t kCount, class Get>
Rows steps_of(const Get& get) {
  Rows rows({static_cast<py::ssize_t>(kCount), static_cast<py::ssize_t>(3 + StepBooks::kBuckets)});
  auto out = rows.mutable_unchecked<2>();
  for (std::size_t i = 0; i < kCount; ++i) {
    const StepBooks::StepCounts& counts = get(i);
    const auto row = static_cast<py::ssize_t>(i);
    out(row, 0) = count_in(counts.steps);
    out(row, 1) = count_in(counts.nanoseconds);
    out(row, 2) = count_in(counts.tokens);
    for (std::size_t j = 0; j < StepBooks::kBuckets; ++j) {
      out(row, static_cast<py::ssize_t>(3 + j)) = count_in(counts.durations[j]);
    }
  }
  return rows;
}

Rows list_of(std::initializer_list<std::int64_t> values) {
  Rows row(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), row.mutable_data());
  return row;
}

py::array_t<double> fits_of(const StepBooks& books) {
  py::array_t<double> rows({static_cast<py::ssize_t>(StepBooks::kPhases), py::ssize_t{9}});
  auto out = rows.mutable_unchecked<2>();
  for (std::size_t i = 0; i < StepBooks::kPhases; ++i) {
    const auto& sums = books.fit(static_cast<StepBooks::Phase>(i));
    py::ssize_t column = 0;
    const auto copy = [&](const auto& values) {
      for (const auto& value : values) {
        out(static_cast<py::ssize_t>(i), column++) = value.load(std::memory_order_relaxed);
      }
    };
    copy(sums.products);
    copy(sums.values);
  }
  return rows;
}

Rows bucket_bounds() {
  Rows rows(static_cast<py::ssize_t>(StepBooks::kBuckets - 1));
  for (std::size_t i = 0; i + 1 < StepBooks::kBuckets; ++i) {
    rows.mutable_data()[i] = StepBooks::bound_of(i);
  }
  return rows;
}

}  // namespace

void bind_step_books(py::module_& module) {
  py::class_<StepBooks>(module, "StepBooks",
                        "What all steps so far did; each look counts anew, from any thread.")
      .def_property_readonly("phases", &phases_of,
                             "int64 [decode, prefill][steps, nanoseconds, tokens, keys, sequences]")
      .def_property_readonly(
          "mixtures",
          [](const StepBooks& books) {
            return steps_of<StepBooks::kMixtures>([&](std::size_t i) -> const auto& {
              return books.mixture(static_cast<StepBooks::Mixture>(i));
            });
          },
          "int64 [decode only, prefill only, both][steps, nanoseconds, tokens, durations...]")
      .def_property_readonly(
          "batches",
          [](const StepBooks& books) {
            return steps_of<StepBooks::kBatches>(
                [&](std::size_t i) -> const auto& { return books.batch(i); });
          },
          "int64 [1, 2, 3 to 4, ... sequences][steps, nanoseconds, tokens, durations...], of steps "
          "that only decode")
      .def_property_readonly(
          "forecast",
          [](const StepBooks& books) {
            const auto& forecast = books.forecast();
            return list_of({count_in(forecast.steps), count_in(forecast.expected),
                            count_in(forecast.taken), count_in(forecast.off)});
          },
          "int64 [steps, expected nanoseconds, taken, sum of differences]")
      .def_property_readonly(
          "fits", &fits_of,
          "float64 [decode, prefill][1 x 1, 1 x tokens, 1 x keys, tokens^2, tokens x keys, keys^2, "
          "time x 1, time x tokens, time x keys]: normal equations of a step's nanoseconds")
      .def_property_readonly(
          "preemptions",
          [](const StepBooks& books) {
            return list_of({books.preemptions(StepBooks::kForAnother),
                            books.preemptions(StepBooks::kForItself),
                            books.preemptions(StepBooks::kPaused)});
          },
          "int64 [for another, for itself, paused]")
      .def_property_readonly(
          "waited",
          [](const StepBooks& books) {
            return list_of({books.waited(StepBooks::kForPlace), books.waited(StepBooks::kForMemory),
                            books.waited(StepBooks::kForShare), books.waited(StepBooks::kForTurn)});
          },
          "int64 [for a place, for memory, for its tenant's share, for its turn]: nanoseconds of "
          "steps in which somebody waited for it")
      .def_property_readonly_static(
          "bounds", [](const py::object&) { return bucket_bounds(); },
          "int64: nanoseconds up to which durations fall into each bucket but the last.");
}

}  // namespace kvledger::bindings
