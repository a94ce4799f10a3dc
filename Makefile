# fedclade: every target first sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# pip prefers a build for this machine, such as 2.13.0+cpu.
TORCH := 2.13.0

# Small models are fastest with one thread per process; tests run in two processes.
export OMP_NUM_THREADS ?= 1
CODE := src tests examples benchmarks tools
# Each process runs neighboring tests, so that it builds their shared fixtures once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help setup demo test test-docs test-all lint docs pages notebooks bench lock clean

help:
	@echo "make demo      compare methods on digits with planted groups (sets up .venv the first time)"
	@echo "make test      the tests, in minutes"
	@echo "make test-docs the tests of the documentation: its commands, code, notebooks and pages"
	@echo "make test-all  all tests, with the slow ones, and the coverage of src/fedclade"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make pages     regenerate the pages of docs/ that come from the code and from results/"
	@echo "make notebooks execute the notebooks and save them with their outputs"
	@echo "make bench     seconds per round of fedclade, fedjax, pfl and Flower (environments in .bench/, 3 GB; needs: fedclade data get cifar10)"
	@echo "make lint      ruff, mypy, import rules"
	@echo "make lock      write locked.txt and locked-dev.txt after a change of pyproject.toml (ARGS=--upgrade: newest versions)"
	@echo "make clean     remove .venv, caches and runs/"

setup: $(READY)

# pip checks downloads against the hashes in locked.txt and locked-dev.txt and installs wheels only, so it builds nothing. The two files are complete
# (--no-deps): without that, pip also looks for a newer version of a package that is required with an extra, and rejects it. Only torch has no
# hash, because each machine has its own build. torch is installed after its locked requirements, so it adds only itself and, for a CUDA build,
# NVIDIA's libraries and triton (hence no --no-deps). The locked hatchling builds fedclade.
$(READY): pyproject.toml locked.txt Makefile
	@echo "fedclade: setting up $(VENV) (first time only, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "fedclade: installing what fedclade needs"
	@$(INSTALL) --only-binary :all: --require-hashes --no-deps -r locked.txt
	@echo "fedclade: installing torch"
	@$(INSTALL) --only-binary :all: torch==$(TORCH)
	@echo "fedclade: installing fedclade"
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $(READY)

# What tests and checks need in addition.
$(TOOLS): $(READY) locked-dev.txt
	@echo "fedclade: installing what the tests need"
	@$(INSTALL) --only-binary :all: --require-hashes --no-deps -r locked-dev.txt
	@touch $(TOOLS)

lock: $(READY)
	@$(BIN)/python tools/release/lock.py torch==$(TORCH) $(ARGS)

demo: $(READY)
	@$(BIN)/python -m fedclade compare quickstart --methods fedavg,local,ifca,fedsem,flis_hc,flt,cfl,clade_groups,clade

test: $(TOOLS)
	@$(PYTEST) -m "not slow and not docs"

test-docs: $(TOOLS)
	@$(PYTEST) -m docs tests/integration/docs

test-all: $(TOOLS)
	@$(PYTEST) --cov=fedclade --cov-report=term:skip-covered

lint: $(TOOLS)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(TOOLS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "site/index.html"

pages: $(TOOLS)
	@$(BIN)/python tools/docs/all_pages.py

notebooks: $(TOOLS)
	@$(BIN)/python tools/docs/notebooks.py

bench: $(READY)
	@$(BIN)/python benchmarks/framework_comparison.py $(ARGS)
	@$(BIN)/python benchmarks/pfl_cifar10.py --peers flower --warm-up 2 --rounds 20 --peer-rounds 20 --turns 3 --out results/speed/pfl_cifar10_cpu.json

clean:
	rm -rf $(VENV) .bench runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
