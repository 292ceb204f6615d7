#!/bin/sh
# The long runs: an hour or more on two cores. docs/testing.md says when they last ran.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
PATH="$root/.venv/bin:$PATH"

say() { printf '\n%s\n' "soak: $*"; }

say "simulation: 10^6 steps over 200 seeds, then 1,000 further seeds"
tools/core_tests.sh build/tests
build/tests/tests/simulation --seeds 200 --steps 5000
build/tests/tests/simulation --seeds 1000 --steps 5000 --seed 1000

say "core tests and simulation under AddressSanitizer and UBSan"
tools/core_tests.sh build/sanitized address,undefined
build/sanitized/tests/simulation --seeds 200 --steps 1000

say "thread pool and kernels under ThreadSanitizer"
KVLEDGER_BUILD_TYPE=RelWithDebInfo tools/core_tests.sh build/threads thread

say "GGUF reader: mutations under the sanitizers, replayable by seed"
cmake -S . -B build/fuzz -G Ninja -DKVLEDGER_FUZZ=ON -DKVLEDGER_SANITIZE=address,undefined \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null
cmake --build build/fuzz --target gguf_fuzz_standalone
build/fuzz/tests/fuzz/gguf_fuzz_standalone --runs 10000000 --seed "${SEED:-1}"
if command -v clang++ > /dev/null 2>&1; then
  say "GGUF reader: libFuzzer, 20 minutes"
  cmake -S . -B build/libfuzzer -G Ninja -DKVLEDGER_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++ \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null
  cmake --build build/libfuzzer --target gguf_fuzz
  build/libfuzzer/tests/fuzz/gguf_fuzz -max_total_time=1200 -timeout=2 -rss_limit_mb=2048
else
  say "skipped: libFuzzer needs clang++ (Debian: clang libclang-rt-dev)"
fi

say "golden prompts with every instruction set"
for set in portable avx2 avx512; do
  if python -c "from kvledger import _core; exit('$set' not in _core.instruction_sets())"; then
    KVLEDGER_INSTRUCTION_SET=$set python -m pytest -q --soak -rP tests/integration/test_golden.py
  else
    say "skipped: $set does not run here"
  fi
done
say "all is well"
