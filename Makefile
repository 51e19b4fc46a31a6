# make train           set up if needed, then train a robot arm to push a cube (about a minute)
# make test            set up if needed, vLLM too, then run the tests;  make test-all  also learning curves and chaos
# make test-numbers    tests that compare numbers, as other processors would round
# make vllm            add vLLM, for recipes with policy.engine=vllm
# make sims NAME       the environment of a simulator whose packages do not fit here, for env.python=auto
# make lint            formatting, lint and types
# make docs            the site of README and docs/, in build/site
# make docs-check      every command and snippet of the README and docs/
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN = .venv/bin/python
# One thread a process: there are several workers and what they start, and threads that wait for each other eat cores.
# Bytecode is kept even where the machine says not to: hundreds of processes import the same modules.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadscope
ARGS ?=
AVX2 = MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
# MKL obeys MKL_CBWR on every processor, MKL_ENABLE_INSTRUCTIONS on Intel's alone.
SSE = MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default
# A processor without AVX-512 runs AVX2's kernels in `make test`.
ROUNDS = numbers-sse $(if $(shell grep -sm1 avx512 $(CPUINFO)),numbers-avx2)
CPUINFO = /proc/cpuinfo

.PHONY: train test test-all test-numbers numbers-avx2 numbers-sse lint docs docs-check format setup sims vllm

train: setup
	@$(RUN) -m embodied.train recipe=maniskill_ppo $(ARGS)

test: vllm
	@$(PYTEST) -m "not slow and not chaos" $(ARGS)

test-all: vllm
	@$(PYTEST) $(ARGS)

test-numbers: setup
	@$(MAKE) --no-print-directory -j2 --output-sync $(ROUNDS)

# Two processes in all: more would spend most of their time in imports.
numbers-%: PROCESSES = $(if $(filter numbers-avx2,$(ROUNDS)),0,2)

numbers-avx2:
	@$(AVX2) $(PYTEST) -n $(PROCESSES) -m "numbers and not slow and not chaos" $(ARGS)

numbers-sse:
	@$(SSE) $(PYTEST) -n $(PROCESSES) -m "numbers and not slow and not chaos" $(ARGS)

lint: setup
	@$(RUN) -m ruff format --check . && $(RUN) -m ruff check . && $(RUN) -m mypy

docs: setup
	@$(RUN) -c "import mkdocs, mkdocstrings" 2>/dev/null || $(RUN) -m pip install -q --no-build-isolation -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-check: setup
	@$(PYTEST) tests/test_documents.py tests/test_*page*.py $(ARGS)

format: setup
	@$(RUN) -m ruff format . && $(RUN) -m ruff check --fix .

setup:
	@$(PYTHON) scripts/setup.py

vllm: setup
	@$(PYTHON) scripts/setup.py vllm

sims: setup
	@$(RUN) -m embodied.sims $(filter-out sims,$(MAKECMDGOALS)) $(ARGS)

ifeq (sims,$(firstword $(MAKECMDGOALS)))
%:  # the name of a simulator is no target
	@:
endif
