# What people type. `make` alone lists it.

BIN := .venv/bin
# Passed on: make serve ARGS="--listen 127.0.0.1:6000 --kv-blocks 64"
ARGS ?=
JOBS ?= $(shell nproc)

.PHONY: help serve test check sanitize soak clean

help:
	@echo "make serve     build, fetch the default model, serve on 127.0.0.1:50051"
	@echo "make test      build and run all tests of the fast tier"
	@echo "make check     linters, types and the contract's compatibility"
	@echo "make sanitize  the core's tests under AddressSanitizer and UBSan, its threads under TSan"
	@echo "make soak      the long runs (an hour or more)"
	@echo "make clean     remove what was built"

serve:
	@tools/setup.sh serve
	@$(BIN)/kvledger serve --dev $(ARGS)

test:
	@tools/setup.sh test
	@$(BIN)/kvledger models fetch
	@tools/core_tests.sh build/package
	@$(BIN)/python -m pytest $(ARGS)

check:
	@tools/setup.sh check
	@tools/check.sh

sanitize:
	@tools/setup.sh test
	@tools/core_tests.sh build/sanitized address,undefined
	@tools/thread_tests.sh build/threads

soak:
	@tools/setup.sh check
	@tools/soak.sh

clean:
	rm -rf build dist .venv service/kvledger/v1
