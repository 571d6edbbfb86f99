# `make demo` and `make test` are all the set-up there is.
#
# Without an NVIDIA GPU a virtual environment gets the pinned torch and Triton below; kernels then run in Triton's interpreter.
# With one, the environment sees the torch that $(PYTHON) already has, because that one fits the driver.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0 triton==3.7.1
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 2))')

# nvFuser's wheels are for torch 2.10 and Python 3.10 or 3.12, so its tests have an environment of their own, and run there.
NVFUSER_TESTS := tests/lowering/nvfuser
NVFUSER_VENV ?= .venv-nvfuser
NVFUSER_BIN := $(NVFUSER_VENV)/bin
NVFUSER_PYTHON ?= $(shell for found in python3.12 "$$(pyenv root 2>/dev/null)"/versions/3.12*/bin/python3.12; do \
	"$$found" -c 'import venv' 2>/dev/null && echo "$$found" && break; done)

ifeq ($(GPU),)
VENV_FLAGS :=
INSTALL_TORCH = $(BIN)/pip install --quiet $(TORCH)
else
VENV_FLAGS := --system-site-packages
INSTALL_TORCH = $(BIN)/python -c 'import torch, triton' || $(BIN)/pip install --quiet torch triton
endif

.PHONY: venv demo test test-peer test-nvfuser lint types bench clean

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/dynafuse demo

test: lint types
	DYNAFUSE_STRICT=1 $(if $(GPU),,TRITON_INTERPRET=1) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore=$(NVFUSER_TESTS)

# PyTorch's own tests, hours of them on two cores; see tests/peer. MODES="base deep" EXECUTORS=triton choose.
MODES ?= base deep dynamic half bf16 aot
EXECUTORS ?= default triton
test-peer: $(VENV)/.test-installed
	$(BIN)/python -m tests.peer --modes "$(MODES)" --executors "$(EXECUTORS)" --jobs $(JOBS)

test-nvfuser: $(NVFUSER_VENV)/.installed
	DYNAFUSE_STRICT=1 OMP_NUM_THREADS=1 $(NVFUSER_BIN)/python -m pytest -n $(JOBS) --dist worksteal $(NVFUSER_TESTS)

lint: $(VENV)/.test-installed
	$(BIN)/python -m ruff check .

types: $(VENV)/.test-installed
	$(BIN)/python -m mypy

bench: $(VENV)/.bench-installed
	$(BIN)/python -m bench.run --suite models --systems eager,inductor,dynafuse --out bench/results/models.json
	$(BIN)/python -m bench.table bench/results/models.json

clean:
	rm -rf $(VENV) $(NVFUSER_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools is installed first, and isolation is off, so that nothing is fetched where everything is already there.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(INSTALL_TORCH)
	$(BIN)/pip install --quiet "setuptools>=61" wheel
	$(BIN)/pip install --quiet --no-build-isolation -e .
	touch $@

$(VENV)/.%-installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation -e ".[$*]"
	touch $@

$(NVFUSER_VENV)/.installed: pyproject.toml
	@test -n "$(NVFUSER_PYTHON)" || { echo "make test-nvfuser needs Python 3.12 (nvFuser's wheels are for 3.10 and 3.12):" \
	  "install it, or name it with NVFUSER_PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(NVFUSER_PYTHON) -m venv $(NVFUSER_VENV)
	$(NVFUSER_BIN)/pip install --quiet torch==2.10.0 "setuptools>=61" wheel pytest pytest-xdist
	$(NVFUSER_BIN)/pip install --quiet --no-build-isolation -e ".[nvfuser-cu128]"
	touch $@
