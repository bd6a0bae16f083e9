# Needs Python >= 3.11 and make; everything else goes into .venv. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: help demo test check bench clean

help:
	@echo "make demo [DATA=path or URL]  train a forecaster on 2 ranks, with pictures in runs/"
	@echo "make test [ARGS='-k conv']    all tests (ARGS go to pytest)"
	@echo "make check                    format, lint, types, direction of imports"
	@echo "make bench [ARGS=dispatch]    the benchmarks (ARGS: names of files in benchmarks/)"
	@echo "make clean                    remove .venv, caches and what demo and bench wrote"

demo: .venv/made
	$(IN_VENV) scripts/demo $(if $(DATA),--data "$(DATA)") $(ARGS)

test: .venv/made
	$(IN_VENV) scripts/test $(ARGS)

check: .venv/made
	$(IN_VENV) scripts/check

bench: .venv/made
	$(IN_VENV) scripts/bench $(ARGS)

clean:
	rm -rf .venv runs dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/made: pyproject.toml constraints.txt scripts/venv.py
	$(PYTHON) scripts/venv.py .venv
	@touch $@
