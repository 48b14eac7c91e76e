# `make` alone lists the targets. Everything happens in .venv, inside this checkout.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is installed first, so that no requirement can bring another build of it.
LOCK := requirements.lock
TORCH := $(shell grep '^torch==' $(LOCK))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint $(LOCK)
EDITABLE := DDPX_METADATA_ONLY=1 $(PIP_INSTALL) --no-build-isolation --editable
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One more than cores, since ranks wait a lot. By file: ranks live on from test to test.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h') setup.py

.DEFAULT_GOAL := help
.PHONY: help packages setup build demo timeline test test-all sanitize picture peer-test docs wheel test-torch lock lint format parity-table reliability bench gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.deps  ## make .venv with pinned dependencies

packages:  ## install packages of the system that tests need, or say what will be skipped
	@bash scripts/system_packages.sh

build: $(VENV)/.built  ## build the C++ extension in place

demo: build  ## train a small character GPT on 2 ranks (all GPUs, if there are any)
	@$(BIN)/python scripts/demo.py

timeline: build  ## record 20 steps of the demo: summary, trace, picture and page in runs/timeline
	@$(BIN)/python -m ddpx timeline --steps 20 --out runs/timeline examples/char_gpt/train.py -- --steps 60 --out runs/timeline/demo

test: packages build  ## run every test; of large matrices a part
	$(PYTEST)

test-all: packages build  ## run every test, and large matrices in full
	$(PYTEST) --full

sanitize: build  ## AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer; leaks; fuzz
	$(BIN)/python scripts/sanitize.py

peer-test: build  ## torch's own tests of DDP, with ReducerDDP in DDP's place
	$(BIN)/python scripts/peer_test.py

docs: build  ## build the API reference into build/docs; each warning is an error
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env --quiet docs/api build/docs

wheel: build  ## build sdist and wheel into dist, and try each in an empty environment (15 min)
	$(BIN)/python scripts/packages.py

test-torch: build  ## test with another torch, as VERSION=2.12.0, and write the result into README.md (25 min)
	$(BIN)/python scripts/test_torch.py $(VERSION) $(if $(QUICK),--quick)

lock: $(VENV)/.deps  ## write the versions of the packages in .venv into requirements.lock
	$(BIN)/python scripts/lock.py

lint: $(VENV)/.deps  ## ruff, mypy, directions of imports, clang-format: look only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_layers.py
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

format: $(VENV)/.deps  ## ruff, clang-format: mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h')

parity-table: build  ## run the parity matrix and write its table into docs/parity.md
	$(BIN)/python scripts/parity_table.py

reliability: build  ## let ranks fail under ddpx and DDP, and write docs/reliability.md (5 min)
	$(BIN)/python scripts/reliability.py

picture: build  ## draw the README's picture: a step, and the report of a lost rank (1 min)
	$(BIN)/python scripts/readme_picture.py

bench: build $(VENV)/.bench-deps  ## measure all against DDP, gloo and MPICH; write docs/benchmarks.md (20 min)
	$(BIN)/python benchmarks/run.py

gpu:  ## on a machine with a CUDA GPU: build, test, measure into runs/gpu.json (10 min; no .venv)
	$(PYTHON) scripts/gpu.py $(GPU_ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build build-* ddpx/_C*.so compile_commands.json runs $(VENV)/.built

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ddpx needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.deps: pyproject.toml $(LOCK) | $(VENV)/bin/python
	$(PIP_INSTALL) $(TORCH) setuptools wheel
	$(EDITABLE) '.[demo,dev,docs,peer,tools,trainers]'
	@touch $@

# For `bench` alone: without MPICH the rest is measured all the same.
$(VENV)/.bench-deps: $(VENV)/.deps
	$(EDITABLE) '.[bench]' \
	  || echo "the packages of MPICH could not be installed; measuring without it"
	@touch $@

# Not through pip, which builds in a fresh directory each time: ninja then compiles only what changed.
$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(BIN)/python scripts/build.py
	@touch $@
