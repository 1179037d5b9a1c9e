# make demo     install, then train, evaluate and ask a small model (under 5 minutes on 2 cores after installing)
# make test     install, then ruff, mypy, import-linter and the tests
# make test-triton    the GPU kernels in Triton's interpreter, in an environment of their own (.venv-triton)
# make kernel-report  the GPU kernels compiled for four kinds of GPU; writes docs/kernels.md
# make bench    every benchmark, quick
# make wheel    dist/: the source distribution and a wheel with the compiled operators, made from it
# make check-wheel    install that wheel where no compiler is and run the operator tests there
# make setup    install only; PYTHON=python3.12 picks another interpreter, and
#               TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" another build of torch (that one has no CUDA)
# make clean    remove the environment and the caches; logs, stores and runs stay

PYTHON ?= python3
TORCH_ARGS ?=
BIN := .venv/bin
TRITON := PYTHONPATH=src OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 .venv-triton/bin/python
CODE := src tests benchmarks examples tools
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-triton kernel-report lint bench wheel check-wheel setup pins clean
.DEFAULT_GOAL := demo

demo: .venv/.native
	$(BIN)/python -m examples.demo

test: lint
	$(BIN)/python -m pytest
	$(MAKE) test-triton
	$(TRITON) tools/kernel_report.py --check

# One thread: numpy's own threads slow the interpreter down tenfold.
test-triton: .venv-triton/.installed
	TRITON_INTERPRET=1 $(TRITON) -m pytest tests/triton

kernel-report: .venv-triton/.installed
	$(TRITON) tools/kernel_report.py

lint: .venv/.installed-dev .venv/.native
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

# A benchmark has arguments; the other files there are parts of one.
bench: .venv/.installed-dev .venv/.native
	set -e; for name in $(basename $(notdir $(shell grep -lE '(parser.|description=)__doc__' benchmarks/[a-z]*.py))); do \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name --quick; done

# From the source distribution, so that neither leftovers nor this environment's libraries get into the wheel.
wheel: .venv/.installed-dev
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist

check-wheel: wheel
	$(BIN)/python tools/check_wheel.py dist

setup: .venv/.installed-dev .venv/.native

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11); ok or print("turbogr needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11"); sys.exit(not ok)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt $(TORCH_ARGS) torch==2.13.0
	$(BIN)/pip install -c constraints.txt -e .
	@touch $@

# Those compiled operators whose sources changed since they were installed.
.venv/.native: .venv/.installed src/turbogr/ops/native/build.py $(wildcard src/turbogr/ops/native/src/*)
	$(BIN)/python src/turbogr/ops/native/build.py
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	@touch $@

# Torch first and Triton after it: torch for CUDA asks for a Triton of its own, which the pinned one replaces.
.venv-triton/.installed: constraints-triton.txt
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/pip install -c constraints-triton.txt $(TORCH_ARGS) torch
	.venv-triton/bin/pip install -c constraints-triton.txt triton==3.6.0 numpy pytest pytest-timeout hypothesis
	@touch $@

# Pin what the environment holds now, after a change of dependencies and a green `make test`.
pins: .venv/.installed-dev
	{ head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+[a-z0-9]*$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv .venv-triton .venv-peers .venv-tbe .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
