#!/bin/sh
# Builds the C++ tests in the folder $1, with the sanitizers $2 if given, and runs them. In
# build/package the core is built already: tools/setup.sh builds the Python package there.
set -eu
cd "$(dirname "$0")/.."
folder=$1
sanitizers=${2:-}
PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$folder" -G Ninja -DKVLEDGER_TESTS=ON -DKVLEDGER_SANITIZE="$sanitizers" \
  -DCMAKE_BUILD_TYPE="${KVLEDGER_BUILD_TYPE:-Release}" > /dev/null
cmake --build "$folder" -- --quiet
ctest --test-dir "$folder" --output-on-failure --progress
