# Six verbs and their set-up. Each works alone on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test test-oldest lint type bench evidence docs clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY) lint type
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

# The oldest versions that are supported, in an environment of their own. AdaSum's tests and
# examples need JAX 0.10, for `jax.lax.pcast` and for the collectives that they count.
NEWER := tests/test_adasum.py tests/test_adasum_processes.py optax_boost/_adasum.py
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet -c tests/oldest.txt -e ".[test]"
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -m "not slow" $(NEWER:%=--ignore=%)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

evidence: $(READY)
	$(BIN)/python -m pytest -m slow

docs: $(READY)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/build
	@echo "docs/build/index.html"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "optax_boost needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $(READY)

clean:
	rm -rf .venv .venv-oldest build dist out
