# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make the virtual
# environment .venv and install what they need.

PYTHON ?= python3
LAYER ?= Mamba2
BIN := .venv/bin

.PHONY: demo test test-all lint kernels-check clean

demo: .venv/demo-installed
	$(BIN)/python -m train demo --layer $(LAYER)

# The newest JAX; then the GPU kernels, lowered and simulated without a GPU, with the JAX they are for.
test: .venv/test-installed .venv-kernels/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile
	.venv-kernels/bin/python -m pytest -n 2 tests/pallas_kernels/test_*_mosaic.py

test-all: .venv/test-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow or not slow'

# Compiles every GPU kernel for sm_90a, without a GPU, and checks registers, spills and instructions.
kernels-check: .venv-kernels/installed
	.venv-kernels/bin/python -m pip install --quiet jax-cuda13-plugin==0.11.2 \
	  jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-runtime nvidia-nvjitlink triton
	.venv-kernels/bin/python -m benchmarks.kernels_check

lint: .venv/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/demo-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	touch $@

.venv/test-installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

.venv-kernels/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m venv .venv-kernels
	.venv-kernels/bin/python -m pip install --quiet --editable . jax==0.11.2 flax==0.12.10 pytest \
	  pytest-xdist hypothesis
	touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 12) else \
	f"mamba_jax needs Python >= 3.12; {sys.executable} is {v[0]}.{v[1]} (set PYTHON=...)")'
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .venv-kernels build dist *.egg-info
