# fedclade: `make demo` and `make test` do all the set-up they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Small models are fastest on one thread a process; tests run in two processes.
export OMP_NUM_THREADS ?= 1
CODE := src tests examples benchmarks
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: help setup demo test test-all lint bench clean

help:
	@echo "make demo      compare methods on digits with planted groups (sets up .venv the first time)"
	@echo "make test      the tests, in minutes"
	@echo "make test-all  those that take longer too"
	@echo "make bench     seconds a round beside fedjax, pfl and Flower (environments of their own in .bench/, 3 GB)"
	@echo "make lint      ruff, mypy, import rules"
	@echo "make clean     remove .venv, caches and runs/"

setup: $(READY)

# torch comes first and alone, so that nothing else pulls another build of it.
$(READY): pyproject.toml constraints.txt
	@echo "fedclade: setting up $(VENV) (first time only, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "fedclade: installing torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "fedclade: installing fedclade and its tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python -m fedclade.cli compare quickstart --methods fedavg,local,ifca,fedsem,flis_hc,flt,cfl,clade

test: $(READY)
	@$(PYTEST) -m "not slow"

test-all: $(READY)
	@$(PYTEST)

lint: $(READY)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(READY)
	@$(BIN)/python benchmarks/bench.py $(ARGS)

clean:
	rm -rf $(VENV) .bench runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
