#!/bin/sh
# What machines can say about the sources: layout, style, types, and the contract's compatibility.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

say() { printf '%s\n' "check: $*"; }

say "ruff"
ruff check --quiet .
ruff format --quiet --check .
say "mypy"
mypy
say "clang-format"
find core tests -name '*.h' -o -name '*.cc' | xargs clang-format --dry-run --Werror
say "contract: lint, format, and nothing that breaks clients of the released one"
buf lint
buf format --diff --exit-code > /dev/null
buf breaking --against proto/released.binpb
say "all is well"
