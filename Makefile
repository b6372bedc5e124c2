# Every target sets itself up and needs only git, make and Python >= 3.12.
#   make demo     compare the methods on SmolLM2, which is fetched once
#   make leaderboard  rank all methods at 1K, 2K and 4K tokens; takes hours
#   make test     run the tests
#   make lint     check style, types and the layering of imports
#   make format   format the code
#   make docs     build the documentation site in .docs/site
#   make tpu-compile  compile everything for TPUs, without one attached
#   make gpu-compile  the same for GPUs
#   make plan     say what a model needs on a slice of TPUs, without one
#   make device-check  compare the kernels with XLA on the TPU or GPU at hand
#   make test-tpu run the tests that compile for TPUs
#   make test-gpu run the tests that compile for GPUs
#   make test-adapters  run the tests with packages of other models, and faiss
#   make peers    set up kvpress in .peers, for benchmark_peers
#   make peer-kernels  compile our kernels beside those of JAX
#   make clean    remove .venv and the caches
# ARGS is passed on: make demo ARGS="--samples=8", make test ARGS="-k cache".

BIN := .venv/bin
READY := .venv/.ready

# Exits with 0 for a Python that can create and fill the environment.
CHECK := import sys, ensurepip; sys.exit(sys.version_info < (3, 12))
PYTHONS := $(PYTHON) python3 python3.12 python3.13 python3.14
FOUND = $(shell for python in $(BIN)/python $(PYTHONS); do \
  "$$python" -c '$(CHECK)' 2>/dev/null && echo "$$python" && break; done)
MISSING := kvjax needs Python 3.12 or newer with venv and pip, and found none \
  as python3, python3.12, python3.13 or python3.14: install one, or name it \
  with PYTHON=/path/to/python

.PHONY: demo leaderboard test lint format docs tpu-compile gpu-compile plan \
  device-check test-tpu test-gpu test-adapters peers peer-kernels clean

demo: $(READY)
	@$(BIN)/python -m kvjax.experiments.compare $(ARGS)

# LENGTHS=1024 for one length. An interrupted run goes on where it stopped.
# Another model, as in MODEL=DIR, needs a folder of its own:
# OUTPUT=results/another. Methods with files learn from this documentation.
LENGTHS := 1024 2048 4096
OUTPUT := results/leaderboard
MODEL := smollm2-135m-instruct
QUERIES := $(OUTPUT)/queries.safetensors
leaderboard: $(READY) $(OUTPUT)/gate/config.json $(QUERIES)
	@for length in $(LENGTHS); do \
	  $(BIN)/python -m kvjax.experiments.compare --model='$(MODEL)' \
	    --length=$$length --samples=24 \
	    --retention=0.75,0.5,0.25,0.1,0.0625,0.05,0.03125 --timed_rounds=1 \
	    --methods=default,kvzip.grad,kvzap:gate='$(OUTPUT)/gate',expected_attention:statistics='$(QUERIES)',qfilters:filters='$(QUERIES)',triattention:statistics='$(QUERIES)' \
	    --output='$(OUTPUT)'/$$length $(ARGS) || exit; \
	done
	@$(BIN)/python -m kvjax.experiments.leaderboard '$(OUTPUT)' \
	  --output='$(OUTPUT)'

$(OUTPUT)/gate/config.json: | $(READY)
	@$(BIN)/python -m kvjax.experiments.train_gate --model='$(MODEL)' \
	  --documents=docs --samples=60 --length=600 --output='$(@D)'

$(QUERIES): | $(READY)
	@$(BIN)/python -m kvjax.experiments.calibrate_queries --model='$(MODEL)' \
	  --documents=docs --output='$@'

