# StreamTune: every task of this repository. `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# deepspeed has no pyproject.toml: unless asked to build it by PEP 517, an older pip warns that it runs setup.py.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 --durations-min=1

export TOKENIZERS_PARALLELISM ?= false
# The tests start hundreds of processes; without bytecode each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart fmt check golden canary test test-all test-slow test-versions test-distributed faults peers conformance suites bench bench-comm cuda-host gpu docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "StreamTune needs Python 3.11 or newer; found $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## virtual environment in .venv with the tested versions

quickstart: $(STAMP)  ## install, then train a small model end to end
	$(BIN)/streamtune sft recipes/quickstart.yaml

fmt: $(STAMP)  ## format and sort imports
	$(BIN)/ruff format src tests benchmarks tools
	$(BIN)/ruff check --fix src tests benchmarks tools

check: $(STAMP)  ## ruff, mypy --strict, and words that may only become fewer (tools/words.py)
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/mypy
	$(BIN)/python -m tools.words

golden: $(STAMP)  ## what users see of this commit, into build/golden: help, refusals, documents, files of runs, plans
	$(BIN)/python -m tools.golden build/golden

canary: $(STAMP)  ## about 150 quick tests with the newest releases that the index has, in build/canary; three minutes
	$(BIN)/python -m tests.canary

test: $(STAMP)  ## the quick tests: a case of every feature (tests/conftest.py); about 7 minutes on 2 cores
	$(PYTEST) -m 'not slow and not full'

test-all: test  ## `make test`, then more cases and long tests; about 45 minutes on 2 cores; STREAMTUNE_CUDA=1 as cuda-host
	STREAMTUNE_CUDA_PYTHON=$$($(BIN)/python -m tests.cuda_host.interpreter --if-made) $(PYTEST) -m 'full and not slow'

test-slow: $(STAMP)  ## what test-all leaves out: further cases of what it tests, hours
	$(BIN)/python -m pytest -n 2 -m slow

test-versions:  ## `make test` with pinned, newest and oldest dependencies in build/versions; VERSIONS=oldest for one, or cuda
	$(PYTHON) -m tests.versions $(VERSIONS)

faults: $(STAMP)  ## kill, starve and corrupt runs; writes docs/reference/reliability.md
	$(BIN)/python -m tests.faults

test-distributed: $(STAMP)  ## everything of several ranks, slow ones too; writes docs/reference/equality.md
	rm -f build/distributed/equality.jsonl
	STREAMTUNE_EQUALITY=1 $(BIN)/python -m pytest -m '' tests/distributed
	$(BIN)/python -m tests.distributed.equality_page

PEERS := build/peers
peers: $(STAMP)  ## keys of axolotl, LLaMA-Factory and ms-swift: their newest releases, by the package index, against the importer's table
	rm -rf $(PEERS) && $(BIN)/python -m pip download --no-deps --dest $(PEERS) axolotl llamafactory ms-swift
	cd $(PEERS) && for wheel in *.whl; do unzip -q -o $$wheel; done
	STREAMTUNE_PEERS=$(PEERS) $(BIN)/python -m pytest -m '' tests/programs/imports/test_import_fields.py

cuda-host: $(STAMP)  ## launches, waits and bytes on CUDA without a device; installs torch for CUDA in build/versions (6 GB)
	python=$$($(BIN)/python -m tests.cuda_host.interpreter) && \
		STREAMTUNE_CUDA_PYTHON=$$python $(BIN)/python -m pytest -m "" tests/cuda_host && \
		$$python -m pytest -m "" tests/ops/test_triton_interpreter.py

gpu: $(STAMP)  ## all that one GPU can tell in 25 minutes, in pieces; writes docs/benchmarks/gpu.md
	$(BIN)/python -m benchmarks.gpu

docs: $(STAMP)  ## regenerate what is made from the code, and build the pages in build/site, links checked
	$(BIN)/streamtune schema > docs/recipe.schema.json
	$(BIN)/python -m tools.reference_pages
	$(BIN)/python -m tools.recipe_headers --page
	$(BIN)/python -m tools.drawings
	$(BIN)/python -m tools.support_matrix
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

conformance: $(STAMP)  ## exactness: tested families and ways to use them, then every causal LM of transformers; writes docs/reference/families.md
	$(BIN)/python -m pytest -m '' tests/exactness tests/engine tests/transparency
	$(BIN)/python -m pytest -m '' -n 2 tests/conformance --families docs/reference/families.md

suites: $(STAMP)  ## the tests of transformers and peft, plain and streamed, an hour and more; writes docs/reference/suites.md
	$(BIN)/python -m tests.suites

bench: $(STAMP)  ## plain autograd, gradient checkpointing and streaming side by side
	$(BIN)/streamtune bench recipes/bench.yaml

bench-comm: $(STAMP)  ## what ranks send in a step: ordinary, streaming, naive chunks; root measures two nodes as well
	$(BIN)/python -m benchmarks.communication

clean:  ## remove the virtual environment, caches and runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
