# Everything below works on a fresh machine with Python 3.10+ and make; it installs into .venv and nowhere else.
# TORCH_INDEX=URL takes PyTorch from that package index (the CPU-only one, for instance).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-full lint docs gpu-aot install clean
.DEFAULT_GOAL := demo

demo: install  ## install, let the demo model write, and check it against Hugging Face
	$(BIN)/minipaged generate "ROMEO:" --max-tokens 100
	$(BIN)/minipaged verify

test: install-test  ## the tests that must pass before every commit
	$(BIN)/python -m pytest -m "not slow"

test-full: install-test  ## the same and the long fuzz runs, sweeps and soaks
	$(BIN)/python -m pytest

lint: install-test  ## style and types
	$(PIP) install -q '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.torch  ## the documentation as a site in build/site; any warning is an error
	$(PIP) install -q '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

gpu-aot: install-test  ## compile every GPU kernel, shipped and tuning candidates, for sm_80, sm_90 and sm_100; needs no GPU
	$(BIN)/python tools/gpu/compile_kernels.py --arch 80 90 100 --tuning-space --contract

install: $(VENV)/.torch
	$(PIP) install -q .

install-test: $(VENV)/.torch
	$(PIP) install -q '.[test]'

# PyTorch first and on its own: it is large, and it is the one package whose build depends on the machine.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch>=2.9,<2.14'
	touch $@

clean:
	rm -rf $(VENV) build dist
