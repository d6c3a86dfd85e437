# Every target makes .venv on first use; `make PYTHON=... setup` names the interpreter.
BIN := .venv/bin
ENVIRONMENT := .venv/.environment
READY := .venv/.ready
CUDA_SOURCES := $(wildcard csrc/*.cu csrc/*.cuh csrc/*.cpp csrc/*.h)
export PYTHON
# The environment of the caller must not decide what is installed or imported.
unexport VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME
# Without bytecode every process compiles all of its imports again, which doubles their time.
unexport PYTHONDONTWRITEBYTECODE

# The Python of a GPU host, with torch, vLLM and Megatron-core in it; the environment in .venv is for a CPU.
BENCH_PYTHON ?= python3
BENCHES := quantize linear layer head decode_linear memory training rollout verify sync

.PHONY: help setup demo test lint format docs lock clean bench

help:
	@echo "make demo [ARGS=...] | test | lint | format | docs | setup | lock | bench | clean"

setup: $(READY)

demo: $(READY)
	$(BIN)/jetrl demo $(ARGS)

test: lint docs
	$(BIN)/pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(if $(CUDA_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CUDA_SOURCES))
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .cache/import-linter

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(if $(CUDA_SOURCES),$(BIN)/clang-format -i $(CUDA_SOURCES))

# --strict turns every warning into an error; mkdocs.yml makes broken links and anchors warnings.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/docs

bench:
	$(BENCH_PYTHON) -m benchmarks.warm_up
	for bench in $(BENCHES); do $(BENCH_PYTHON) -m benchmarks.bench_$$bench || exit; done
	$(BENCH_PYTHON) -m benchmarks.plot

lock: $(READY)
	bash requirements/lock.sh $(ARGS)

clean:
	rm -rf .venv .cache build dist *.egg-info jetrl_megatron/*.so

$(ENVIRONMENT): requirements/cpu.txt requirements/install.sh
	@bash requirements/install.sh
	@touch $@

$(READY): $(ENVIRONMENT) pyproject.toml setup.py $(CUDA_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
