# `make fuzz`, `make sglang` and `make test` start from nothing: they build the environments that they need first, and
# again when a pin changes. SGLang has an environment of its own, for its pins are not those of the rest.

PYTHON ?= python3
FUZZ_SECONDS ?= 60

VENV := .venv
READY := $(VENV)/.ready
READY_RAY := $(VENV)/.ray
VENV_SGLANG := .venv-sglang
READY_SGLANG := $(VENV_SGLANG)/.ready
SGLANG_TARGETS := sglang:radix,sglang:unified-python,sglang:unified-rust

# Compiled where there is a compiler, so built again when one of them changes.
COMPILED := $(wildcard $(foreach name,runs tree victims,gpu_impl/$(name).py gpu_impl/compiled/$(name).pxd))

.PHONY: fuzz prove ray sglang test

fuzz: $(READY)
	@$(VENV)/bin/python -m kvlockstep fuzz --seconds $(FUZZ_SECONDS)

sglang: $(READY_SGLANG)
	@$(VENV_SGLANG)/bin/python -m kvlockstep fuzz --target $(SGLANG_TARGETS) --seconds $(FUZZ_SECONDS)

# Half an hour: what holds for all integers, then every state that a small cache reaches.
prove: $(READY)
	@$(VENV)/bin/python -m kvlockstep.fuzz.prove
	@$(VENV)/bin/python -m kvlockstep.fuzz.exhaustive --page-size 1 --pages 3 --seconds 720
	@$(VENV)/bin/python -m kvlockstep.fuzz.exhaustive --page-size 2 --pages 4 --seconds 1200

ray: $(READY_RAY)
	@$(VENV)/bin/python -m pytest -q --hypothesis-profile=ci tests/test_campaign_ray.py

# Ray and an environment for SGLang that are there are brought up to date; what is not there is not built for this.
test: $(READY) $(wildcard $(READY_RAY) $(READY_SGLANG))
	@echo "== ruff"
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@echo "== mypy"
	@$(VENV)/bin/mypy
	@echo "== pytest"
	@$(VENV)/bin/python -m pytest -q -n auto --hypothesis-profile=ci
	@echo "== pytest (SGLang)"
	@if [ -e $(READY_SGLANG) ]; then \
		$(VENV_SGLANG)/bin/python -m pytest -q -n auto --hypothesis-profile=ci tests/sglang; \
	else \
		echo "skipped: needs sglang: $(VENV_SGLANG) is not built, make sglang"; \
		case ",$$KVLOCKSTEP_REQUIRE," in \
			*,sglang,*) echo "KVLOCKSTEP_REQUIRE promises sglang" >&2; exit 1;; \
		esac; \
	fi

# $(call install,ENVIRONMENT,ARGUMENTS OF PIP): what pip said is shown where it fails, and then in one line why.
define install
	@$(1)/bin/python -m pip --disable-pip-version-check install --quiet $(2) 2> $(1)/pip.log || { \
		cat $(1)/pip.log >&2; \
		if grep -q -e "connection broken by" -e "Max retries exceeded" -e "HTTP error 5" -e "Read timed out" $(1)/pip.log; \
		then echo "$(1): the package registry did not answer; what is installed stays, make goes on from there" >&2; \
		else echo "$(1): pip install $(2) failed: $$(grep -m 1 '^ *ERROR' $(1)/pip.log || tail -n 1 $(1)/pip.log)" >&2; \
		fi; exit 1; }
endef

define create
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvlockstep needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "== $(1) 1/4: create"
	@$(PYTHON) -m venv $(1)
endef

$(READY): pyproject.toml requirements/torch.txt requirements/ci.txt $(COMPILED)
	$(call create,$(VENV))
	@echo "== $(VENV) 2/4: torch (the largest download)"
	$(call install,$(VENV),-r requirements/torch.txt)
	@echo "== $(VENV) 3/4: tools, pinned"
	$(call install,$(VENV),--no-deps -r requirements/ci.txt)
	@echo "== $(VENV) 4/4: kvlockstep, from this checkout"
	$(call install,$(VENV),--no-deps --no-build-isolation -e .)
	@touch $@

$(READY_RAY): $(READY) requirements/ray.txt
	@echo "== $(VENV): Ray and what it runs with, pinned"
	$(call install,$(VENV),--no-deps -r requirements/ray.txt)
	@touch $@

$(READY_SGLANG): pyproject.toml requirements/torch.txt requirements/sglang.txt $(COMPILED)
	$(call create,$(VENV_SGLANG))
	@echo "== $(VENV_SGLANG) 2/4: torch (the largest download)"
	$(call install,$(VENV_SGLANG),-r requirements/torch.txt)
	@echo "== $(VENV_SGLANG) 3/4: SGLang and what it runs with, pinned"
	$(call install,$(VENV_SGLANG),--no-deps -r requirements/sglang.txt)
	@echo "== $(VENV_SGLANG) 4/4: kvlockstep, from this checkout"
	$(call install,$(VENV_SGLANG),--no-deps --no-build-isolation -e .)
	@touch $@
