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

ifeq ($(GPU),)
VENV_FLAGS :=
INSTALL_TORCH = $(BIN)/pip install --quiet $(TORCH)
else
VENV_FLAGS := --system-site-packages
INSTALL_TORCH = $(BIN)/python -c 'import torch, triton' || $(BIN)/pip install --quiet torch triton
endif

.PHONY: venv demo test lint types bench clean

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/dynafuse demo

test: lint types
	DYNAFUSE_STRICT=1 $(if $(GPU),,TRITON_INTERPRET=1) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.test-installed
	$(BIN)/python -m ruff check .

types: $(VENV)/.test-installed
	$(BIN)/python -m mypy

bench: $(VENV)/.bench-installed
	$(BIN)/python -m bench.run --suite models --systems eager,inductor,dynafuse --out bench/results/models.json
	$(BIN)/python -m bench.table bench/results/models.json

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
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
