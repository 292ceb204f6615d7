#!/bin/sh
# The long runs: hours on two cores. docs/testing.md says when they last ran. SEED, FUZZ_RUNS, REQUESTS,
# REUSES, SERVERS, MINUTES, BOOKS_MINUTES, KILLS and ROUNDS change their lengths.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
PATH="$root/.venv/bin:$PATH"

say() { printf '\n%s\n' "soak: $*"; }

say "simulation: 10^6 steps over 200 seeds, then 10^7 over 1,000 further seeds"
tools/core_tests.sh build/package
build/package/tests/simulation --seeds 200 --steps 5000
build/package/tests/simulation --seeds 1000 --steps 10000 --seed 1000

say "servers with settings and traffic of a seed, as kvledger simulate runs them: 10^7 steps over 1,000 seeds"
python tests/soak/simulated_servers.py --seeds "${SERVERS:-1000}" --steps 10000 --seed "${SEED:-1}"

say "reuse: 10^6 steps over 1,000 seeds"
build/package/tests/reuse_simulation 1000 1000
build/package/tests/reuse_simulation 8000 600 2000 harsh

say "index, pool and ledger against a model that predicts: 10^6 operations in each order of eviction"
build/package/tests/index_simulation 2000 500

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

say "model folders, chat templates and requests: mutations, replayable by seed"
python tests/fuzz/model_folder.py --runs "${FUZZ_RUNS:-100000}" --seed "${SEED:-1}"
python tests/fuzz/chat_templates.py --runs "${FUZZ_RUNS:-100000}" --seed "${SEED:-1}"
python tests/fuzz/generate_requests.py --runs "${FUZZ_RUNS:-100000}" --seed "${SEED:-1}"
python tests/fuzz/generate_requests.py --runs 1000000 --seed "${SEED:-1}" --no-server

say "mixed requests: each answer as alone, one receipt each, the books after every step"
python tests/soak/mixed_load.py --requests "${REQUESTS:-100000}" --seed "${SEED:-1}"

say "blocks full of NaN whenever they change hands: a million of them in each KV format"
python tests/soak/poisoned_memory.py --reuses "${REUSES:-1000000}" --seed "${SEED:-1}"

say "conservation: the books of servers that are killed, to the nanosecond"
python tests/soak/conservation.py --minutes "${BOOKS_MINUTES:-10}" --kills "${KILLS:-6}" --seed "${SEED:-1}"

say "drift: memory, descriptors, threads and blocks after an hour as after a quarter of one"
python tests/soak/drift.py --minutes "${MINUTES:-60}" --seed "${SEED:-1}"

if command -v chromium > /dev/null 2>&1; then
  say "a report in a browser, without a network"
  python -m pytest -q --soak -rP tests/service/test_report_in_browser.py
else
  say "skipped: a report in a browser needs chromium (Debian: chromium)"
fi

say "planted bottlenecks: the diagnosis names each, and what it warns of does not help"
python tests/soak/planted_bottlenecks.py --rounds "${ROUNDS:-10}" --seed "${SEED:-1}" --in-vain

say "very many connections"
python -m pytest -q --soak -rP -k "connections" tests/integration/test_faults_of_a_process.py

say "golden prompts with every instruction set"
for set in portable avx2 avx512; do
  if python -c "from kvledger import _core; exit('$set' not in _core.instruction_sets())"; then
    KVLEDGER_INSTRUCTION_SET=$set python -m pytest -q --soak -rP tests/integration/test_golden.py
  else
    say "skipped: $set does not run here"
  fi
done
say "all is well"
