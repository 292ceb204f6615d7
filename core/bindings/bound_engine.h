// The engine as Python holds it, and its plan as Python sees it.

#pragma once

#include <memory>
#include <utility>

#include "core/bindings/bindings.h"
#include "core/engine.h"

namespace kvledger::bindings {

// What a plan reads: both are parts of the engine.
class Plan {
 public:
  explicit Plan(std::shared_ptr<const Engine> engine, const StepPlan& plan)
      : engine_(std::move(engine)), plan_(plan) {}

  const StepPlanView& view() const noexcept { return plan_.view(); }
  const StepPlan& plan() const noexcept { return plan_; }
  const BlockTables& tables() const noexcept { return engine_->tables(); }

 private:
  std::shared_ptr<const Engine> engine_;
  const StepPlan& plan_;  // of the engine, which has one for all steps
};

// An engine, and the one object that shows its plan to Python: every step has the same.
class BoundEngine {
 public:
  explicit BoundEngine(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  Engine& engine() const noexcept { return *engine_; }

  pybind11::object show(const StepPlan& plan) {
    if (!plan_) {
      plan_ = pybind11::cast(Plan(engine_, plan));
    }
    return plan_;
  }

 private:
  std::shared_ptr<Engine> engine_;
  pybind11::object plan_;  // has its own share of the engine, so they hold each other by nothing
};

}  // namespace kvledger::bindings
