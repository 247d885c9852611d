# Two commands do everything on a fresh machine with Python 3.11 and pip: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: .venv/demo.done
	$(BIN)/tsemon demo

test: .venv/dev.done lint
	$(BIN)/python scripts/system_parts.py
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("tsemon needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; call make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/%.done: $(BIN)/python pyproject.toml constraints.txt
	@echo "Setting up .venv for tsemon[$*] (once) ..."
	$(INSTALL) '.[$*]'
	@touch $@

clean:
	rm -rf .venv .tsemon dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
