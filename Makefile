# `make help` lists the targets. Everything is set up inside this folder: .venv, build, webui/node_modules.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PAGE := appliance/web/static/index.html
NATIVE_SOURCES := $(shell find cuda_ext -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt')

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all check format native clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMPS)/runtime $(STAMPS)/native $(PAGE) ## Everything that `make run` needs

run: setup ## Serve the demo model at http://127.0.0.1:8080 (ARGS="MODEL.gguf --port 9000" for another)
	$(BIN)/tandem serve $(ARGS)

test: setup $(STAMPS)/dev ## All tests that need no GPU, no network and no docker
	$(BIN)/python -m pytest -m "not slow" $(ARGS)
	$(BIN)/python scripts/page.py test

test-all: setup $(STAMPS)/dev ## The slow tests too
	$(BIN)/python -m pytest $(ARGS)
	$(BIN)/python scripts/page.py test

check: setup $(STAMPS)/dev ## Linters and type checks, as CI runs them before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	find cuda_ext -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/shellcheck .ci/run scripts/*.sh

format: $(STAMPS)/dev ## Format Python and C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find cuda_ext -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

native: $(STAMPS)/native ## Build the native module

clean: ## Remove everything that was built
	rm -rf build dist $(VENV) webui/node_modules appliance/web/static

$(STAMPS)/venv: scripts/check_tools.sh
	scripts/check_tools.sh "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: $(STAMPS)/venv pyproject.toml constraints.txt
	$(BIN)/python scripts/install_requirements.py runtime
	@touch $@

$(STAMPS)/dev: $(STAMPS)/runtime
	$(BIN)/python scripts/install_requirements.py dev
	@touch $@

$(STAMPS)/native: $(STAMPS)/runtime $(NATIVE_SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

$(PAGE): $(STAMPS)/runtime webui/package.json webui/package-lock.json webui/build.mjs $(wildcard webui/src/*)
	$(BIN)/python scripts/page.py build
