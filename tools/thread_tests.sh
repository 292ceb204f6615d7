#!/bin/sh
# Builds the core's thread pool and its tests under ThreadSanitizer in the folder $1, and runs them.
# All other tests under it take minutes to build: tools/soak.sh has them.
set -eu
cd "$(dirname "$0")/.."
folder=$1
PATH="$PWD/.venv/bin:$PATH"
cmake -S . -B "$folder" -G Ninja -DKVLEDGER_TESTS=ON -DKVLEDGER_SANITIZE=thread \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null
cmake --build "$folder" --target thread_pool_tests -- --quiet
"$folder/tests/thread_pool_tests"
