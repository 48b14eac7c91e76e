# `make` alone lists the targets. All targets use .venv in this checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is installed first, so that no requirement can install another build of it.
LOCK := requirements.lock
TORCH := $(shell grep '^torch==' $(LOCK))
# One installation at a time in .venv.
PIP_INSTALL := flock $(VENV)/bin/python $(BIN)/python -m pip install --constraint $(LOCK)
EDITABLE := DDPX_METADATA_ONLY=1 $(PIP_INSTALL) --no-build-isolation --editable
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles a module when it is first imported, and keeps the result. Most modules of torch
# are never imported.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
# Ranks often wait, so four workers suit two cores. One worker runs a file, since ranks live on
# from test to test.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.py') setup.py

.DEFAULT_GOAL := help
.PHONY: help packages setup build build-tests demo timeline test test-all test-replicate sanitize picture peer-test foreign-test docs wheel test-torch lock lint format parity-table average-table advice-table reliability bench gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.extra-dev  ## make .venv with pinned dependencies

packages:  ## install the system packages that tests need, or list the tests that will be skipped
	@bash scripts/system_packages.sh

build: $(VENV)/.built  ## build the C++ extension in place

demo: build $(VENV)/.extra-demo  ## train a small character GPT on 2 CPU ranks, or on all GPUs
	@$(BIN)/python scripts/demo.py

timeline: build $(VENV)/.extra-demo  ## record 20 steps of the demo into runs/timeline: summary, trace, picture and page
	@$(BIN)/python -m ddpx timeline --steps 20 --out runs/timeline examples/char_gpt/train.py -- --steps 60 --out runs/timeline/demo

build-tests: packages build $(VENV)/.extra-test  ## build the C++ programs of the tests
	$(BIN)/python scripts/build_tests.py

test: build-tests  ## run most tests, with a part of large matrices
	$(PYTEST)

test-all: build-tests  ## run all tests, also the longest ones, with large matrices in full
	$(PYTEST) --full -m "not alone"; others=$$?; $(BIN)/python -m pytest --full -m alone && exit $$others

test-replicate: build $(VENV)/.extra-test  ## run tests of parity and of DDP's features with ddpx.replicate() in place of the wrapper (6 min)
	DDPX_TEST_FRONT=replicate $(PYTEST) --full -m "not wrapper_only" tests/surface tests/parity/test_replicate_parity.py

sanitize: build $(VENV)/.extra-test  ## run tests under Address-, UndefinedBehavior- and ThreadSanitizer; leaks; fuzz
	$(BIN)/python scripts/sanitize.py

peer-test: build $(VENV)/.extra-test $(if $(VERSION),$(VENV)/.extra-packages)  ## run torch's own tests of DDP with ReducerDDP in DDP's place (VERSION=2.15.0: those of another torch)
	$(BIN)/python scripts/peer_test.py $(if $(VERSION),--torch $(VERSION))

foreign-test: build $(VENV)/.extra-test  ## run suites of torchft, Accelerate, trainers and torch with ReducerDDP in DDP's place, and write docs/compatibility.md (SUITE=torchft: one suite)
	$(BIN)/python scripts/foreign_test.py $(SUITE)

docs: build $(VENV)/.extra-docs  ## build the API reference into build/docs; warnings are errors
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs/api build/docs

wheel: build $(VENV)/.extra-packages  ## build sdist and wheel into dist, and test each in a new environment (15 min)
	$(BIN)/python scripts/packages.py

test-torch: build $(VENV)/.extra-packages  ## test with other versions of torch (VERSION="2.11.0 2.14.1"; ALL=1: more tests; WITH=python3.12: another Python)
	$(BIN)/python scripts/test_torch.py $(VERSION) $(if $(ALL),--all) $(if $(WITH),--python $(WITH))

lock: $(VENV)/.extra-dev  ## write the package versions of .venv into requirements.lock
	$(BIN)/python scripts/lock.py

lint: $(VENV)/.extra-lint  ## check with ruff, mypy, clang-format, and the directions of imports and includes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_layers.py --cpp
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

format: $(VENV)/.extra-lint  ## format and fix with ruff and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h')

parity-table: build $(VENV)/.extra-test  ## run the parity matrix and write its table into docs/parity.md
	$(BIN)/python scripts/parity_table.py

average-table: build $(VENV)/.extra-test  ## compare averages with one process over all items, and write docs/averages.md
	$(BIN)/python scripts/average_table.py

advice-table: build $(VENV)/.extra-test  ## record runs with a known cause, and write what ddpx advises into docs/advice.md (5 min)
	$(BIN)/python scripts/advice_table.py

reliability: build $(VENV)/.extra-test  ## make ranks and hosts fail, and write docs/reliability.md (10 min; hosts need root)
	$(BIN)/python scripts/reliability.py
	$(BIN)/python scripts/simulation_table.py
	$(BIN)/python scripts/hosts_table.py

picture: build $(VENV)/.extra-test  ## draw the README's picture of a step and of a lost rank's report (1 min)
	$(BIN)/python scripts/readme_picture.py

bench: build $(VENV)/.extra-test $(VENV)/.extra-bench $(if $(VERSION),$(VENV)/.extra-packages)  ## compare with DDP, gloo and MPICH, and write docs/benchmarks.md (28 min; VERSION=2.15.0: with this torch, too)
	$(BIN)/python benchmarks/run.py $(if $(VERSION),--torch $(VERSION))

gpu:  ## build, and run on a CUDA GPU what benchmarks/results/gpu.json lacks (9 min; no .venv)
	$(PYTHON) scripts/gpu.py $(GPU_ARGS); code=$$?; $(PYTHON) scripts/gpu_report.py && exit $$code

clean:  ## remove build outputs, but keep .venv
	rm -rf build build-* ddpx/_C*.so compile_commands.json runs $(VENV)/.built

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ddpx needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)

# What the build and `import ddpx` need.
$(VENV)/.deps: pyproject.toml $(LOCK) | $(VENV)/bin/python
	$(PIP_INSTALL) $(TORCH) setuptools wheel ninja
	$(EDITABLE) .
	@touch $@

# The packages of an extra of pyproject.toml.
$(VENV)/.extra-%: $(VENV)/.deps
	$(EDITABLE) '.[$*]'
	@touch $@

# For `bench` only. Without MPICH, `bench` measures everything else.
$(VENV)/.extra-bench: $(VENV)/.deps
	$(EDITABLE) '.[bench]' \
	  || echo "The packages of MPICH could not be installed. Measuring without MPICH."
	@touch $@

# Not through pip, which builds in a new directory each time. Here ninja compiles only changed files.
$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(BIN)/python scripts/build.py
	@touch $@
