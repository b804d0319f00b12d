# firsttoken: set-up, demonstration, tests. GNU make 3.81 and any POSIX shell suffice.
#
#   make demo                     set up, fetch the model, measure stage by stage, write out/report.html
#   make demo TORCH_INDEX=ADDRESS take torch from another package index, such as one with CPU builds
#   make test                     lint, types, import contracts, tests (at most 10 minutes on 2 cores)
#   make test-faults              processes killed, connections cut, disks full (at most 30 minutes)
#   make test-long                tests with downloads or minutes of work; make test-gpu needs a GPU
#   make docs                     docs/cli.md from the commands' own help
#   make clean                    removes .venv, out and caches; fetched models stay (FIRSTTOKEN_HOME)
#
# PYTHON=… chooses the interpreter, by default the first of python3, python3.13, 3.12 and 3.11 that is new
# enough. pip's own settings (PIP_INDEX_URL, pip.conf …) and HF_ENDPOINT are honoured.

VENV ?= .venv
MODEL ?= smollm2-135m
BIN := $(VENV)/bin

ifeq ($(OS),Windows_NT)
$(error firsttoken does not run on native Windows: use WSL2)
endif

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)

TORCH := $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help setup setup-dev demo test lint test-faults test-long test-gpu docs clean

help:
	@sed -n 's/^#   /  /p' Makefile

# --- set-up: a stamp file per stage, made again when pyproject.toml changes -------------------------------

$(VENV)/.venv-stamp:
	@test -n "$(PYTHON)" || { echo "error: no python of version 3.11 or newer; name one with PYTHON=…" >&2; exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { echo "error: $(PYTHON) is too old, 3.11 is the least; set PYTHON=…" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { echo "error: $(PYTHON) can't make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/.torch-stamp: $(VENV)/.venv-stamp
	@echo "installing into $(VENV): about 0.4 GB to download and 1.7 GB on disk with a CPU build of torch; some GB more"
	@echo "with a CUDA build, which Linux gets without TORCH_INDEX=… unless pip's own settings say otherwise"
	@if test -n "$(TORCH_INDEX)"; then $(PIP) install --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH)"; fi
	@touch $@

$(VENV)/.package-stamp: $(VENV)/.torch-stamp pyproject.toml
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.torch-stamp pyproject.toml
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.package-stamp

setup: $(VENV)/.package-stamp
setup-dev: $(VENV)/.dev-stamp

# --- the main job ------------------------------------------------------------------------------------------

demo: setup
	@$(BIN)/firsttoken pull $(MODEL) >/dev/null
	@$(BIN)/firsttoken bench stages $(MODEL) --max-tokens 12 --html out/report.html --json out/stages.json
	@echo
	@echo "serve it:  $(BIN)/firsttoken serve $(MODEL)"
	@echo "call it:   curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "             -d '{\"model\": \"$(MODEL)\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'"

# --- tests -------------------------------------------------------------------------------------------------

test: lint
	@$(BIN)/firsttoken pull smollm2-135m >/dev/null
	@$(BIN)/python -m pytest -m "not faults and not long and not gpu"

lint: setup-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test-faults test-long test-gpu: setup-dev
	@$(BIN)/firsttoken pull smollm2-135m >/dev/null
	@$(BIN)/python -m pytest -m $(@:test-%=%)

docs: setup-dev
	@$(BIN)/python docs/make_cli.py
	@$(BIN)/python docs/make_api_parameters.py

clean:
	rm -rf $(VENV) out build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
