# Commands of the project; `make help` lists them. PYTHON=... chooses the interpreter.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

# The stamp holds which python made .venv, and in which folder: when either is another now, or when
# the python in .venv no longer runs, .venv is made again.
ORIGIN := import os, sys; print(sys.version.split()[0], os.path.realpath(sys.base_prefix), os.getcwd())
WANTED := $(shell "$(PYTHON)" -c '$(ORIGIN)' 2>/dev/null)
FOUND := $(shell $(BIN)/python -c pass 2>/dev/null && cat $(STAMP) 2>/dev/null)
ifneq ($(WANTED),$(FOUND))
STALE := stale
endif

.DEFAULT_GOAL := help
.PHONY: help demo test check docs clean stale

help: ## list the commands
	@grep -E '^[a-z%-]+:.*## ' Makefile | sed -E 's/^([a-z%-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(STAMP) ## run the demonstration
	@$(BIN)/llqr demo

test: check ## run the checks, then the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-%: $(STAMP) ## run a part of the tests: make test-exact runs tests/test_exact*.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_$**.py

check: $(STAMP) ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Look at it: $(BIN)/python -m http.server --directory site, then http://localhost:8000"

clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

stale:

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt $(STALE)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "llqr needs Python 3.11 or newer: '$(PYTHON)' is missing or older." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (this takes some minutes the first time) ..."
	@"$(PYTHON)" -m venv --clear $(VENV)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[frameworks,docs,dev]' -e './lab[peers]'
	@"$(PYTHON)" -c '$(ORIGIN)' > $(STAMP)
