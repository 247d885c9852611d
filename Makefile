# Two commands do everything on a fresh machine with Python 3.11 and pip: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# A machine that keeps no compiled Python would compile all of tsemon again for each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo site test test-all fuzz lint stack-check compose-check clean
.DELETE_ON_ERROR:

demo: .venv/demo,docs.done
	$(BIN)/tsemon demo

# The documentation, which the server serves at /help. With --quiet, mkdocs would not count warnings.
site: .venv/docs.done
	$(SITE)

# One more than there are cores: tests often wait for a browser, a database or another process. Each further one collects
# all tests and imports all packages once more.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4
# All models of the tests are tiny: a second thread of a process costs more than it brings.
test test-all: export OMP_NUM_THREADS := 1

test: .venv/dev.done
	$(BIN)/python scripts/system_parts.py
	$(PYTEST)

# Everything: both databases for all, every way to train, long faults and searches. Writes docs/compatibility.md.
test-all: .venv/dev.done
	$(BIN)/python scripts/system_parts.py
	$(PYTEST) --all
	$(BIN)/python scripts/compatibility.py

# As in `make test-all`, but with new cases each time, and longer: `make fuzz FUZZ_SECONDS=3600`.
FUZZ_SECONDS ?= 600
fuzz: .venv/dev.done
	$(BIN)/python -m pytest tests/fuzz --fuzz-seconds $(FUZZ_SECONDS)

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo's failing run, through a real Prometheus and a real Alertmanager, to a webhook and back.
stack-check: .venv/dev.done
	$(BIN)/python scripts/system_parts.py
	$(BIN)/python scripts/stack_check.py

# docker-compose.yml and the Dockerfile: their schema and contents, the installation, and each service's command on this machine.
compose-check: .venv/dev.done
	$(BIN)/python scripts/system_parts.py
	$(BIN)/python -m pytest --all tests/test_compose.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("tsemon needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; call make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/%.done: $(BIN)/python pyproject.toml constraints.txt tests/zoo/packages.txt
	@echo "Setting up .venv for tsemon[$*] (once) ..."
	$(INSTALL) '.[$*]'
	$(if $(filter dev,$*),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/zoo/packages.txt)
	$(if $(filter dev demo%,$*),$(SITE))
	@touch $@

clean:
	rm -rf .venv .tsemon dist server/tsemon_server/help .pytest_cache .mypy_cache .ruff_cache .hypothesis
