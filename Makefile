# Two commands on a fresh machine: `make demo` and `make test`. Both build .venv first, once.
VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c $(SUPPORTED) 2>/dev/null && echo $$python && break; done)
SUPPORTED := 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
STAMP := $(VENV)/.installed

# The first import of a module keeps its bytecode, also where the caller's environment says not to: compiling torch
# anew in every worker process takes seconds and memory.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint schema clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(RUN) -m omni_lab.run experiments/demo.yaml

test: export OMP_NUM_THREADS = 1
test: lint
	$(RUN) -m pytest -q -n 2 --dist worksteal

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

schema: $(STAMP)
	$(RUN) -m omni_lab.experiment > docs/experiment.schema.json

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache

# constraints.txt pins torch, so nothing replaces it by another build. Bytecode is left to the first import
# of each module: compiling all of torch and transformers ahead would take longer than the demo.
$(STAMP): pyproject.toml constraints.txt
	@$(if $(PYTHON),$(PYTHON),false) -c $(SUPPORTED) || { \
		echo "omni_lab needs Python 3.11, 3.12 or 3.13 with the venv module; name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) --no-compile --no-build-isolation --editable ".[dev]"
	@touch $@
