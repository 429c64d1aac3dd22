# Two commands matter: `make up` starts a cluster with the demo model, `make test` proves the tree.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: up test proto format clean

up: $(STAMP)
	exec $(BIN)/ferryman up

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 --dist loadgroup

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	$(BIN)/python proto/build.py

$(STAMP): pyproject.toml constraints.txt proto/build.py $(wildcard proto/ferryman/wire/v1/*.proto)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) shared/ferryman/wire/v1
