# Sets up, tries and checks duomesh. `make help` lists the targets.
#
# Every target that needs the virtual environment makes it first, and again only when this interpreter, this choice
# of packages or a file that names packages has changed.

# Your own choices, in the same form as below; git ignores it.
-include local.mk

PYTHON ?= python3
VENV ?= .venv
# Versions to keep to; empty for the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints-cpu.txt
# Extras of pyproject.toml.
EXTRAS ?= dev
# More words for pip, such as: --extra-index-url https://download.pytorch.org/whl/cpu
PIP_FLAGS ?=
# Test processes, and more words for pytest, such as: -k rope
JOBS ?= 2
ARGS ?=

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --durations=10 -rfEs

# "3.11.7-1a2b3c4d": version, and a checksum of where the interpreter lives and of the choices above.
KEY := $(shell $(PYTHON) -c 'import sys, zlib; \
  print("%d.%d.%d-%08x" % (*sys.version_info[:3], zlib.crc32("|".join([sys.base_prefix, *sys.argv[1:]]).encode())))' \
  '$(CURDIR)' '$(CONSTRAINTS)' '$(EXTRAS)' 2>/dev/null)
STAMP := $(VENV)/.ready-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu lint format mutants clean

help:
	@echo 'make demo      train a small model on both backends, export it and verify the export'
	@echo 'make test      the quick tests'
	@echo 'make test-all  the slow ones too'
	@echo 'make test-gpu  those that need an NVIDIA GPU'
	@echo 'make lint      ruff check, ruff format --check, mypy --strict'
	@echo 'make format    let ruff rewrite what it can'
	@echo 'make mutants   break the code in known ways; every break must be caught by a test'
	@echo 'make setup     only make the virtual environment $(VENV)'
	@echo 'make clean     remove the virtual environment and caches'
	@echo
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) CONSTRAINTS=$(CONSTRAINTS) EXTRAS=$(EXTRAS) PIP_FLAGS JOBS=$(JOBS) ARGS'

setup: $(STAMP)

# A stamp of this key that is merely older than a package file installs in place. Anything else starts over: pip would
# keep a package that satisfies the new choice, although another one was meant.
$(STAMP): pyproject.toml requirements-dev.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "duomesh needs Python 3.11 or newer; this one is " \
	  + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@if [ -e '$(VENV)' ] && [ ! -e '$(VENV)/pyvenv.cfg' ]; then \
	  echo '$(VENV) exists and is no virtual environment; move it, or choose another place: make VENV=... ...' >&2; exit 2; fi
	@[ -e '$@' ] || { echo 'making $(VENV)'; $(PYTHON) -m venv --clear '$(VENV)'; }
	@echo 'installing packages into $(VENV): some minutes and 2 GB the first time, seconds later'
	@$(BIN)/python -m pip install -qq $(PIP_FLAGS) $(addprefix -c ,$(CONSTRAINTS)) -e '.[$(EXTRAS)]'
	@touch '$@'

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(PYTEST) -n $(JOBS) -m 'not slow and not gpu' $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -n $(JOBS) -m 'not gpu' $(ARGS)

# The suite keeps JAX off the GPU unless JAX_PLATFORMS says otherwise; empty lets JAX choose.
test-gpu: $(STAMP)
	JAX_PLATFORMS= $(PYTEST) -m gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

mutants: $(STAMP)
	$(BIN)/python tests/mutation/run.py $(ARGS)

clean:
	if [ -e '$(VENV)/pyvenv.cfg' ]; then rm -rf '$(VENV)'; fi
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-run build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
