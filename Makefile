# Every target sets up what it needs on a machine with Python 3.11 and make. `make` = check + test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Enough for the demo, which is what most people want first.
TRIABLE := $(VENV)/.ready-for-demo
PEERS := .venvs/conformance.stamp
ALL_PEERS := .venvs/all.stamp
PYTEST := $(BIN)/python -m pytest
# One worker for each core; a worker takes about 1 GB.
WORKERS := -n logical --maxprocesses 8 --dist worksteal

# `make test CPU=avx2` (or CPU=portable) imitates an older x86 processor for the libraries below the
# engine.
ifeq ($(CPU),avx2)
export ATEN_CPU_CAPABILITY=avx2
export ONEDNN_MAX_CPU_ISA=AVX2
export MKL_ENABLE_INSTRUCTIONS=AVX2
export OPENBLAS_CORETYPE=Haswell
else ifeq ($(CPU),portable)
export ATEN_CPU_CAPABILITY=default
export ONEDNN_MAX_CPU_ISA=SSE41
export MKL_ENABLE_INSTRUCTIONS=SSE4_2
export OPENBLAS_CORETYPE=Nehalem
else ifdef CPU
$(error CPU is avx2 or portable, not $(CPU))
endif

.PHONY: all demo test exhaustive test-all unit conformance gpu check fuzz fix types bench docs clean

all: check test

# Every recipe but these is one line that you could type. Errors of setting up say what to do.
$(READY) $(TRIABLE): pyproject.toml constraints.txt tools/set_up.py
	@command -v $(PYTHON) > /dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinkex needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(PYTHON) tools/set_up.py $(VENV) $(if $(filter $(READY),$@),dev,demo)
	@touch $@ $(TRIABLE)

# Official clients and their cookbook, each in an environment of its own on top of ours.
$(PEERS) $(ALL_PEERS): $(READY) tests/conformance/make_venvs.py
	@$(PYTHON) tests/conformance/make_venvs.py $(if $(filter $(ALL_PEERS),$@),--all)

demo: $(TRIABLE)
	@$(BIN)/tinkex demo

test: $(READY) $(PEERS)
	$(PYTEST) $(WORKERS) -m "not exhaustive" --durations 20 tests

# What is exhaustive: every official client, fifty kills, whole demos and recipes; and, each of them
# longer than all that, disturbed clusters, Ray and every call of a server that may fail.
TESTS := tests
exhaustive: $(READY) $(ALL_PEERS)
	$(PYTEST) $(WORKERS) -m exhaustive --durations 20 $(TESTS)

test-all: test exhaustive

unit: $(READY)
	$(PYTEST) $(WORKERS) -m "not exhaustive" tests/unit tests/contracts tests/property

conformance: $(READY) $(PEERS)
	$(PYTEST) tests/conformance

# Needs a CUDA device: kernels compiled, the engine on the device.
gpu: $(READY)
	$(PYTEST) tests/gpu tests/unit/engine/backends/cuda

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/mypy tests/typing
	$(BIN)/lint-imports

# Each fuzzer for so many minutes: `make fuzz MINUTES=1`. Status 1 on a finding.
MINUTES ?= 10
fuzz: $(READY)
	$(BIN)/python -m tests.property.fuzz_all --minutes $(MINUTES)

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages as a site, in build/docs. A warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks.client_cost
	$(BIN)/python -m benchmarks.engine_cpu

clean:
	rm -rf $(VENV) .venvs build dist out
