# `make help` lists the targets. Everything is set up inside this folder: .venv, build, webui/node_modules.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PAGE := appliance/web/static/index.html
NATIVE_SOURCES := $(shell find cuda_ext -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name 'CMakeLists.txt')
FORMATTED := find cuda_ext -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
# CUDA=1 builds the native module for CUDA cards, ARCHITECTURES="90;120" for these alone; it stays so until CUDA=0.
NATIVE_OPTIONS := $(if $(CUDA),-C cmake.define.TANDEM_CUDA=$(if $(filter 0,$(CUDA)),OFF,ON)) $(if $(ARCHITECTURES),-C cmake.define.CMAKE_CUDA_ARCHITECTURES="$(ARCHITECTURES)")
EMULATED := build/emulated

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-emulated check image format native device-code clean always

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMPS)/runtime $(STAMPS)/native $(PAGE) ## Everything that `make run` needs

run: setup ## Serve the demo model at http://127.0.0.1:8080 (ARGS="MODEL.gguf --port 9000" for another)
	$(BIN)/tandem serve $(ARGS)

test: setup $(STAMPS)/dev ## All tests that need no GPU, no network and no docker
	$(BIN)/python -m pytest -m "not slow" $(ARGS)
	$(MAKE) test-emulated
	$(BIN)/python scripts/page.py test

test-emulated: setup $(STAMPS)/dev $(STAMPS)/emulated ## The tests of the code for CUDA cards, on emulated cards
	$(BIN)/python -m pytest tests/card --native $(EMULATED)/_native*.so $(ARGS)

test-all: setup $(STAMPS)/dev ## The slow tests too
	$(BIN)/python -m pytest $(ARGS)
	$(MAKE) test-emulated
	$(BIN)/python scripts/page.py test

check: setup $(STAMPS)/dev ## Linters and type checks, as CI runs them before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(FORMATTED) | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/shellcheck .ci/run scripts/*.sh
	$(BIN)/python scripts/check_deployment.py

image: setup $(STAMPS)/dev ## Build the container image on a local base and smoke it; needs a docker engine, or root and Debian's docker.io
	$(BIN)/python scripts/image.py all $(ARGS)

format: $(STAMPS)/dev ## Format Python and C++, write the chart's schema
	$(BIN)/python scripts/chart_schema.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(FORMATTED) | xargs $(BIN)/clang-format -i

native: $(STAMPS)/native ## Build the native module (CUDA=1: for CUDA cards)

device-code: $(STAMPS)/runtime ## Compile the code for CUDA cards with nvcc, for one architecture
	$(BIN)/python scripts/device_code.py

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

$(STAMPS)/native: $(STAMPS)/runtime $(NATIVE_SOURCES) $(if $(CUDA),always)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps $(NATIVE_OPTIONS) -e .
	@touch $@

$(STAMPS)/emulated: $(STAMPS)/runtime $(NATIVE_SOURCES)
	$(BIN)/cmake -S cuda_ext -B $(EMULATED) -G Ninja --log-level=WARNING -DTANDEM_CUDA=EMULATED -DCMAKE_BUILD_TYPE=Release \
	    -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	    -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" >/dev/null
	$(BIN)/cmake --build $(EMULATED) -- --quiet
	@touch $@

$(PAGE): $(STAMPS)/runtime webui/package.json webui/package-lock.json webui/build.mjs $(wildcard webui/src/*)
	$(BIN)/python scripts/page.py build
