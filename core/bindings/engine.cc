#include "core/engine.h"
#include "core/kernels.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <unordered_set>

#include "core/bindings/bindings.h"
#include "core/bindings/bound_engine.h"
#include "core/bindings/recompute_governor.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace kvledger::bindings {
namespace {

// What changed, by value. Python objects are made of what is asked for, when it is asked for: most
// steps have only tokens, and making arrays for nothing costs as much as the step.
struct Report {
  StepReport changes;
  std::int64_t running = 0;
  std::int64_t waiting = 0;
  Balances balances;
  PrefixCounts prefixes;
  ComputeTotals compute;
  Nanoseconds books = 0;
};

Report report_of(Engine& engine) {
  return {engine.take_report(),       engine.running(),       engine.waiting(),
          engine.ledger().balances(), engine.prefix_counts(), engine.compute_totals(),
          engine.books_nanoseconds()};
}

py::tuple totals_of(const ComputeTotals& totals) {
  return py::make_tuple(totals.steps, totals.closed, totals.unclaimed);
}

py::dict counts_of(const PrefixCounts& counts) {
  return py::dict("lookups"_a = counts.lookups, "reused_tokens"_a = counts.reused_tokens,
                  "inserted"_a = counts.inserted, "evicted"_a = counts.evicted,
                  "mismatches"_a = counts.mismatches, "foreign"_a = counts.foreign,
                  "nanoseconds"_a = counts.nanoseconds);
}

Nanoseconds steady_now() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// A view of records that live as long as `report`; one for all where there are none.
template <class T>
py::array_t<T> records(const std::vector<T>& values, const py::object& report) {
  if (values.empty()) {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::array_t<T>> nothing;
    return nothing.call_once_and_store_result([] { return py::array_t<T>(0); }).get_stored();
  }
  return view_of(std::span<const T>(values), report);
}

py::array_t<std::int64_t> balances_of(const Report& report) {
  py::array_t<std::int64_t> result(kBlockStates);
  for (std::size_t i = 0; i < kBlockStates; ++i) {
    result.mutable_at(static_cast<py::ssize_t>(i)) = report.balances.blocks[i].value();
  }
  return result;
}

// The tokens as Python has them at last: tuples of numbers.
py::list token_list(const Report& report) {
  const std::vector<OutputToken>& tokens = report.changes.tokens;
  py::list result(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    result[i] = py::make_tuple(tokens[i].sequence, tokens[i].token, tokens[i].end_reason);
  }
  return result;
}

// How a request's scopes come: one number for all that is true of them.
enum ScopeFlag : std::uint8_t {
  kKeeps = 1,
  kReuses = 2,
  kHasShared = 4,
  kWritesShared = 8,
  kStays = 16,
};

struct ArrivalArrays {
  Array<std::uint64_t> ids;
  Array<std::uint32_t> tenants;
  Array<std::int64_t> arrived_at;
  Array<std::int32_t> priorities;
  Array<std::int64_t> output_tokens_max;
  Array<bool> ignore_end_of_text;
  Array<std::int64_t> samples;
  Array<std::int64_t> offsets;
  Array<std::int32_t> tokens;
  Array<std::uint32_t> own_scopes;
  Array<std::uint32_t> shared_scopes;
  Array<std::int64_t> shared_tokens;
  Array<std::uint8_t> scope_flags;
  Array<std::int64_t> step_times_max;

  PrefixScopes scopes(py::ssize_t index) const {
    const std::uint8_t flags = scope_flags.at(index);
    PrefixScopes scopes;
    scopes.keeps = (flags & kKeeps) != 0;
    scopes.reuses = (flags & kReuses) != 0;
    scopes.own = ScopeId{own_scopes.at(index)};
    scopes.has_shared = (flags & kHasShared) != 0;
    scopes.shared = ScopeId{shared_scopes.at(index)};
    scopes.shared_tokens = shared_tokens.at(index);
    scopes.writes_shared = (flags & kWritesShared) != 0;
    scopes.stays = (flags & kStays) != 0;
    require(scopes.shared_tokens >= 0, "shared_tokens cannot be negative");
    require(!scopes.has_shared || (is_shared(scopes.shared) && !is_shared(scopes.own)),
            "a shared scope has the highest bit, the scope below it has not");
    require(!scopes.stays || is_shared(scopes.own), "only blocks of a shared scope stay");
    return scopes;
  }

