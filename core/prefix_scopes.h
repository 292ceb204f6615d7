// In which scopes a request's prefix is looked up and kept.
//
// The first `shared_tokens` tokens lie in the shared scope, as far as whole blocks go; what follows
// and all that is generated lies in the request's own. Below a node of its own scope is only that,
// so nothing behind the border can enter the shared one.

#pragma once

#include <cstdint>

#include "core/types.h"

namespace kvledger {

struct PrefixScopes {
  // Whether computed blocks are kept for others of the same scopes.
  bool keeps = false;
  // Whether it may begin with blocks that others computed.
  bool reuses = false;
  ScopeId own;
  bool has_shared = false;
  ScopeId shared;
  std::int64_t shared_tokens = 0;
  // Whether what it computes of the shared part is kept in the shared scope; else the part that is
  // not there already lies in its own.
  bool writes_shared = false;
  // Whether its blocks stay when it has ended, held by its own scope, a shared one, until that is
  // purged.
  bool stays = false;
};

}  // namespace kvledger
