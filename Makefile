# `make` alone lists what there is. Settings: PYTHON=python3.12 (the base Python), PDCTL_VENV=/path (instead of .venv),
# ARGS="..." (more arguments for pytest).

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PDCTL_VENV ?= .venv
export PDCTL_VENV
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14 python3.10; do \
	"$$name" -c '' 2>/dev/null && echo "$$name" && break; done)
BIN := $(PDCTL_VENV)/bin
SETUP = $(or $(PYTHON),$(error no Python 3 found on PATH; install one, or say make PYTHON=/path/to/python3)) \
	scripts/setup_runtime.py
SOURCES := pdctl connector scripts tests
ARGS ?=

.PHONY: help demo demo-down setup test test-fast test-long soak lint format docs clean distclean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo:  ## install what it needs, start 1 prefill + 1 decode + router on this machine, send a request
	@$(SETUP) --with cpu
	@"$(BIN)/python" scripts/demo.py up

demo-down:  ## stop the demo
	@if [ -x "$(BIN)/python" ]; then "$(BIN)/python" scripts/demo.py down; else echo "nothing to stop: no $(BIN)/python"; fi

setup:  ## make or update .venv with the CPU run time and the development tools
	@$(SETUP) --with cpu --with dev

test:  ## run all tests (installs what they need; ARGS="-k word" narrows)
	@$(SETUP) --with cpu --with dev
ifdef ARGS
	"$(BIN)/python" -m pytest $(ARGS)
else
	"$(BIN)/python" -m pytest tests/unit -n 2
	"$(BIN)/python" -m pytest tests/integration -n 2 --dist loadfile
	"$(BIN)/python" -m pytest tests/e2e
endif

test-fast:  ## run the unit tests alone (no vLLM needed; seconds)
	@$(SETUP) --with dev
	"$(BIN)/python" -m pytest tests/unit -m "not e2e and not slow" -n 2 -q $(ARGS)

soak:  ## ten minutes of mixed traffic with a fault every 20 s (part of `make test` for two minutes)
	@$(SETUP) --with cpu --with dev
	PDCTL_SOAK_S=600 "$(BIN)/python" -m pytest tests/e2e/faults/test_soak.py -s $(ARGS)

test-long:  ## the end-to-end tests that `make test` leaves out for their time, then `make soak`'s ten minutes
	@$(SETUP) --with cpu --with dev
	"$(BIN)/python" -m pytest tests/e2e -m long $(ARGS)
	@$(MAKE) soak

lint:  ## check format, lint and types; changes nothing
	@$(SETUP) --with dev
	"$(BIN)/ruff" format --check $(SOURCES)
	"$(BIN)/ruff" check $(SOURCES)
	"$(BIN)/mypy"

format:  ## format the sources and fix what the linter can
	@$(SETUP) --with dev
	"$(BIN)/ruff" check --fix $(SOURCES)
	"$(BIN)/ruff" format $(SOURCES)

docs:  ## write docs/checks anew, a page for each check of `pdctl doctor`
	@$(SETUP) --with dev
	"$(BIN)/python" scripts/make_check_pages.py

clean:  ## remove caches, build results and the demo's files (refuses while the demo runs)
	@$(or $(PYTHON),python3) scripts/demo.py assert-stopped
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv and its set-up log too
	rm -rf .venv .venv-setup.*