  void accept_into(Engine& engine) const {
    const py::ssize_t count = ids.size();
    require(tenants.size() == count && arrived_at.size() == count && priorities.size() == count &&
                output_tokens_max.size() == count && ignore_end_of_text.size() == count &&
                samples.size() == count && offsets.size() == count + 1 &&
                own_scopes.size() == count && shared_scopes.size() == count &&
                shared_tokens.size() == count && scope_flags.size() == count &&
                step_times_max.size() == count,
            "arrival arrays differ in length");
    require(offsets.at(0) == 0 && offsets.at(count) == tokens.size(),
            "arrival offsets do not cover the tokens");
    for (py::ssize_t i = 0; i < count; ++i) {
      require(offsets.at(i) <= offsets.at(i + 1), "arrival offsets fall");
      Arrival arrival;
      arrival.id = SequenceId{ids.at(i)};
      arrival.tenant = TenantId{tenants.at(i)};
      arrival.arrived_at = arrived_at.at(i);
      arrival.priority = priorities.at(i);
      arrival.output_tokens_max = output_tokens_max.at(i);
      arrival.ignore_end_of_text = ignore_end_of_text.at(i);
      arrival.samples = samples.at(i);
      arrival.scopes = scopes(i);
      arrival.step_time_max = step_times_max.at(i);
      require(arrival.step_time_max >= 0, "step_times_max cannot be negative");
      require(arrival.samples >= 1 && arrival.samples <= kSamplesMax,
              "a request has 1 to 16 samples");
      const auto first = static_cast<std::size_t>(offsets.at(i));
      const auto last = static_cast<std::size_t>(offsets.at(i + 1));
      engine.accept(arrival, as_span(tokens).subspan(first, last - first));
    }
  }
};

EndReason end_reason(int reason) {
  require(reason >= static_cast<int>(EndReason::kStop) &&
              reason <= static_cast<int>(EndReason::kFailed),
          "unknown end reason");
  return static_cast<EndReason>(reason);
}

std::unique_ptr<BoundEngine> make_engine(
    std::int64_t blocks, std::int32_t slots_per_block, std::int64_t context_tokens,
    std::int64_t token_budget, std::int64_t sequences_max, std::vector<Token> end_of_text,
    std::int64_t aging_per_priority, std::int64_t overtakes_max, std::int64_t preemptions_max,
    std::int64_t step_time_max, std::int64_t step_stretch, std::int64_t prefill_time_max,
    bool reuses_prefixes, std::uint64_t seed, double cost_growth, bool times_prefixes,
    bool times_books, bool forecast, bool priced_victims, std::int64_t wait_steps_max,
    std::int64_t now) {
  require(blocks >= 1 && blocks < (std::int64_t{1} << 31), "blocks must be from 1 to 2^31 - 1");
  require(slots_per_block >= 1, "slots_per_block must be at least 1");
  require(context_tokens >= 2, "context_tokens must be at least 2");
  require(sequences_max >= 1, "sequences_max must be at least 1");
  require(wait_steps_max >= 0, "wait_steps_max cannot be negative");
  require(step_time_max >= 0 && step_stretch >= 0 && prefill_time_max >= 0,
          "limits of a step cannot be negative");
  require(token_budget >= sequences_max,
          "token_budget must be at least sequences_max: every running sequence decodes one token "
          "a step");
  EngineSettings settings;
  settings.scheduler.token_budget = token_budget;
  settings.scheduler.sequences_max = sequences_max;
  settings.scheduler.aging_per_priority = aging_per_priority;
  settings.scheduler.overtakes_max = overtakes_max;
  settings.scheduler.preemptions_max = preemptions_max;
  settings.scheduler.step_time_max = step_time_max;
  settings.scheduler.step_stretch = step_stretch;
  settings.scheduler.prefill_time_max = prefill_time_max;
  settings.scheduler.forecast = forecast;
  settings.scheduler.priced_victims = priced_victims;
  settings.scheduler.wait_steps_max = wait_steps_max;
  settings.blocks = BlockCount{blocks};
  settings.slots_per_block = slots_per_block;
  settings.context_tokens = context_tokens;
  settings.end_of_text = std::move(end_of_text);
  settings.prefixes.on = reuses_prefixes;
  settings.prefixes.seed = seed;
  require(cost_growth >= 0.0 && cost_growth <= 1.0, "cost_growth must be from 0 to 1");
  settings.prefixes.cost_growth = cost_growth * slots_per_block;
  settings.prefixes.clock = times_prefixes ? &steady_now : nullptr;
  settings.books_clock = times_books ? &steady_now : nullptr;
  return std::make_unique<BoundEngine>(std::make_unique<Engine>(settings, now));
}

using Ids = std::optional<Array<std::uint64_t>>;
using Reasons = std::optional<Array<std::uint8_t>>;

void end_sequences(Engine& engine, const Ids& ids, const Reasons& reasons, std::int64_t now) {
  require(ids.has_value() == reasons.has_value(), "ends need ids and reasons");
  if (!ids) {
    return;
  }
  require(ids->size() == reasons->size(), "end arrays differ in length");
  for (py::ssize_t i = 0; i < ids->size(); ++i) {
    const std::uint64_t id = ids->at(i);
    engine.end({&id, 1}, end_reason(reasons->at(i)), now);
  }
}

// Optional, not pointers: for a pointer that is None, pybind11 goes over all arguments twice.
py::tuple plan_step(BoundEngine& self, std::int64_t now,
                    const std::optional<ArrivalArrays>& arrivals, const Ids& end_ids,
                    const Reasons& end_reasons, const Ids& pauses, const Ids& resumes) {
  Engine& engine = self.engine();
  require(!engine.has_uncommitted_step(), "the last step is not committed");
  end_sequences(engine, end_ids, end_reasons, now);
  if (arrivals) {
    arrivals->accept_into(engine);
  }
  if (pauses) {
    engine.pause(as_span(*pauses), now);
  }
  if (resumes) {
    engine.resume(as_span(*resumes), now);
  }
  const StepPlan& plan = engine.plan(now);
  return py::make_tuple(self.show(plan), report_of(engine));
}

void require_uncommitted(const Engine& engine) {
  require(engine.has_uncommitted_step(), "there is no step to commit or abandon");
}

Report commit_step(BoundEngine& self, std::uint64_t step, const py::array& tokens,
                   const std::optional<Array<std::int32_t>>& offsets, std::int64_t now) {
  Engine& engine = self.engine();
  const auto values = span_of<std::int32_t>(tokens, "tokens are contiguous int32");
  require_uncommitted(engine);
  if (offsets) {
    engine.commit(StepId{step}, values, as_span(*offsets), now);
  } else {
    std::vector<std::int32_t> one_each(values.size() + 1);
    std::iota(one_each.begin(), one_each.end(), 0);
    engine.commit(StepId{step}, values, one_each, now);
  }
  return report_of(engine);
}

using ShareNumbers = std::tuple<std::uint32_t, std::int64_t, std::int64_t, std::int64_t, bool>;

std::vector<PoolShare> shares_of(const std::vector<ShareNumbers>& numbers, const Engine& engine) {
  const BlockCount total = engine.ledger().total();
  std::vector<PoolShare> shares;
  std::int64_t guaranteed_sum = 0;
  std::int64_t open = engine.shareable_blocks().value();  // to whoever has no limit of its own
  for (const ShareNumbers& each : numbers) {
    open -= std::get<4>(each) ? std::get<1>(each) : 0;
  }
  std::unordered_set<std::uint32_t> tenants;
  for (const auto& [tenant, guaranteed, live_max, max, sealed] : numbers) {
    require(!is_shared(ScopeId{tenant}), "tenants are below 2^31");
    require(guaranteed >= 0 && guaranteed <= max && live_max >= 1 && max <= total.value(),
            "0 <= guaranteed <= max <= blocks of the pool, and live_max at least 1");
    guaranteed_sum += guaranteed;
    // All that is open to everybody is no limit of a tenant's own, though it is less than the pool.
    const BlockCount most = max >= open && !sealed ? total : BlockCount{max};
    shares.push_back(
        PoolShare{TenantId{tenant}, BlockCount{guaranteed}, BlockCount{live_max}, most, sealed});
    require(tenants.insert(tenant).second, "a tenant has one share");
  }
  require(guaranteed_sum <= engine.shareable_blocks().value(),
          "guarantees add up to more than the pool");
  return shares;
}

// A batch over arrays that the caller keeps as they are.
BatchView make_batch(const Array<std::int32_t>& query_start,
                     const Array<std::int32_t>& context_length, const Array<std::int32_t>& rows,
                     const Array<std::int32_t>& positions,
                     const Array<std::int32_t>& block_tables) {
  const py::ssize_t sequences = rows.size();
  require(query_start.size() == sequences + 1 && context_length.size() == sequences,
          "batch arrays differ in length");
  require(query_start.at(0) == 0 && query_start.at(sequences) == positions.size(),
          "query_start does not cover the positions");
  require(block_tables.ndim() == 2, "block_tables is [rows, blocks]");
  for (const std::int32_t row : as_span(rows)) {
    require(row >= 0 && row < block_tables.shape(0), "a row is outside the block tables");
  }
  BatchView batch;
  batch.sequences = sequences;
  batch.tokens = positions.size();
  batch.query_start = query_start.data();
  batch.context_length = context_length.data();
  batch.rows = rows.data();
  batch.positions = positions.data();
  batch.block_tables = block_tables.data();
  batch.table_width = block_tables.shape(1);
  return batch;
}

void bind_records() {
  PYBIND11_NUMPY_DTYPE(Admission, sequence, queued, row, again, shared_tokens, reused_tokens);
  PYBIND11_NUMPY_DTYPE(Preemption, sequence, computed_tokens);
  PYBIND11_NUMPY_DTYPE(Refusal, sequence, tokens, tokens_max);
  PYBIND11_NUMPY_DTYPE(OutputToken, sequence, token, end_reason);
  PYBIND11_NUMPY_DTYPE(Receipt, sequence, tenant, end_reason, prompt_tokens, output_tokens,
                       computed_tokens, recomputed_tokens, shared_tokens, reused_own, reused_shared,
                       preemptions, preempted_own, preempted_others, preempted_itself,
                       preempted_paused, peak_blocks, queued, prefill, decode, paused,
                       prefill_delayed, decode_delayed, requeued, compute, uncached_tokens,
                       held_seconds, reserved_seconds, scope_seconds, saved_seconds, held_nanos,
                       reserved_nanos, scope_nanos, saved_nanos);
}

BatchView batch_of(const Plan& plan) {
  const StepPlanView& arrays = plan.view();
  BatchView batch;
  batch.sequences = arrays.header.sequences;
  batch.tokens = arrays.header.tokens;
  batch.query_start = arrays.query_start.data();
  batch.context_length = arrays.context_length.data();
  batch.rows = arrays.rows.data();
  batch.positions = arrays.positions.data();
  batch.block_tables = plan.tables().data();
  batch.table_width = plan.tables().width().value();
  return batch;
}

void bind_plan(py::module_& module) {
  const auto view = [](auto member) {
    return [member](const py::object& self) {
      return view_of(self.cast<const Plan&>().view().*member, self);
    };
  };
  py::class_<Plan>(module, "Plan", "What the model computes in one step; see core/step_plan.h.")
      .def_property_readonly("step", [](const Plan& p) { return p.view().step.value(); })
      .def_property_readonly("tokens", [](const Plan& p) { return p.view().header.tokens; })
      .def_property_readonly("sequences", [](const Plan& p) { return p.view().header.sequences; })
      .def_property_readonly("logits", [](const Plan& p) { return p.view().header.logits; })
      .def_property_readonly("decode_tokens",
                             [](const Plan& p) { return p.view().header.decode_tokens; })
      .def_property_readonly("prefill_room",
                             [](const Plan& p) { return p.view().header.prefill_room; })
      .def_property_readonly("copies", [](const Plan& p) { return p.view().header.copies; })
      .def_property_readonly("token_ids", view(&StepPlanView::token_ids))
      .def_property_readonly("positions", view(&StepPlanView::positions))
      .def_property_readonly("rows", view(&StepPlanView::rows))
      .def_property_readonly("query_start", view(&StepPlanView::query_start))
      .def_property_readonly("context_length", view(&StepPlanView::context_length))
      .def_property_readonly("logit_tokens", view(&StepPlanView::logit_tokens))
      .def_property_readonly("logit_rows", view(&StepPlanView::logit_rows))
      .def_property_readonly(
          "output_positions",
          [](const Plan& p) {
            const StepPlanView& arrays = p.view();
            py::array_t<std::int32_t> result(static_cast<py::ssize_t>(arrays.logit_tokens.size()));
            std::ranges::transform(arrays.logit_tokens, result.mutable_data(),
                                   [&](std::int32_t token) {
                                     return arrays.positions[static_cast<std::size_t>(token)] + 1;
                                   });
            return result;
          },
          "Position of the token that each row of logits decides: int32 [logits].")
      .def_property_readonly("copy_from", view(&StepPlanView::copy_from))
      .def_property_readonly("copy_to", view(&StepPlanView::copy_to))
      .def_property_readonly("buffer",
                             [](const py::object& self) {
                               return view_of(self.cast<const Plan&>().plan().buffer(), self);
                             })
      .def_property_readonly("block_tables",
                             [](const py::object& self) {
                               const BlockTables& tables = self.cast<const Plan&>().tables();
                               return py::array_t<std::int32_t>(
                                   {tables.rows(), tables.width().value()}, tables.data(), self);
                             })
      .def("batch", &batch_of, py::keep_alive<0, 1>(),
           "The step's sequences as the KV kernels take them.");
}

void bind_report(py::module_& module) {
  const auto array = [](auto member) {
    return [member](const py::object& self) {
      return records(self.cast<const Report&>().changes.*member, self);
    };
  };
  py::class_<Report>(module, "Report", "What changed since the last report; core/step_report.h.")
      .def_property_readonly("admissions", array(&StepReport::admissions))
      .def_property_readonly("preemptions", array(&StepReport::preemptions))
      .def_property_readonly("refusals", array(&StepReport::refusals))
      .def_property_readonly("tokens", array(&StepReport::tokens))
      .def_property_readonly("receipts", array(&StepReport::receipts))
      .def_property_readonly("token_list", &token_list,
                             "The tokens as tuples (sequence, token, end reason or 0).")
      .def_property_readonly("is_empty",
                             [](const Report& r) {
                               return r.changes.admissions.empty() &&
                                      r.changes.preemptions.empty() && r.changes.refusals.empty() &&
                                      r.changes.tokens.empty() && r.changes.receipts.empty();
                             })
      .def_property_readonly(
          "has_ends",
          [](const Report& r) {
            return !r.changes.receipts.empty() || !r.changes.refusals.empty();
          },
          "Whether there are receipts or refusals.")
      .def_readonly("running", &Report::running)
      .def_readonly("waiting", &Report::waiting)
      .def_property_readonly(
          "prefix_nanoseconds", [](const Report& r) { return r.prefixes.nanoseconds; },
          "Time spent on reuse so far, where prefixes are timed.")
      .def_readonly("books_nanoseconds", &Report::books,
                    "Time that the books took so far, where they are timed; core/ledger.h.")
      .def_property_readonly(
          "compute_totals", [](const Report& r) { return totals_of(r.compute); },
          "Nanoseconds of all steps so far, and of them those on receipts, and those of requests "
          "that ended while their last step ran; core/compute_time.h.")
      .def_property_readonly("balances", &balances_of,
                             "int64 [5]: blocks free, reserved, held, cached, releasing")
      .def_property_readonly(
          "prefix_counts", [](const Report& r) { return counts_of(r.prefixes); },
          "What the prefix index found, kept and dropped, since the start; core/prefix_cache.h.");
}

template <class T>
Array<T> or_zeros(std::optional<Array<T>> values, py::ssize_t count) {
  if (values) {
    return std::move(*values);
  }
  Array<T> zeros(count);
  std::fill_n(zeros.mutable_data(), count, T{0});
  return zeros;
}

void bind_arrivals(py::module_& module) {
  py::class_<ArrivalArrays>(module, "Arrivals", "New sequences, as one array for each fact.")
      .def(py::init([](Array<std::uint64_t> ids, Array<std::uint32_t> tenants,
                       Array<std::int64_t> arrived_at, Array<std::int32_t> priorities,
                       Array<std::int64_t> output_tokens_max, Array<bool> ignore_end_of_text,
                       Array<std::int64_t> samples, Array<std::int64_t> offsets,
                       Array<std::int32_t> tokens, std::optional<Array<std::uint32_t>> own_scopes,
                       std::optional<Array<std::uint32_t>> shared_scopes,
                       std::optional<Array<std::int64_t>> shared_tokens,
                       std::optional<Array<std::uint8_t>> scope_flags,
                       std::optional<Array<std::int64_t>> step_times_max) {
             const py::ssize_t count = ids.size();
             return ArrivalArrays{std::move(ids),
                                  std::move(tenants),
                                  std::move(arrived_at),
                                  std::move(priorities),
                                  std::move(output_tokens_max),
                                  std::move(ignore_end_of_text),
                                  std::move(samples),
                                  std::move(offsets),
                                  std::move(tokens),
                                  or_zeros(std::move(own_scopes), count),
                                  or_zeros(std::move(shared_scopes), count),
                                  or_zeros(std::move(shared_tokens), count),
                                  or_zeros(std::move(scope_flags), count),
                                  or_zeros(std::move(step_times_max), count)};
           }),
           py::kw_only(), py::arg("ids").noconvert(), py::arg("tenants").noconvert(),
           py::arg("arrived_at").noconvert(), py::arg("priorities").noconvert(),
           py::arg("output_tokens_max").noconvert(), py::arg("ignore_end_of_text").noconvert(),
           py::arg("samples").noconvert(), py::arg("offsets").noconvert(),
           py::arg("tokens").noconvert(), py::arg("own_scopes").noconvert() = py::none(),
           py::arg("shared_scopes").noconvert() = py::none(),
           py::arg("shared_tokens").noconvert() = py::none(),
           py::arg("scope_flags").noconvert() = py::none(),
           py::arg("step_times_max").noconvert() = py::none(),
           "Without scopes nothing is kept or reused. Flags: 1 keeps, 2 reuses, 4 has a shared "
           "scope, 8 writes it, 16 stays. `step_times_max` are the nanoseconds of the longest step "
           "while "
           "each decodes; 0 is the engine's own limit.");
}

// What is of the prefix index and of tenants' shares.
void bind_prefixes(py::class_<BoundEngine>& engine) {
  engine
      .def(
          "set_shares",
          [](BoundEngine& self, const std::vector<ShareNumbers>& shares, std::int64_t now) {
            self.engine().set_shares(shares_of(shares, self.engine()), now);
          },
          py::arg("shares"), py::arg("now"),
          "Tenants' shares: (tenant, blocks guaranteed, most blocks of requests, most blocks, "
          "sealed).")
      .def(
          "purge",
          [](BoundEngine& self, const Array<std::uint32_t>& scopes, std::int64_t now) {
            std::int64_t blocks = 0;
            for (const std::uint32_t scope : as_span(scopes)) {
              blocks += self.engine().purge(ScopeId{scope}, now);
            }
            return blocks;
          },
          py::arg("scopes").noconvert(), py::arg("now"),
          "Nobody finds the blocks of these scopes any more; how many blocks these were.")
      .def_property_readonly(
          "prefix_counts",
          [](const BoundEngine& self) { return counts_of(self.engine().prefix_counts()); })
      .def_property_readonly(
          "shareable_blocks",
          [](const BoundEngine& self) { return self.engine().shareable_blocks().value(); },
          "Blocks that do not stay with public scopes.")
      .def_property_readonly(
          "step_books",
          [](const BoundEngine& self) -> const auto& { return self.engine().step_books(); },
          py::return_value_policy::reference_internal);
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_records();
  bind_plan(module);
  bind_report(module);
  bind_arrivals(module);
  module.attr("SERVER_TENANTS") = kServerTenants.value();
  py::class_<BatchView>(module, "Batch", "Ragged sequences of one step, for the KV kernels.")
      .def(py::init(&make_batch), py::kw_only(), py::arg("query_start").noconvert(),
           py::arg("context_length").noconvert(), py::arg("rows").noconvert(),
           py::arg("positions").noconvert(), py::arg("block_tables").noconvert(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
      .def_readonly("sequences", &BatchView::sequences)
      .def_readonly("tokens", &BatchView::tokens);
  py::class_<BoundEngine> engine(module, "Engine",
                                 "Sequences, blocks and books; see core/engine.h.");
  bind_prefixes(engine);
  bind_governor(engine);
  engine
      .def(py::init(&make_engine), py::kw_only(), py::arg("blocks"), py::arg("slots_per_block"),
           py::arg("context_tokens"), py::arg("token_budget"), py::arg("sequences_max"),
           py::arg("end_of_text"), py::arg("aging_per_priority") = 5'000'000'000,
           py::arg("overtakes_max") = 16, py::arg("preemptions_max") = 3,
           py::arg("step_time_max") = 0, py::arg("step_stretch") = 0,
           py::arg("prefill_time_max") = 0, py::arg("reuses_prefixes") = false, py::arg("seed") = 0,
           py::arg("cost_growth") = 0.0, py::arg("times_prefixes") = false,
           py::arg("times_books") = false, py::arg("forecast") = true,
           py::arg("priced_victims") = true, py::arg("wait_steps_max") = 16, py::arg("now"))
      .def("plan", &plan_step, py::arg("now"), py::arg("arrivals") = py::none(),
           py::arg("end_ids").noconvert() = py::none(),
           py::arg("end_reasons").noconvert() = py::none(),
           py::arg("pauses").noconvert() = py::none(), py::arg("resumes").noconvert() = py::none(),
           "(Plan, Report) of the next step; a plan of no tokens if there is nothing to do. It is "
           "the same Plan each time.")
      .def("commit", &commit_step, py::arg("step"), py::arg("tokens"),
           py::arg("offsets").noconvert(), py::arg("now"),
           "Without offsets every sequence has one token.")
      .def(
          "abandon",
          [](BoundEngine& self, std::uint64_t step, std::int64_t now) {
            require_uncommitted(self.engine());
            self.engine().abandon(StepId{step}, now);
            return report_of(self.engine());
          },
          py::arg("step"), py::arg("now"))
      .def(
          "end",
          [](BoundEngine& self, const Array<std::uint64_t>& ids, int reason, std::int64_t now) {
            self.engine().end(as_span(ids), end_reason(reason), now);
          },
          py::arg("ids").noconvert(), py::arg("reason"), py::arg("now"))
      .def(
          "books", [](BoundEngine& self, std::int64_t now) { return self.engine().books(now); },
          py::arg("now"), "The ledger's state at this time.")
      .def_property_readonly(
          "compute_totals",
          [](const BoundEngine& self) { return totals_of(self.engine().compute_totals()); },
          "As in reports.")
      .def_property_readonly(
          "sequence_tokens_max",
          [](const BoundEngine& self) { return self.engine().sequence_tokens_max(); })
      .def(
          "audit", [](const BoundEngine& self) { return self.engine().audit(); },
          "What disagrees in the books, or None.");
}

}  // namespace kvledger::bindings