test: $(READY)
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy
	@# Cells have untyped functions, but call what there is.
	@$(BIN)/mypy --allow-untyped-defs --disable-error-code=operator \
	  --disable-error-code=var-annotated notebooks/*.py

format: $(READY)
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

device-check: $(READY)
	@$(BIN)/python -m kvjax.experiments.device_check $(ARGS)

# Not --quiet, with which mkdocs counts no warnings. The variable silences an
# advertisement of its successor.
docs: .docs/.ready
	@NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict

# libtpu has its own folder: in .venv, every program would look for a TPU.
tpu-compile: .libtpu/.ready
	@PYTHONPATH=.libtpu JAX_PLATFORMS=cpu \
	  $(BIN)/python -m kvjax.experiments.compile_check $(ARGS)

# So has what compiles for GPUs.
gpu-compile: .cuda/.ready
	@PYTHONPATH=.cuda JAX_PLATFORMS=cpu \
	  $(BIN)/python -m kvjax.experiments.compile_check --platform=gpu $(ARGS)

plan: .libtpu/.ready
	@PYTHONPATH=.libtpu JAX_PLATFORMS=cpu \
	  $(BIN)/python -m kvjax.experiments.plan $(ARGS)

TPU_TESTS := libtpu and not slow
test-tpu: .libtpu/.ready
	@PYTHONPATH=.libtpu JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=0 \
	  $(BIN)/python -m pytest -m '$(TPU_TESTS)'

test-gpu: .cuda/.ready
	@PYTHONPATH=.cuda JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=0 \
	  $(BIN)/python -m pytest -m cuda

# Without faiss, tests of its indexes would be skipped. An environment that was
# set up before they were there may lack it.
test-adapters: .adapters/.ready
	@.adapters/bin/python -c 'import faiss' || \
	  { echo 'Remove .adapters and run this again: it has no faiss.' >&2; \
	  exit 1; }
	@JAX_PLATFORMS=cpu KERAS_BACKEND=jax \
	  .adapters/bin/python -m pytest tests/models/test_adapters*.py \
	  tests/experiments/test_index_construction.py

peers: .peers/.ready

peer-kernels: .libtpu/.ready .cuda/.ready
	@PYTHONPATH=.libtpu:.cuda JAX_PLATFORMS=cpu \
	  $(BIN)/python -m kvjax.experiments.compilation.peer_table

clean:
	@rm -rf .venv .docs .libtpu .cuda .adapters .peers .mypy_cache \
	  .pytest_cache .ruff_cache .import_linter_cache

# If the Python of an existing environment works, it is only updated. Where
# Python writes no bytecode, as in many containers, programs take half the time
# to start with that of pip.
$(READY): pyproject.toml
	$(eval python := $(FOUND))
	$(if $(python),,$(error $(MISSING)))
	@echo "Setting up .venv (a few minutes the first time)"
	@test "$(python)" = $(BIN)/python || "$(python)" -m venv --clear .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --editable '.[dev]'
	@touch $@

# The extra alone: the site is made from the text of the code, without JAX.
EXTRA := import tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"]["docs"])
.docs/.ready: $(READY)
	@echo "Setting up .docs (a minute)"
	@$(BIN)/python -m venv --clear .docs
	@.docs/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-compile $$($(BIN)/python -c '$(EXTRA)')
	@touch $@

# The libtpu version that the installed JAX requires.
WANTED := from importlib.metadata import requires; \
  print(*(name.split(";")[0] for name in requires("jax") if "libtpu" in name))
.libtpu/.ready: $(READY)
	@echo "Fetching libtpu"
	@rm -rf .libtpu
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
	  --no-compile \
	  --target .libtpu $$($(BIN)/python -c '$(WANTED)')
	@touch $@

# JAX's plugin, the assembler and the library of device functions, 265 MB: all
# that compiling takes of CUDA.
PLUGIN := from importlib.metadata import version; \
  print(*(f"jax-cuda13-{name}==" + version("jaxlib") \
  for name in ("plugin", "pjrt")))
.cuda/.ready: $(READY)
	@echo "Fetching JAX's plugin for GPUs"
	@rm -rf .cuda
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
	  --no-compile --target .cuda 'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*' \
	  $$($(BIN)/python -c '$(PLUGIN)')
	@touch $@

# Without what they ask for: pip takes too long to choose among its versions.
.adapters/.ready: $(READY) tests/adapters.txt
	@echo "Setting up .adapters (a few minutes)"
	@$(BIN)/python -m venv --clear .adapters
	@.adapters/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-compile --editable '.[bench,dev]'
	@.adapters/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-compile --no-deps --requirement tests/adapters.txt
	@touch $@

# PyTorch first: of what kvpress asks for, pip would choose a newer one.
.peers/.ready: $(READY)
	@echo "Setting up .peers (a few minutes)"
	@$(BIN)/python -m venv --clear .peers
	@.peers/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-compile torch==2.13.0
	@.peers/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-compile kvpress==0.5.5
	@touch $@
