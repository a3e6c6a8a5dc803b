# make demo        a small GPT trained on a mesh of 4, and the proof that it equals one device
# make test        lint, types, sizes, and every test
# make test-quick  the same without the slow tests

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The ops of the demo and the tests are small: more threads only wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-quick check clean

demo: $(VENV)/.ready
	$(PY) examples/train_gpt.py --mesh dp=2,tp=2

test: check
	$(PY) -m pytest -n $(JOBS)

test-quick: check
	$(PY) -m pytest -n $(JOBS) -m "not slow"

check: $(VENV)/.ready-dev
	$(PY) -m ruff check
	$(PY) -m pyright
	$(PY) .ci/sizes.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The released torch by its plain version: PyPI gives the build that fits the platform, so no other index has to be
# reachable. On Linux x86-64 that build carries CUDA and runs without it too.
$(VENV)/.torch: | $(VENV)/bin/python
	$(PY) -m pip install "torch==2.13.0"
	touch $@

$(VENV)/.ready: pyproject.toml | $(VENV)/.torch
	$(PY) -m pip install -e .
	touch $@

# Type checkers do not follow an editable install of a mapped folder: src/ holds it under its import name.
$(VENV)/.ready-dev: pyproject.toml | $(VENV)/.torch
	$(PY) -m pip install -e ".[dev]"
	mkdir -p $(VENV)/src
	ln -sfn ../.. $(VENV)/src/meshwright
	touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) build out .pytest_cache .ruff_cache .hypothesis
