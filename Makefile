# `make fuzz` and `make test` start from nothing: they build .venv first, and again when a pin changes.

PYTHON ?= python3
FUZZ_SECONDS ?= 60

VENV := .venv
READY := $(VENV)/.ready
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: fuzz test

fuzz: $(READY)
	@$(VENV)/bin/python -m kvlockstep fuzz --seconds $(FUZZ_SECONDS)

test: $(READY)
	@echo "== ruff"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "== mypy"
	@$(VENV)/bin/mypy
	@echo "== pytest"
	@$(VENV)/bin/python -m pytest -q -n auto --hypothesis-profile=ci

$(READY): pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvlockstep needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "== $(VENV) 1/4: create"
	@$(PYTHON) -m venv $(VENV)
	@echo "== $(VENV) 2/4: torch (the largest download)"
	@$(PIP) -r requirements/torch.txt
	@echo "== $(VENV) 3/4: tools, pinned"
	@$(PIP) --no-deps -r requirements/ci.txt
	@echo "== $(VENV) 4/4: kvlockstep, from this checkout"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
