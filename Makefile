# The verbs and their set-up. Each works alone on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo demo-large-batch demo-auto demo-finetune devices test test-optimized test-cpus orders xla test-oldest house lint type pins bench evidence docs notebooks browser dist release-check clean

# Two minutes on two cores.
demo: $(READY)
	$(BIN)/python examples/demo.py

demo-large-batch: $(READY)
	$(BIN)/python examples/large_batch.py

demo-auto: $(READY)
	$(BIN)/python examples/auto_boost_resnet.py

# Three minutes; with FULL=1 it chooses the learning rates first, in five.
FULL ?=
demo-finetune: $(READY)
	$(BIN)/python examples/finetune.py $(if $(FULL),--tune)

# Tests of the last bits run on programs as users get them, the others on programs that compile
# faster (tests/conftest.py). A file's tests stay in one process and share what it traced: a tenth
# less to compute. Files are taken in order, so the doctests, which are short, come last and both
# workers end together. The few of the last bits come first and compile the packages' Python for the
# others; the linter and the type checker, of one process each, run beside the set-up. All tests of
# tests/evidence are slow, and so are its imports.
OPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=3
WITH_OPTIMIZED = $(shell grep -rl --include='test_*.py' pytest.mark.optimized tests)
# Virtual devices of the CPU. Tests that need more are skipped, as on a machine with one GPU.
export DEVICES ?= 8
test:
	@$(MAKE) --no-print-directory --jobs=$(WORKERS) test-optimized type lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not optimized" --ignore=tests/evidence

test-optimized: $(READY)
	$(OPTIMIZED) $(BIN)/python -m pytest -n $(WORKERS) -m "optimized and not slow" $(WITH_OPTIMIZED)

# The tests that compare numbers, compiled for the instructions of several processors.
test-cpus: $(READY)
	$(BIN)/python -m tests.cpus

# The oldest versions that are supported, in an environment of their own. AdaSum's tests and
# examples need JAX 0.10, for `jax.lax.pcast` and for the collectives that they count.
# Equinox warns with the oldest JAX.
NEWER := tests/adasum tests/trainers/test_equinox.py optax_boost/_methods/_adasum
# Of the pages, the programs with AdaSum, with Equinox, and with `nnx.List` or `nnx.as_pure`, which
# came with Flax 0.12.
NEWER_PAGES := cards/adasum.md cards/auto_boost.md-NNX guides/fine_tuning.md-NNX guides/trainers.md \
  quickstart.md-Equinox
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet -c tests/oldest.txt -e ".[test]"
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -m "not slow and not optimized" \
	  $(NEWER:%=--ignore=%) \
	  "--deselect=tests/house/test_readme.py::test_readme_block_runs[0]" \
	  $(NEWER_PAGES:%="--deselect=tests/house/test_docs.py::test_the_code_of_a_page_runs[%")
	$(OPTIMIZED) .venv-oldest/bin/python -m pytest -n $(WORKERS) -m "optimized and not slow" \
	  $(filter-out $(NEWER),$(WITH_OPTIMIZED))

# All subsets of the wrappers, beside optax's own, against an interpreter in NumPy; `make test` runs a
# sample. `make orders ORDERS=full` goes through every door around every optimizer. Programs are kept.
ORDERS ?= all
orders: $(READY)
	ORDERS=$(ORDERS) JAX_COMPILATION_CACHE_DIR=$${JAX_COMPILATION_CACHE_DIR:-$(CURDIR)/out/programs} \
	  $(BIN)/python -m pytest -n $(WORKERS) -m "not optimized" tests/contract/test_orders.py

# Which workarounds of docs/xla.md the installed XLA still needs: a line for each, in three minutes.
ROWS ?=
xla: $(READY)
	$(BIN)/python -m tests.xla $(ROWS)

# The sizes of the house: a report.
house: $(READY)
	$(BIN)/python -m tests.house.figures

# The linter and the type checker have an environment of their own, with the versions of tests/tools.txt
# and nothing else. A new rule of ruff, a new check of mypy or a changed type in numpy's stubs would
# otherwise fail `make test` wherever pip is newer, though nothing here has changed. mypy reads the
# packages that are installed beside it, so they are pinned there as well; they are not imported, so
# what they depend on is left out.
TOOLS := .venv-tools
lint: $(TOOLS)/.ready
	$(TOOLS)/bin/ruff check .
	$(TOOLS)/bin/ruff format --check .

type: $(TOOLS)/.ready
	$(TOOLS)/bin/mypy

$(TOOLS)/.ready: tests/tools.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r tests/tools.txt
	touch $@

# Renews tests/tools.txt, then checks with the new versions.
pins: $(TOOLS)/.ready
	$(TOOLS)/bin/python tests/pins.py
	$(MAKE) lint type

bench: $(READY)
	$(BIN)/python -m benchmarks

# All, or parts by name: make evidence PARTS="adasum svrg".
PARTS ?=
evidence: $(READY)
	$(OPTIMIZED) $(BIN)/python -m pytest -s -m slow $(PARTS:%=tests/evidence/test_%_evidence.py)

# Programs for TPUs and GPUs need XLA's compilers for them, in an environment of their own.
METHODS ?=
devices: .venv-devices/.ready
	.venv-devices/bin/python -m benchmarks.devices $(METHODS)

.venv-devices/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-devices
	.venv-devices/bin/python -m pip install --quiet --upgrade pip
	.venv-devices/bin/python -m pip install --quiet -e ".[devices]"
	touch $@

# The outputs that the notebooks store; of all, or of some: make notebooks NOTEBOOKS="race".
NOTEBOOKS ?=
notebooks: $(READY)
	$(BIN)/python docs/run_notebooks.py $(NOTEBOOKS)

docs: $(READY)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	$(BIN)/python -m sphinx -W --keep-going -q -b html -D nb_execution_mode=force docs docs/build/html
	@echo "docs/build/html/index.html"

# The built pages in Chromium (Debian: apt-get install chromium).
browser: docs
	$(BIN)/python -m pip install --quiet -e ".[browser]"
	$(BIN)/python -m pytest -m slow tests/house/test_browser.py

# What would be uploaded, checked; then installed as users do, alone and with each extra, and run from
# elsewhere (tests/dist.py). All extras, or some by name: make dist EXTRAS="core flax".
DIST := .venv-dist
EXTRAS ?=
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/python -m pip install --quiet build twine
	$(DIST)/bin/python -m build --quiet
	$(DIST)/bin/python -m twine check --strict dist/*
	$(DIST)/bin/python -m tests.dist --workers $(WORKERS) $(EXTRAS)

# Addresses and dates that a release needs, which have placeholders until then.
release-check:
	@! grep -n 'optax-boost\.invalid\|1970-01-01' pyproject.toml CITATION.cff || \
	  { echo "release-check: put the public address, and the date, in the place of these."; exit 1; }
	@grep -q '^## 0\.[0-9.]* (20' CHANGELOG.md || \
	  { echo "release-check: CHANGELOG.md has no date for this version."; exit 1; }

# Not compiled: pip does it on one core for all packages, the first import for what it needs. Images
# for containers often forbid that to Python; then every process would compile for itself.
unexport PYTHONDONTWRITEBYTECODE
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "optax_boost needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e ".[test]"
	touch $(READY)

clean:
	rm -rf .venv .venv-tools .venv-oldest .venv-devices .venv-dist build dist docs/build docs/results out
