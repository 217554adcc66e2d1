# `make demo` and `make test` do all of their own set-up in .venv; nothing else is needed.
# STORE=s3 has the demo run against a real S3 server on loopback.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STORE ?= file
WORKERS ?= 3

.PHONY: demo test check format docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lastgasp needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python docs/demo/run.py --store $(STORE)

test: check
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV)
