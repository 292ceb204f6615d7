// The prefix index by itself, for benchmarks and tests: the engine's own is not reached from here.

#include "core/prefix_index.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "core/bindings/bindings.h"
#include "core/lru_policy.h"
#include "core/reuse_policy.h"
#include "core/s3_fifo_policy.h"

namespace kvledger::bindings {
namespace {

namespace py = pybind11;

constexpr const char* kTokens = "tokens must be a contiguous array of int32";

PrefixIndex::MakePolicy policy_of(const std::string& name, double cost_growth) {
  if (name == "lru") {
    return [](CachedBlocks& blocks, std::int64_t) { return std::make_unique<LruPolicy>(blocks); };
  }
  if (name == "s3_fifo") {
    return [](CachedBlocks& blocks, std::int64_t capacity) {
      return std::make_unique<S3FifoPolicy>(blocks, capacity);
    };
  }
  require(name == "reuse", "policy must be lru, s3_fifo or reuse");
  return [cost_growth](CachedBlocks& blocks, std::int64_t capacity) {
    return std::make_unique<ReusePolicy>(blocks, capacity, cost_growth);
  };
}

std::unique_ptr<PrefixIndex> make_index(const std::string& policy, std::int64_t capacity,
                                        std::int64_t nodes, std::int64_t block_tokens,
                                        std::uint64_t seed, double cost_growth) {
  require(capacity > 0 && nodes >= capacity && nodes < (std::int64_t{1} << 31),
          "capacity and nodes must be positive, nodes at least capacity and below 2^31");
  require(block_tokens > 0 && block_tokens <= 4096, "block_tokens must be from 1 to 4096");
  require(cost_growth >= 0.0 && cost_growth <= 1.0, "cost_growth must be from 0 to 1");
  const PrefixIndexSettings settings{
      .nodes = nodes, .capacity = capacity, .block_tokens = block_tokens, .seed = seed};
  return std::make_unique<PrefixIndex>(settings, policy_of(policy, cost_growth));
}

PrefixNode known(const PrefixIndex& index, PrefixNode node) {
  require(index.knows(node), "the node is none of the index, or none any more");
  return node;
}

std::span<const Token> tokens_of(const py::array& tokens, std::int64_t most) {
  const std::span<const Token> span = span_of<Token>(tokens, kTokens);
  require(!span.empty() && static_cast<std::int64_t>(span.size()) <= most,
          "a block has at least one token and at most block_tokens");
  return span;
}

// How many of a prompt's blocks are filled, from the first one on without a gap: a walk as the
// scheduler makes it, for measuring.
std::int64_t find_all(const PrefixIndex& index, std::uint32_t scope, const py::array& prompt) {
  const std::span<const Token> tokens = span_of<Token>(prompt, kTokens);
  const auto block = static_cast<std::size_t>(index.block_tokens());
  PrefixNode at = PrefixIndex::root();
  std::int64_t found = 0;
  for (std::size_t i = 0; i + block <= tokens.size(); i += block) {
    const auto node = index.find(at, ScopeId{scope}, tokens.subspan(i, block));
    if (!node || !index.block_of(*node)) {
      break;
    }
    at = *node;
    ++found;
  }
  return found;
}

}  // namespace

void bind_prefix_index(py::module_& module) {
  py::class_<PrefixNode>(module, "PrefixNode").def(py::self == py::self);
  py::class_<PrefixIndex>(module, "PrefixIndex")
      .def(py::init(&make_index), py::kw_only(), py::arg("policy"), py::arg("capacity"),
           py::arg("nodes"), py::arg("block_tokens"), py::arg("seed"), py::arg("cost_growth") = 0.0)
      .def_property_readonly_static("root", [](const py::object&) { return PrefixIndex::root(); })
      .def_property_readonly("nodes", &PrefixIndex::nodes)
      .def_property_readonly("filled", py::overload_cast<>(&PrefixIndex::filled, py::const_))
      .def_property_readonly("cached", py::overload_cast<>(&PrefixIndex::cached, py::const_))
      .def_property_readonly("mismatches", &PrefixIndex::mismatches)
      .def("place",
           [](PrefixIndex& index, PrefixNode parent, std::uint32_t scope, const py::array& tokens) {
             require(parent == PrefixIndex::root() || index.knows(parent),
                     "the parent is none of the index, or none any more");
             require(index.may_place(parent, ScopeId{scope}),
                     "the parent must be pinned, and another scope may only follow a shared one");
             return index.place(parent, ScopeId{scope}, tokens_of(tokens, index.block_tokens()));
           })
      .def("find",
           [](const PrefixIndex& index, PrefixNode parent, std::uint32_t scope,
              const py::array& tokens) {
             require(parent == PrefixIndex::root() || index.knows(parent),
                     "the parent is none of the index, or none any more");
             return index.find(parent, ScopeId{scope}, span_of<Token>(tokens, kTokens));
           })
      .def("pin", [](PrefixIndex& index, PrefixNode node) { index.pin(known(index, node)); })
      .def("unpin",
           [](PrefixIndex& index, PrefixNode node) {
             require(!index.knows(node) || index.pins(node) > 0, "the node is not pinned");
             index.unpin(node);
           })
      .def("fill",
           [](PrefixIndex& index, PrefixNode node, std::uint32_t block) {
             require(!index.block_of(known(index, node)), "the node has a block already");
             index.fill(node, BlockId{block});
           })
      .def("use",
           [](PrefixIndex& index, PrefixNode node) {
             require(index.block_of(known(index, node)).has_value(), "the node has no block");
             index.use(node);
           })
      .def("block_of",
           [](const PrefixIndex& index, PrefixNode node) -> std::optional<std::uint32_t> {
             const std::optional<BlockId> block = index.block_of(known(index, node));
             return block ? std::optional(block->value()) : std::nullopt;
           })
      .def("evict",
           [](PrefixIndex& index) -> std::optional<std::uint32_t> {
             const std::optional<BlockId> block = index.evict();
             return block ? std::optional(block->value()) : std::nullopt;
           })
      .def("find_all", &find_all)
      .def("purge",
           [](PrefixIndex& index, std::uint32_t scope) {
             std::vector<BlockId> freed;
             std::vector<BlockId> pinned;
             index.purge(ScopeId{scope}, freed, pinned);
             return std::pair(freed.size(), pinned.size());
           })
      .def("audit", &PrefixIndex::audit);
}

}  // namespace kvledger::bindings
