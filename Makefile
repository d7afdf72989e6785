# Two commands do everything: `make run` and `make test`.
PYTHON ?= python3
EXTRA := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations 10 --durations-min 3
MEASURED_BY := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
.DEFAULT_GOAL := help
.PHONY: help install run test test-slow lint experiments-smoke gpu docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 26

install: .venv/installed  ## make .venv and install dml into it (faiss for the GPU where nvidia-smi answers)

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRA),dev]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # on all cores, where pip would compile on one
	touch $@

run: install  ## train the default configuration and say where the report lies; ARGS="..." are options of another run
	$(BIN)/python -m dml.run $(if $(ARGS),$(ARGS),paths.output_dir=runs/default)

test: install  ## run the tests, a process a core; ARGS="-k abe" or ARGS="-m gpu" chooses others
	$(PYTEST) $(ARGS)

test-slow: install  ## run the tests that take seconds each: whole runs, commands, sweeps, ranks
	$(PYTEST) -m "slow and not exhaustive and not gpu" $(ARGS)

experiments-smoke: install  ## a step of every row of every table and figure on miniature data, a process a core
	OMP_NUM_THREADS=1 $(BIN)/python -m dml.experiment smoke

gpu:  ## measure everything on a CUDA device, beside its goals; with PYTHON=..., else .venv, else python3 as they are
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(MEASURED_BY) -m dml.smoke --gpu $(ARGS)

lint: install  ## ruff, mypy, and which package imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install  ## build the site into site/; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --strict --quiet

clean:  ## remove .venv and caches, keep runs
	rm -rf .venv cache site .mypy_cache .ruff_cache .pytest_cache
