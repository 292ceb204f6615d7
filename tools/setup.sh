#!/bin/sh
# Prepares everything that `make serve` or `make test` needs: system packages, a virtual environment
# in .venv, and kvledger built into it. Says first what it will download. Doing it again does only
# what is missing.
#
#   tools/setup.sh serve      what serving needs
#   tools/setup.sh test       that, and what the tests need
#   tools/setup.sh check      that, and linters and type checkers
set -eu

tier=${1:-serve}
cd "$(dirname "$0")/.."
venv=.venv

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: $*" >&2; exit 1; }

case $tier in
  serve) extras='[report]' tiers='serve' ;;
  test) extras='[report,test]' tiers='serve test' ;;
  check) extras='[report,test,check]' tiers='serve test check' ;;
  *) fail "unknown tier '$tier'; known are serve, test and check" ;;
esac

# --- System packages --------------------------------------------------------------------------

missing=''
need() { missing="$missing $1"; }

if ! command -v python3 >/dev/null 2>&1; then
  need python3; need python3-venv; need python3-dev
else
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "python3 is older than 3.10; put a newer one first in PATH and try again"
  python3 -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
  python3 - <<'PY' || need python3-dev
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PY
fi
command -v g++ >/dev/null 2>&1 || need g++
command -v make >/dev/null 2>&1 || need make
if [ "$tier" != serve ] && command -v g++ >/dev/null 2>&1; then
  printf '#include <doctest/doctest.h>\n' | g++ -x c++ -fsyntax-only - 2>/dev/null ||
    need doctest-dev
fi

if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "will install from Debian:$missing"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
  else
    fail "missing system packages; run:  sudo apt-get install -y$missing"
  fi
fi

# --- Python packages and the build --------------------------------------------------------------

if [ ! -x "$venv/bin/python" ]; then
  say "making a virtual environment in $venv"
  python3 -m venv "$venv"
fi
# Bytecode is made when something is imported (--no-compile): most of torch never is.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# Prometheus's own lint, out of Debian's package: the package itself would start a server.
if [ "$tier" = check ] && [ ! -x "$venv/bin/promtool" ] && command -v apt-get >/dev/null 2>&1; then
  say "will download from Debian: promtool (in its package prometheus, 19 MB)"
  folder=$(mktemp -d)
  (
    cd "$folder"
    apt-get download -qq prometheus 2>/dev/null ||
      { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus; }
    dpkg-deb -x prometheus_*.deb . && install usr/bin/promtool "$OLDPWD/$venv/bin/promtool"
  ) || say "promtool could not be had: the tests that need it will be skipped"
  rm -rf "$folder"
fi

# What was installed is remembered by content, so that nothing is asked of the index again.
wanted=$(cat pyproject.toml tools/setup.sh | cksum)
if [ "$(cat "$venv/.packages-$tier" 2>/dev/null)" != "$wanted" ]; then
  say "will download, if not there yet: the Python packages of pyproject.toml $extras"
  say "(torch is the largest: 200 MB where pip finds a CPU build, gigabytes with CUDA; matplotlib,"
  say "for the charts of kvledger report, takes 25 MB with what it needs)"
  pip install --no-compile 'scikit-build-core>=0.11' 'pybind11>=3.0' 'grpcio-tools>=1.80' 'cmake>=3.25' 'ninja>=1.10'
  rm -f "$venv/.built"
fi

# A module that is new to the package changes its folder; one that changed needs no build.
newer=$(
  {
    find core proto CMakeLists.txt pyproject.toml -newer "$venv/.built" -print
    find service -name __pycache__ -prune -o -type d -newer "$venv/.built" -print
  } 2>/dev/null | head -n 1 || true
)
if [ ! -e "$venv/.built" ] || [ -n "$newer" ] ||
   [ "$(cat "$venv/.packages-$tier" 2>/dev/null)" != "$wanted" ]; then
  say "building kvledger"
  # In a folder whose name is known: the C++ tests are built there too, from the same objects.
  pip install --no-compile --no-build-isolation --config-settings=build-dir=build/package \
    --editable ".$extras"
  for each in $tiers; do
    printf '%s' "$wanted" > "$venv/.packages-$each"
  done
  touch "$venv/.built"
fi
