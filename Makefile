# Every target sets up what it needs on a machine with Python 3.11 and make. `make` = check + test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Enough for the demo, which is what most people want first.
TRIABLE := $(VENV)/.ready-for-demo
PEERS := .venvs/conformance.stamp
PYTEST := $(BIN)/python -m pytest

.PHONY: all demo test unit conformance gpu check fix types bench docs clean

all: check test

# Every recipe but these is one line that you could type. Errors of setting up say what to do.
$(READY) $(TRIABLE): pyproject.toml constraints.txt tools/set_up.py
	@command -v $(PYTHON) > /dev/null || { echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or name one: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinkex needs Python 3.11 or newer: make PYTHON=python3.11")'
	@$(PYTHON) tools/set_up.py $(VENV) $(if $(filter $(READY),$@),dev,demo)
	@touch $@ $(TRIABLE)

# The official client and its cookbook, each in an environment of its own, to compare with.
$(PEERS): pyproject.toml tests/conformance/make_venvs.py
	$(PYTHON) tests/conformance/make_venvs.py

demo: $(TRIABLE)
	@$(BIN)/tinkex demo

test: $(READY) $(PEERS)
	$(PYTEST) -n 2 --dist worksteal --durations 20 tests

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

# The pages as a site, in build/docs. A warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python -m benchmarks.client_cost
	$(BIN)/python -m benchmarks.engine_cpu

clean:
	rm -rf $(VENV) .venvs build dist out
