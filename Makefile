# Every target does the set-up it needs, once: a virtual environment in .venv with the versions of constraints.txt.
# Needs Python 3.11 or newer, and make. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

MODEL   ?=
ARGS    ?=
MINUTES ?= 10
JOBS    ?= 2
PROMPT  ?= def fibonacci(n):

# `quire` reads QUIRE_PROMPT: through the environment a prompt arrives as it was typed, quotes, spaces and dollars too.
unexport PROMPT
generate: export QUIRE_PROMPT := $(value PROMPT)
# A small model writes best a little below temperature 1; ARGS="--temperature 0" is greedy.
generate: export QUIRE_TEMPERATURE ?= 0.7

.DEFAULT_GOAL := help
.PHONY: help set-up test test-quick fuzz matrix soak hostile-soak lint serve generate \
        bench-throughput bench-latency bench-control-plane bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

set-up: $(STAMP) ## make .venv and install the project and its pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(PIP) install -c constraints.txt --no-deps litellm  # it asks for an older huggingface-hub, and does not use it here
	@touch $@

test: $(STAMP) ## run the tests in JOBS=2 processes (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not fuzz and not matrix" -n $(JOBS) --dist loadfile $(ARGS)

test-quick: $(STAMP) ## run the tests that tests/quick.txt names, some of each package (under 90 s on 2 cores)
	$(BIN)/python -m pytest @tests/quick.txt -m "not fuzz and not matrix" -n $(JOBS) --dist loadfile $(ARGS)

fuzz: $(STAMP) ## run the long random tests from a fresh seed, which is printed (QUIRE_FUZZ_SEED repeats it)
	$(BIN)/python -m pytest -m fuzz --timeout 0 $(ARGS)

matrix: $(STAMP) ## run the whole cross product of settings
	$(BIN)/python -m pytest -m matrix --timeout 0 $(ARGS)

soak: $(STAMP) ## load a server for MINUTES=10 with all that goes wrong; fails if anything grows (120 nightly)
	PYTHONPATH=tests $(BIN)/python tests/soak.py $(MINUTES)

hostile-soak: $(STAMP) ## what honest clients notice of hostile ones, in alternating phases, for MINUTES=10 (20 before a release)
	$(BIN)/python bench/hostile_soak.py --minutes $(MINUTES)

lint: $(STAMP) ## check style, types and layers; print line budgets and counts of the structure
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/structure.py

serve: $(STAMP) ## serve the demo model at http://127.0.0.1:8000, or MODEL=...; ARGS="--port 8001"
	@$(BIN)/quire serve $(MODEL) $(ARGS)

generate: $(STAMP) ## complete PROMPT='...' with the demo model, or with MODEL=...; ARGS="--max-tokens 64"
	@$(BIN)/quire generate $(MODEL) $(ARGS)

bench-throughput: $(STAMP) ## tokens per second, everything asked at once; MODEL=..., ARGS="--workload ..."
	$(BIN)/quire bench throughput $(MODEL) $(ARGS)

bench-latency: $(STAMP) ## time to first token and between tokens; MODEL=..., ARGS="--concurrency 4"
	$(BIN)/quire bench latency $(MODEL) $(ARGS)

bench-control-plane: $(STAMP) ## microseconds of Python per sequence and step
	$(BIN)/quire bench control-plane $(ARGS)

bench-peers: $(STAMP) ## Quire beside other engines on MODEL=..., in turn; ARGS="--vllm PYTHON --quick"
	$(BIN)/python bench/peers.py $(MODEL) $(ARGS)

clean: ## remove what the set-up, the tests and the tools left
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
