# Every target works on a fresh machine: the virtual environment is made on first use.
SHELL := bash
# The tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
# Another release of torch, or none, in a virtual environment of its own: make test TORCH=2.6.0
TORCH ?=
# Another Python has one of its own as well: make test-fast PYTHON=python3.13
VENV := .venv$(addprefix -torch-,$(TORCH))$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALLED := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
# Tests wait for the processes that they start: two workers more than there are cores, and one more
# where they start none.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4)))
WAITING_WORKERS ?= $(shell echo $$(($(WORKERS) + 1)))
REAL_PATHS := sed -E 's,^\.editable/mp_agent/(exporters|alerting)/,\1/,; s,^\.editable/mp_agent/,agent/,'

# A build of torch for CUDA requires the release of triton that it was built with.
OTHER_TORCH = sed -E '/^triton==/d; s/^torch==.*/$(TORCH:%=torch==%)/; s/^torch==none//' constraints.txt
# Hundreds of programs that tests start end without a last collection of garbage, which takes a
# quarter of the time that one spends on `import torch` and its end.
QUICK_END = 'import os; "PYTEST_VERSION" in os.environ and __import__("atexit").register(__import__("gc").freeze)'
EXTRAS = $(if $(filter none,$(TORCH)),,torch,)export,otlp-grpc

.DEFAULT_GOAL := help
.PHONY: help demo docs pictures test test-fast test-long test-chart compatibility check format generate servers bench gpu-check clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# A file that is new directly in agent/ is live only after another install.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py agent packaging
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(OTHER_TORCH) > $(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group dev \
		--editable '.[$(EXTRAS)]'
	@echo $(QUICK_END) > $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/quick_end.pth
	@touch $@

# DeepSpeed builds from source against the torch that is installed, hence no build isolation.
$(FRAMEWORKS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group frameworks-test \
		--editable '.[comet,mlflow,wandb]'
	$(BIN)/python -m pip install --quiet setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) \
		--no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) \
		fastcore fasttransform 'fastprogress<1.1' cloudpickle matplotlib pandas pillow \
		scikit-learn scipy
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps fastai fastdownload
	@touch $@

demo: $(INSTALLED) ## Train a small transformer, let it go wrong, watch the alerts arrive
	@$(BIN)/python -m examples.demo

LOADED = --dist loadfile --no-loadscope-reorder
# Every worker imports all files that it is given, which takes half a minute of all of them.
MARKED = $(shell grep -rlE --include='test_*.py' '$(1)' tests)
ALONE = $(call MARKED,mark\.alone)

# On two cores these take at most 15 minutes.
test: $(INSTALLED) $(FRAMEWORKS) servers ## Run all tests but the long ones
	$(BIN)/python -m pytest -m 'not long' --numprocesses $(WAITING_WORKERS) $(LOADED) \
		$(addprefix --ignore=,$(call MARKED,^pytestmark.*mark\.(long|alone)))

test-long: $(INSTALLED) $(FRAMEWORKS) servers ## Run the long tests: hosts, launchers, simulated and published runs
	$(BIN)/python -m pytest -m 'long and not alone' --numprocesses $(WAITING_WORKERS) $(LOADED) \
		$(call MARKED,mark\.long)
	$(BIN)/python -m pytest -m 'long and alone' $(ALONE)

# On two cores these take at most three minutes: for every edit.
test-fast: $(INSTALLED) servers ## Run the tests that start no processes and need no framework
	$(BIN)/python -m pytest -W error::ResourceWarning \
		-m 'not slow and not e2e and not alone and not gpu and not long' \
		--ignore=tests/frameworks --ignore=tests/gpu --ignore=tests/hosts --ignore=tests/e2e \
		--numprocesses $(WORKERS) $(LOADED)

test-chart: $(INSTALLED) servers ## Run the chart's tests, with helm, and kubeconform where it is on PATH
	$(BIN)/python -m pytest tests/helm

compatibility: $(INSTALLED) servers ## Record how the fast tests end with TORCH, for docs/compatibility.md
	-PYTEST_ADDOPTS='-p tools.compatibility' $(MAKE) test-fast
	$(BIN)/python -m tools.generate

check: $(INSTALLED) ## Format, lint, types, layers, prose, generated files up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@set -o pipefail; $(BIN)/mypy | $(REAL_PATHS)
	PYTHONPATH=.editable $(BIN)/lint-imports
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.generate --check

format: $(INSTALLED) ## Format and mend what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(INSTALLED) ## Write the rules, tables and docs that come from the catalogs
	$(BIN)/python -m tools.generate

servers: $(INSTALLED) ## Fetch Prometheus, Alertmanager and VictoriaMetrics for tests and demo
	@$(BIN)/python -m tools.servers

docs: $(INSTALLED) ## Build the documentation as a site: site/index.html
	$(BIN)/python -m tools.docs_site

pictures: $(INSTALLED) ## Take the pictures of docs/images again; boards with GRAFANA_RENDERER
	$(BIN)/python -m tools.pictures

bench: $(INSTALLED) ## Measure what the probe costs, in paired runs
	$(BIN)/python -m benchmarks

gpu-check: $(INSTALLED) ## On a CUDA machine: numerics, host syncs and overhead in one table
	$(BIN)/python -m benchmarks.gpu_check

clean: ## Remove everything that was made, virtual environments included
	rm -rf site .venv .venv-* .cache .editable .mypy_cache .ruff_cache .pytest_cache .hypothesis
