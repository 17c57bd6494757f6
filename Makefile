# Two commands: `make quickstart` and `make test`. Each sets everything up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# OpenMP threads that spin without end starve each other on a busy small machine.
export GOMP_SPINCOUNT ?= 10000

.PHONY: quickstart test check setup format clean help

quickstart: setup  ## pictures -> model -> pictures -> report, in minutes on a CPU
	$(BIN)/darkroom quickstart

test: setup lint  ## lint, types and every test
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

check: setup lint  ## lint, types and the fast tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

.PHONY: lint
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## mend the formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)  ## the virtual environment in .venv, with the pinned packages

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "darkroom needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(READY)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14
