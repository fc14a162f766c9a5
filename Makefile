# Two commands do everything on a fresh machine: `make run` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON  ?= python3
VENV    ?= .venv
PROFILE ?= cpu
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
PIP     := $(BIN)/python -m pip --disable-pip-version-check

export TOKENIZERS_PARALLELISM ?= false

.PHONY: help run test lint format model ui lab doctor install lock clean
help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

run: model  ## install, fetch the default model, execute every notebook (PROFILE=smoke|cpu|gpu|full)
	$(BIN)/specdec run --all --profile $(PROFILE)

# One thread a process: two processes that share their cores make each other's OpenMP threads wait ten times as long.
test: model lint  ## ruff, mypy and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(READY)  ## convert the default target once into the model cache
	$(BIN)/specdec model fetch

ui: $(READY)  ## serve the MLflow UI on 127.0.0.1 and print the links worth opening
	$(BIN)/specdec ui

lab: model  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_OPTIONS) notebooks

doctor: $(READY)  ## what this machine can do, and what to mend
	$(BIN)/specdec doctor

install: $(READY)  ## create .venv with exactly the versions in requirements.lock

# The lock is a set of constraints, not a list to install: it names the CUDA packages that a GPU
# machine needs, and a machine without a GPU must not download them. So torch is chosen first.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specdec needs Python 3.11 or newer, '$(PYTHON)' is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "'$(PYTHON) -m venv' failed: install your system's python3-venv package."; exit 1; }
	@torch=$$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements.lock); \
	if nvidia-smi -L >/dev/null 2>&1; then echo "GPU found: installing $$torch with CUDA"; \
	elif [ "$$(uname -s)" != Linux ]; then :; \
	elif $(PIP) install -q "$$torch+cpu" 2>/dev/null; then echo "no GPU: installed $$torch+cpu"; \
	else echo "no GPU: installing the CPU build of $$torch through uv"; \
	  $(PIP) install -q -c requirements.lock uv; \
	  $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=cpu "$$torch" || \
	  { echo "No CPU build of $$torch can be reached. Put its wheel in a folder and run: PIP_FIND_LINKS=folder make $(MAKECMDGOALS)"; exit 1; }; fi
	$(PIP) install -q -c requirements.lock -e ".[dev]"
	@touch $@

lock: $(READY)  ## resolve pyproject.toml anew into requirements.lock
	$(BIN)/python -m specdec_core.lab.lock

clean:  ## remove the environment and caches; runs and models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
